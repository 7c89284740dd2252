"""A disk that fails to sync: what was refused is not there after a restart, and what is unknown is called so."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.disk import Disk, trouble_of
from orchestrator.store.errors import DiskFullError, disk_remedy, disk_sentence
from orchestrator.store.records import DiskTrouble
from orchestrator.store.store import Store
from tests.support import disks

if TYPE_CHECKING:
    from collections.abc import Callable

    Open = Callable[..., Store]
    Run = Callable[..., Any]

SUBMIT = """
import asyncio, os, sys
from pathlib import Path
from orchestrator.store.store import Store
from tests.unit.store.lives import add

async def main():
    store = Store.open(Path(sys.argv[1]), reserve=None, min_free_bytes=0)
    await add(store, "kept-aaaaaa")
    Path(os.environ["FAILING_COUNT"]).write_text(sys.argv[2].ljust(6))
    try:
        await add(store, "lost-aaaaaa")
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)  # as a daemon that is killed: the log stays as it is

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("failures", "said", "left"),
    [(1, "DiskFullError", ["kept-aaaaaa"]), (1000, "OutcomeUnknownError", None)],
    ids=["once", "for good"],
)
def test_a_job_that_was_refused_is_gone_after_a_restart(
    path: Path, tmp_path: Path, open_store: Open, run: Run, failures: int, said: str, left: list[str] | None
) -> None:
    environ = {**os.environ, **disks.failing_fsync(tmp_path, "-wal", 0)}
    command = [sys.executable, "-c", SUBMIT, str(path), str(failures)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.split() == [said], done.stderr
    found = [job.id for job in run(open_store().load_live())]
    assert left is None or found == left
    assert found[0] == "kept-aaaaaa"


def test_each_trouble_of_a_disk_has_its_own_sentence(tmp_path: Path) -> None:
    codes = {
        errno.EIO: DiskTrouble.FAILING,
        errno.EROFS: DiskTrouble.READ_ONLY,
        errno.ENOSPC: DiskTrouble.FULL,
        errno.EDQUOT: DiskTrouble.FULL,
        errno.ENOENT: None,
    }
    for code, trouble in codes.items():
        assert trouble_of(OSError(code, os.strerror(code)), tmp_path) is trouble
    assert len({disk_sentence(trouble, tmp_path) for trouble in DiskTrouble}) == len(DiskTrouble)
    assert len({disk_remedy(trouble, tmp_path) for trouble in DiskTrouble}) == len(DiskTrouble)


def test_a_disk_without_inodes_or_read_only_is_told_from_a_full_one(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, 200) as where:
        Store.open(where / "store", reserve=None).close()
        disk = Disk(where / "store", reserve=None, reserve_bytes=0, min_free_bytes=1)
        assert disk.status().trouble is None
        subprocess.run(["mount", "-o", "remount,nr_inodes=40", str(where)], check=True)
        assert disk.status().trouble is DiskTrouble.NO_INODES
        for number in range(60):
            try:
                (where / str(number)).touch()
            except OSError:
                break
        assert disk.trouble() is DiskTrouble.NO_INODES
        with pytest.raises(DiskFullError, match="has no inodes left for new files"):
            Store.open(where / "store", reserve=None)
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        assert (disk.status().trouble, disk.trouble()) == (DiskTrouble.READ_ONLY, DiskTrouble.READ_ONLY)
