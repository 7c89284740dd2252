"""The assignment of gangs to jobs: kept across restarts of the daemon, and never two gangs for one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.job.record import Job
from orchestrator.runtime.gangs.reuse.origin import Origin, origin_of
from orchestrator.runtime.gangs.reuse.parked_gangs import MOST_RANKS, PARKED_SECONDS, ParkedGangs
from tests.unit.core.builders import after, exited, gone, make_spec, pending, running


def job(name: str, **keys: Any) -> Job:
    """Return a running job, on one rank by default."""
    spec = make_spec(**{"workers": 1, "gpu": 0, **keys})
    return running(pending(spec, job_id=f"{name}-abc234"))


def ended(found: Job) -> Job:
    ends = [exited(found, rank, exit_code=0) for rank in range(found.num_workers)]
    return after(found, *ends, gone(found), ev.AttemptSucceeded(job_id=found.id, at=20.0, attempt=1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def park(parked: ParkedGangs, found: Job) -> None:
    assert parked.may_park(ended(found))
    parked.park(ended(found))


def test_a_parked_gang_serves_the_next_job_of_its_shape_and_no_other(tmp_path: Path) -> None:
    parked, first = ParkedGangs(tmp_path / "gangs"), job("first")
    parked.created(first)
    assert parked.serving(first) == origin_of(first)
    park(parked, first)
    assert parked.any_parked
    assert parked.serving(first) is None, "it is not the first job's any more: a late removal must not reach it"
    assert parked.take(job("large", cpu=2)) is None
    second = job("second")
    assert parked.take(second) == origin_of(first)
    assert parked.serving(second) == origin_of(first)
    assert parked.take(job("third")) is None
    assert parked.serving(first) is None
    park(parked, second)
    assert parked.take(job("third")) == origin_of(first)
    assert parked.serving(second) == origin_of(second), "it has none, and a new one would have its name"


def test_a_restarted_daemon_finds_who_is_served_and_takes_nothing_that_was_parked(tmp_path: Path) -> None:
    before, one, two = ParkedGangs(tmp_path / "gangs"), job("one"), job("two")
    for each in (one, two):
        before.created(each)
        park(before, each)
    served = job("served")
    assert before.take(served) == origin_of(two)

    after_it = ParkedGangs(tmp_path / "gangs")
    assert after_it.serving(served) == origin_of(two)
    assert after_it.serving(two) is None
    assert after_it.take(job("next")) is None, "its actors may be of another version"
    assert after_it.over(seconds=1000.0) == [origin_of(one)]
    assert not after_it.may_park(ended(served)), "nor is a gang kept that an earlier daemon created"
    after_it.removed(origin_of(two))
    after_it.removed(origin_of(one))
    assert list((tmp_path / "gangs").iterdir()) == []
    assert ParkedGangs(tmp_path / "gangs").over(0.0) == []


def test_a_gang_that_is_parked_for_too_long_is_removed_and_not_taken(tmp_path: Path) -> None:
    clock = Clock()
    parked, first = ParkedGangs(tmp_path / "gangs", clock=clock), job("first")
    parked.created(first)
    park(parked, first)
    assert parked.over(10.0) == []
    clock.now = 10.0
    assert parked.over(10.0) == [origin_of(first)]
    assert parked.take(job("second")) is None
    assert parked.over(10.0) == [origin_of(first)], "until it is removed"
    parked.removed(origin_of(first))
    assert parked.over(0.0) == []


def test_a_gang_that_no_job_needs_is_removed_though_jobs_go_on_needing_another(tmp_path: Path) -> None:
    """Two jobs run at the same time; from then on jobs run one after the other."""
    clock = Clock()
    parked, one, two = ParkedGangs(tmp_path / "gangs", clock=clock), job("one"), job("two")
    for each in (one, two):
        parked.created(each)
        park(parked, each)
    for number in range(4):
        clock.now += 0.4 * PARKED_SECONDS
        assert parked.over() == ([] if clock.now < PARKED_SECONDS else [origin_of(one)])
        following = job(f"n{number}")
        assert parked.take(following) == origin_of(two)
        park(parked, following)


def test_no_more_ranks_are_parked_than_the_limit(tmp_path: Path) -> None:
    parked, large, small = ParkedGangs(tmp_path / "gangs"), job("large", workers=MOST_RANKS), job("small")
    for each in (large, small):
        parked.created(each)
    park(parked, large)
    assert not parked.may_park(ended(small))


def test_nothing_is_parked_on_a_cluster_that_others_use() -> None:
    parked, first = ParkedGangs(None), job("first")
    parked.created(first)
    assert not parked.may_park(ended(first))
    assert parked.take(first) is None
    assert parked.serving(first) == origin_of(first)


def test_files_that_are_no_such_links_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "gangs"
    folder.mkdir()
    (folder / "note.txt").write_text("mine")
    (folder / "odd-gx").symlink_to("odd")
    (folder / "b-abc234-g1").symlink_to("a-abc234-g1")
    parked = ParkedGangs(folder)
    assert parked.serving(job("b")) == Origin("a-abc234", 1)
    assert (folder / "note.txt").exists()
