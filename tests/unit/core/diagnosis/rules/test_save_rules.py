"""Findings about full storage and slow storage, with their evidence; the usual speed is no finding."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.observation import JobSeen, SavesSeen, StorageSeen
from orchestrator.core.facts import findings as f

GB = 10**9


class Job:
    """Two ranks; their storage is reported every two seconds."""

    def __init__(self) -> None:
        self.diagnosis = Diagnosis(0.0)
        self.now = 0.0

    def look(self, seconds: float, *ranks: dict[str, Any], saves: SavesSeen | None = None) -> list[f.Finding]:
        storage = tuple(StorageSeen(rank=number, **values) for number, values in enumerate(ranks))
        for _ in range(int(seconds / 2.0)):
            self.now += 2.0
            seen = JobSeen(num_ranks=2, storage=storage, saves=saves or SavesSeen())
            self.diagnosis.observe(seen, self.now, self.now)
        return list(self.diagnosis.findings)

    def writes(self, count: int, seconds: float) -> None:
        for number in range(1, count + 1):
            self.look(2.0, *({"writes": number, "seconds": seconds, "written_bytes": GB},) * 2)


def test_a_storage_without_room_for_the_next_checkpoint_is_full() -> None:
    job, room = Job(), {"writes": 1, "written_bytes": GB}
    assert job.look(60.0, room | {"free_bytes": 2 * GB + 1}, room | {"free_bytes": 9 * GB}) == []
    (found,) = job.look(30.0, room | {"free_bytes": GB}, room | {"free_bytes": 9 * GB})
    assert isinstance(found, f.StorageFull)
    assert found.sentence() == "the storage of checkpoints has 953.7 MiB free, and a checkpoint takes 1.9 GiB"
    assert "checkpoint.keep" in found.advice("a")
    assert job.look(30.0, room | {"free_bytes": 9 * GB}, room | {"free_bytes": 9 * GB}) == []


@pytest.mark.parametrize("cause", sorted(d.STORAGE_FULL))
def test_a_save_that_fails_for_want_of_room_is_a_full_storage_and_not_a_failing_one(cause: str) -> None:
    job, failing = Job(), SavesSeen(failures=5, said="0 bytes free", cause=cause)
    (found,) = job.look(30.0, saves=failing)
    assert isinstance(found, f.StorageFull)
    assert found.sentence().endswith("has no room (0 bytes free)")
    (other,) = Job().look(30.0, saves=SavesSeen(failures=5, said="Input/output error", cause="EIO"))
    assert other.sentence() == "checkpoints do not reach storage: 5 tries failed (Input/output error)"


def test_a_write_that_takes_far_longer_than_usual_is_slow_on_its_rank() -> None:
    job = Job()
    job.writes(5, 2.0)
    usual = {"writes": 5, "seconds": 2.0, "written_bytes": GB}
    assert job.look(30.0, usual, usual | {"busy_seconds": d.LEAST_WRITE_SECONDS - 1.0}) == []
    (found,) = job.look(30.0, usual, usual | {"busy_seconds": 40.0})
    assert isinstance(found, f.StorageSlow)
    assert (found.rank, found.busy, found.seconds) == (1, True, 40.0)
    assert "the newest write of a checkpoint of rank 1 has taken 40s, where 2s is usual" in found.sentence()
    assert "iostat" in found.advice("a")


def test_on_all_ranks_it_is_the_job_and_ends_with_the_next_quick_write() -> None:
    job = Job()
    job.writes(5, 2.0)
    slow = {"writes": 6, "seconds": 60.0, "written_bytes": GB}
    (found,) = job.look(30.0, slow, slow)
    assert (found.kind, found.rank) == ("storage_slow", None)
    quick = {"writes": 7, "seconds": 2.0, "written_bytes": GB}
    assert job.look(60.0, quick, quick) == []


def test_a_storage_that_has_always_been_slow_is_told_of_where_training_waits_for_it() -> None:
    job = Job()
    job.writes(6, 60.0)
    assert job.look(2.0) == []
    found: list[f.Finding] = []
    for tick in range(100):
        found = job.look(2.0, saves=SavesSeen(waited_seconds=0.5 * 2.0 * tick))
    (slow,) = found
    assert isinstance(slow, f.StorageSlow)
    assert slow.sentence() == f"training waits for the storage of checkpoints for {slow.share:.0%} of the time"
    assert d.WAITING_SHARE < slow.share <= 0.5


def test_the_first_write_may_take_minutes() -> None:
    first = {"busy_seconds": d.FIRST_WRITE_SECONDS - 1.0}
    assert Job().look(60.0, first, first) == []
    forever = {"busy_seconds": d.FIRST_WRITE_SECONDS + 1.0}
    (found,) = Job().look(60.0, forever, forever)
    assert "has taken 10m01s" in found.sentence()
