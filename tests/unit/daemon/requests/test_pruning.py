"""What pruning counts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from orchestrator.daemon.requests.pruning import _size


class Listing:
    """What os.scandir returns; ``then`` is called once all of it was read."""

    def __init__(self, entries: list[os.DirEntry[str]], then: Any) -> None:
        self._entries = iter(entries)
        self._then = then

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._then()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)


def test_what_another_prune_removes_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, scandir = tmp_path / "job", os.scandir
    for name in ("gone", "kept"):
        (job / name).mkdir(parents=True)
        (job / name / "file").write_text("four")
    (job / "log").write_text("gone, too")
    (job / "link").symlink_to(job / "kept" / "file")

    def remove() -> None:
        shutil.rmtree(job / "gone", ignore_errors=True)
        (job / "log").unlink(missing_ok=True)

    def listed(path: Any) -> Any:
        with scandir(path) as found:
            entries = list(found)
        return Listing(entries, remove if path in (job, str(job)) else lambda: None)

    monkeypatch.setattr(os, "scandir", listed)
    assert _size(job) == 4
