"""A small file system of one's own, to be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(parent: Path, mebibytes: int) -> Iterator[Path]:
    """A directory in ``parent`` that is a file system of that size; skips the test where nobody may mount one."""
    where = parent / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system of our own is not permitted")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def free_bytes(directory: Path) -> int:
    """What is left on a file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
