"""Findings from ranks' processes without reports of their scripts: waiting, starved input, memory that runs out."""

from __future__ import annotations

import pytest

from benchmarks.insight.traces import JobModel
from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.observation import JobSeen, ProcessSeen
from orchestrator.core.facts import findings as f
from tests.support.records import replace

GIB = 2**30


class Ranks:
    """Processes by rank: CPU use, shares of samples, and growth in bytes per second; observed every two seconds."""

    def __init__(self, *ranks: dict[str, float], grouped: bool = True, available: int | None = None) -> None:
        self.ranks = ranks
        self.grouped = grouped
        self.available = available

    def seen(self, at: float) -> tuple[ProcessSeen, ...]:
        told = 5.0 * (at // 5.0)  # the rank actor reports every five seconds
        return tuple(
            ProcessSeen(
                rank=number,
                at=told,
                cpu_seconds=told * rank.get("busy", 1.0),
                resident_bytes=int(GIB + told * rank.get("grows", 0.0)),
                available_bytes=self.available,
                looks=int(told),
                asleep=int(told * rank.get("asleep", 0.0)),
                locked=int(told * rank.get("locked", 0.0)),
                grouped=self.grouped,
            )
            for number, rank in enumerate(self.ranks)
        )

    def found(
        self, seconds: float = 180.0, *, job: JobModel | None = None, limit: int | None = None
    ) -> list[f.Finding]:
        diagnosis, opened = Diagnosis(0.0), []
        for tick in range(int(seconds / 2.0)):
            at = 2.0 * tick
            seen = job.seen(at) if job is not None else JobSeen(certain_work=True, num_ranks=len(self.ranks))
            seen = replace(seen, processes=self.seen(at), memory_bytes=limit)
            opened += diagnosis.observe(seen, at, at).opened
        return opened


def test_the_rank_that_others_stand_in_locks_for_is_named_without_any_report() -> None:
    (found,) = Ranks({"busy": 0.4, "locked": 0.6}, {"busy": 1.0}, {"busy": 0.45, "locked": 0.5}).found()
    assert isinstance(found, f.RankAwaited)
    assert (found.rank, found.busy, found.usual_busy) == (1, pytest.approx(1.0), pytest.approx(0.425))
    assert "they probably wait for it in a collective" in found.sentence()


def test_ranks_without_a_process_group_never_wait_for_each_other() -> None:
    ranks = ({"busy": 0.4, "locked": 0.6}, {"busy": 1.0}, {"busy": 0.45, "locked": 0.5})
    assert Ranks(*ranks, grouped=False).found() == []
    assert Ranks({"busy": 0.5}, {"busy": 1.0}, {"busy": 0.5}).found() == [], "they wait for nothing"


def reporting(ranks: int = 3, *, parts: bool = False) -> JobModel:
    return JobModel(ranks=ranks, gpus=False, parts=parts)


class TestARankThatTheOthersWaitForWhileItSleeps:
    """CPU time shows nothing: the sleeping rank uses as little as the ranks that wait for it."""

    SLEEPS = ({"busy": 0.05, "locked": 0.6}, {"busy": 0.05}, {"busy": 0.05, "locked": 0.55})

    @pytest.mark.parametrize("reports", [True, False])
    def test_it_is_named(self, reports: bool) -> None:
        (found,) = Ranks(*self.SLEEPS).found(job=reporting() if reports else None)
        assert isinstance(found, f.RankAwaited)
        assert (found.rank, found.locked, found.usual_locked) == (1, pytest.approx(0.0), pytest.approx(0.575, abs=0.02))
        assert "waits in a lock for 0% of the time and the others for about" in found.sentence()
        assert "`orch stacks j --rank 1` shows where it is meanwhile" in found.advice("j")

    @pytest.mark.parametrize("locked", [(0.6, 0.45), (0.6, 0.0, 0.2), (0.2, 0.2), (0.25, 0.0)])
    def test_a_small_difference_or_one_to_some_of_them_only_is_none(self, locked: tuple[float, ...]) -> None:
        assert Ranks(*[{"busy": 0.05, "locked": share} for share in locked]).found() == []

    def test_ranks_that_go_their_own_way_wait_for_nobody(self) -> None:
        assert Ranks(*self.SLEEPS, grouped=False).found() == []
        job = JobModel(ranks=3, gpus=False, lockstep=False)
        job.each[1].slower = 2.0
        found = Ranks(*self.SLEEPS).found(job=job)
        assert [(one.kind, one.rank) for one in found] == [("rank_slow", 1)], "its steps are longer than the others'"

    def test_on_gpus_a_thread_in_a_lock_shows_nothing(self) -> None:
        assert Ranks(*self.SLEEPS).found(job=JobModel(ranks=3)) == []


def test_training_threads_that_wait_for_files_and_pipes_are_starved() -> None:
    (every,) = Ranks(*[{"busy": 0.5, "asleep": 0.5}] * 3).found(job=reporting())
    assert isinstance(every, f.InputStarved)
    assert (every.rank, every.reported, every.confidence) == (None, False, f.Confidence.POSSIBLE)
    one = Ranks({"locked": 0.5}, {"busy": 0.5, "asleep": 0.6}, {"locked": 0.5}).found(job=reporting())
    assert [(found.kind, found.rank) for found in one] == [("input_starved", 1)]


def test_what_a_script_says_of_its_input_counts_and_an_idle_job_waits_for_no_input() -> None:
    waits = {"busy": 0.5, "asleep": 0.5}
    assert Ranks(waits, waits, waits).found(job=reporting(parts=True)) == []
    assert Ranks(*[{"busy": 0.0, "asleep": 1.0}] * 3).found(job=reporting()) == []
    assert Ranks(waits, waits, waits).found() == [], "no step is made"


def test_memory_that_grows_towards_its_limit_says_when_it_is_reached() -> None:
    (found,) = Ranks({"grows": 1e7}, {}).found(limit=3 * GIB)
    assert isinstance(found, f.HostMemoryGrowing)
    assert (found.rank, found.limit_bytes) == (0, 3 * GIB)
    assert found.seconds_left == pytest.approx((3 * GIB - found.used_bytes) / 1e7, rel=0.05)
    assert "the kernel kills a rank in about" in found.sentence()


def test_memory_of_every_rank_is_one_finding_and_shares_what_its_node_has_left() -> None:
    (found,) = Ranks({"grows": 1e6}, {"grows": 1e6}, available=GIB // 4).found()
    assert isinstance(found, f.HostMemoryGrowing)
    assert found.rank is None
    assert found.seconds_left == pytest.approx(GIB / 4 / 2e6, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "limit"),
    [
        (({"grows": 1e7}, {}), None),  # no limit
        (({"grows": 1e7}, {}), 64 * GIB),  # far from its limit
        (({"grows": 1e4}, {}), 3 * GIB),  # memory for days
        (({}, {}), 2 * GIB),
    ],
)
def test_memory_that_lasts_is_not_told_of(ranks: tuple[dict[str, float], ...], limit: int | None) -> None:
    assert Ranks(*ranks).found(limit=limit) == []
