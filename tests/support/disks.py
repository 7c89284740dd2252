"""File systems of a test's own: a small one to fill, one that loses what was not synced, and fsyncs that fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.support.stack import kill_all

_EXT4_IOC_SHUTDOWN: Final = 0x8004587D  # _IOR('X', 125, __u32), of linux/fs/ext4; Python has no name for it
_NO_LOG_FLUSH: Final = 2


@contextlib.contextmanager
def small_disk(parent: Path, mebibytes: int, *, kind: str = "tmpfs") -> Iterator[Path]:
    """Mount a file system of that size in ``parent``; yield its directory. Skips the test where mounting is forbidden.

    ``kind`` ext4 uses a file as its disk: there, unlike in memory, names and directories take blocks too.
    """
    where = parent / "disk"
    where.mkdir()
    if kind == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "tmpfs", str(where)]]
    else:
        image = parent / "disk.image"
        with image.open("wb") as file:
            file.truncate(mebibytes * 1024 * 1024)
        commands = [
            ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(where)],
        ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"{error.filename} is missing")
        if done.returncode != 0:
            pytest.skip(f"mounting a file system of our own is not permitted: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free, in the file that fills the disk, which may exist already, or in a new one; return the former."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for _ in range(100):  # blocks that were freed or promised are counted only after a while
            for size in (65536, 4096, 512, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            os.fsync(file.fileno())
            if os.statvfs(disk).f_bavail <= 1:
                break
        else:
            raise AssertionError(f"{os.statvfs(disk).f_bavail} blocks of {disk} cannot be filled")
    # ext4 may reserve a block for the tree of the large file, which that file does not get; another file might.
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=disk, prefix="ballast-", delete=False) as last:
        last.write(b"x")
        last.flush()
        os.fsync(last.fileno())
    return ballast


def free_bytes(directory: Path) -> int:
    """Return the free space of a file system, in bytes."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def failing_fsync(folder: Path, suffix: str, times: int) -> dict[str, str]:
    """Return the environment of a process in which ``times`` fsyncs of files with that end of their path fail. Needs gcc."""
    library, count = folder / "failing_disk.so", folder / "failures"
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    count.write_text(f"{times:<6}")
    return {"LD_PRELOAD": str(library), "FAILING_SUFFIX": suffix, "FAILING_COUNT": str(count)}


class LossyDisk:
    """An ext4 file system in a file of ``parent`` that loses, when its power is cut, what was not synced. Needs root.

    Skips the test, with the reason, where mounting is forbidden; a campaign without pytest's runner sees that as an exception.
    """

    def __init__(self, parent: Path, mebibytes: int = 2048) -> None:
        self.where, self._image = parent / "disk", parent / "disk.image"
        self.where.mkdir()
        with self._image.open("wb") as file:
            file.truncate(mebibytes * 1024 * 1024)
        _run_or_skip(["mkfs.ext4", "-q", "-F", str(self._image)])
        self._mount()

    def _mount(self) -> None:
        _run_or_skip(["mount", "-o", "loop", str(self._image), str(self.where)])

    def cut(self) -> None:
        """Cut the power: from now on nothing can be written, and what was not synced is lost."""
        handle = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def boot(self) -> None:
        """Kill every process that still has a file of the disk open, and mount what the disk kept."""
        self._unmount()
        # Where another mount namespace still has a copy of the mount, mounting the same file again would yield the same, dead file system.
        kept = self._image.rename(self._image.with_suffix(".cut"))
        subprocess.run(["cp", "--sparse=always", str(kept), str(self._image)], check=True)
        kept.unlink()
        self._mount()

    def close(self) -> None:
        """Unmount the disk and remove its file."""
        self._unmount()
        self._image.unlink()

    def _unmount(self) -> None:
        kill_all(lambda: _users_of(self.where), f"what uses {self.where}")
        subprocess.run(["umount", str(self.where)], check=True)


def _users_of(where: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            proc = Path("/proc", str(process.pid))
            links = [os.readlink(proc / "cwd"), *(os.readlink(link) for link in (proc / "fd").iterdir())]
            if any(link.startswith(f"{where}/") for link in links) or f"{where}/" in (proc / "maps").read_text():
                found.append(process)
    return found


def _run_or_skip(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{error.filename} is missing")
    if done.returncode != 0:
        pytest.skip(f"mounting a file system of our own is not permitted: {done.stderr.strip()}")
