"""Filling a disk for a drill: refusals, and removal of the filler however the drill ends."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import EXIT_REFUSED, RefusedError
from orchestrator.api.server.testing import FakeService
from orchestrator.api.views import CheckpointView, RankView
from orchestrator.cli.drills.drills import DiskFiller, file_system_kind, refuse_to_fill
from tests.support import disks
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

MIB = 1024**2
HOLD = """
import pathlib, sys, time
from orchestrator.cli.drills.drills import DiskFiller
held = DiskFiller(pathlib.Path(sys.argv[1]))
held.fill()
print("full", flush=True)
time.sleep(60)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a file system of 8 MiB."""
    with disks.small_disk(tmp_path, 8) as where:
        yield where


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def test_a_ballast_leaves_no_byte_and_gives_all_back(small_disk: Path) -> None:
    free = refuse_to_fill(small_disk, much=False)
    assert free == free_bytes(small_disk)
    (small_disk / "old").write_bytes(bytes(MIB))
    with DiskFiller(small_disk) as held:
        assert held.fill() >= 6 * MIB
        (small_disk / "old").unlink()
        assert held.fill() >= 7 * MIB, "what became free meanwhile is taken, too"
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "new").write_bytes(b"x")
        assert [p.name for p in small_disk.iterdir()] == ["new"]
    (small_disk / "new").unlink()
    assert free_bytes(small_disk) == free


def test_a_ballast_goes_with_the_process_that_holds_it(small_disk: Path) -> None:
    free = free_bytes(small_disk)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(small_disk)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"full\n"
        assert free_bytes(small_disk) == 0
    finally:
        process.kill()
        process.communicate()
    wait_until("the room is there again", lambda: free_bytes(small_disk) == free)
    assert list(small_disk.iterdir()) == []


def test_where_others_write_nothing_is_filled(tmp_path: Path, small_disk: Path) -> None:
    with pytest.raises(RefusedError, match="other programs need") as caught:
        refuse_to_fill(small_disk, much=True, common=(str(small_disk),))
    assert "checkpoint.storage_path" in caught.value.hint
    with pytest.raises(RefusedError, match="others may share"):
        refuse_to_fill(small_disk.__class__("/proc"), much=True, common=())
    assert file_system_kind(small_disk) == "tmpfs"


def test_drills_below_the_job_are_refused_where_they_cannot_be_done(
    orch: Callable[..., Outcome], served: ServedFake
) -> None:
    here = RankView(rank=0, node=os.uname().nodename, gpu_uuids=(), pid=1)
    job = served.do(lambda service: service.add(state="RUNNING", num_workers=1, gpus=(here,)))
    for options, words in (
        (("--kill", "ray"), "the daemon did not start the Ray that it uses"),
        (("--kill", "agent"), "has no process on this machine"),
        (("--fill-disk",), "has not saved yet"),
    ):
        done = orch("drill", job.id, *options, "--yes")
        assert (done.code, words in done.err) == (EXIT_REFUSED, True), done.err
    for path, words in (
        ("s3://bucket/x/1", "a storage that is not a disk"),
        ("/nowhere/1", "does not exist on this machine"),
    ):
        checkpoint = CheckpointView(step=1, at=1.0, path=path)
        served.do(partial(FakeService.save, ref=job.id, checkpoint=checkpoint))
        done = orch("drill", job.id, "--fill-disk", "--yes")
        assert (done.code, words in done.err) == (EXIT_REFUSED, True), done.err
