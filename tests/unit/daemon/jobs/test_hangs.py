"""The watch over running jobs: its examinations, its reactions, and the jobs that it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.diagnosis.health import Frame, RankLook, Thread, Wait
from orchestrator.core.facts.findings import Sign
from orchestrator.core.job.record import Job
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.jobs.hangs import HangWatch
from orchestrator.spec.model import HealthSpec
from orchestrator.telemetry.logging import get_logger
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.support.records import replace
from tests.unit.core.builders import after, changed, exited, make_spec, pending, started, stop, up

COLLECTIVE = (Frame("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py", 1),)
LOCKED = (Frame("pull", "/work/data.py", 7),)


class World:
    """A running job, ranks in the states that ``ranks`` gives, and a clock that advances with the watch."""

    def __init__(self, *, gpu: float = 0.0, **health: Any) -> None:
        job = pending(make_spec(gpu=gpu, health=HealthSpec(**health)))
        self.job = after(job, started(job), up(job))
        self.now = 100.0
        self.ranks: dict[int, dict[str, Any]] = {0: {"frames": COLLECTIVE}, 1: {"frames": LOCKED}}
        self.events: list[ev.Event] = []
        self.logs: dict[int, Sequence[str]] = {}
        self.looked: list[bool] = []
        self.fails = False
        self.watch = HangWatch(
            jobs=lambda: [self.job],
            inspector=self,
            command=self.command,
            log=get_logger("test"),
            clock=lambda: self.now,
            pause=self.pause,
        )

    async def pause(self, seconds: float) -> None:
        self.now += seconds

    async def command(self, make: Callable[[], Sequence[ev.Event]]) -> None:
        for event in make():
            self.events.append(event)
            self.job = fold(self.job, event)

    async def look(self, job: Job, *, stacks: bool, ranks: Sequence[int] | None = None) -> dict[int, RankLook]:
        if self.fails:
            raise OSError("no way")
        self.looked.append(stacks)
        wanted = range(job.num_workers) if ranks is None else ranks
        return {rank: self.one(rank, stacks=stacks) for rank in wanted if rank in self.ranks}

    def one(self, rank: int, *, stacks: bool) -> RankLook:
        facts = dict(self.ranks[rank])
        frames = facts.pop("frames")
        busy = facts.pop("busy", 0.0)
        threads = (Thread(name="MainThread", frames=frames),) if stacks else ()
        values = {"state": "S", "wait": Wait.LOCK, **facts}
        return RankLook(rank=rank, at=self.now, pid=rank + 1, cpu_seconds=busy * self.now, threads=threads, **values)

    async def note(self, job: Job, lines: Mapping[int, Sequence[str]]) -> None:
        self.logs |= lines

    def report(self, *seconds: float, steps: int = 10, **page: Any) -> None:
        for rank in range(2):
            snapshot = ProgressSnapshot(step=steps, steps_reported=steps, recent_step_seconds=seconds, **page)
            self.watch.progress(self.job, self.job.attempt_number, rank, snapshot)

    def pass_by(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Tick for ``seconds``; examinations run to their end."""

        async def ticks() -> None:
            end = self.now + seconds
            while self.now < end:
                self.now += 0.5
                each()
                self.watch.tick()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    await task

        asyncio.run(ticks())

    @property
    def codes(self) -> list[str]:
        return [e.note.code if isinstance(e, ev.JobNoted) else e.kind for e in self.events]


def test_a_deadlock_ends_the_attempt_out_of_the_hang_budget_with_every_stack_in_the_logs() -> None:
    world = World()
    world.report(*[0.1] * 8)
    world.pass_by(6.0)
    (failed,) = world.events
    assert isinstance(failed, ev.AttemptFailed)
    failure = failed.failure
    assert (failure.failure_class, failure.code, failure.rank, failed.retry) == ("hang", "hang", 1, True)
    assert "pull (/work/data.py:7)" in failure.sentence()
    assert "where 100ms is usual" in failure.sentence()
    assert f"orch logs {world.job.id} --rank 1 --attempt 1" in failure.advice(world.job.id)
    assert world.job.restarts == {"hang": 1}
    assert set(world.logs) == {0, 1}
    assert any("pull" in line for line in world.logs[1])


def test_a_stopped_rank_is_found_under_others_that_step_on_without_it() -> None:
    world = World()
    world.ranks = {0: {"frames": LOCKED, "busy": 0.9}, 1: {"frames": LOCKED, "state": "T"}}
    world.report(*[0.1] * 8)

    def alone() -> None:
        snapshot = ProgressSnapshot(step=9, steps_reported=9, recent_step_seconds=(0.1,) * 8)
        world.watch.progress(world.job, 1, 0, snapshot)

    world.pass_by(6.0, alone)
    assert world.codes == ["attempt_failed"]


def step_alone(world: World) -> None:
    snapshot = ProgressSnapshot(step=9, steps_reported=9, recent_step_seconds=(0.1,) * 8)
    world.watch.progress(world.job, 1, 0, snapshot)


def test_a_rank_stopped_before_its_first_report_is_found_under_others_that_step_on_without_it() -> None:
    world = World()
    world.ranks = {0: {"frames": LOCKED, "busy": 0.9}, 1: {"frames": LOCKED, "state": "T"}}
    world.pass_by(20.0, lambda: step_alone(world))
    (failed,) = world.events
    assert isinstance(failed, ev.AttemptFailed)
    assert (failed.failure.failure_class, failed.failure.rank) == ("hang", 1)
    assert "no sign of life for" in failed.failure.sentence()
    assert set(world.logs) == {0, 1}


def test_one_that_the_job_file_leaves_alone_is_told_once_and_for_as_long_as_it_is_stopped() -> None:
    world = World(on_hang="notify")
    world.ranks = {0: {"frames": LOCKED, "busy": 0.9}, 1: {"frames": LOCKED, "state": "T"}}
    world.pass_by(20.0, lambda: step_alone(world))
    assert world.looked.count(True) == 1, "its stacks go to the logs once"
    seen = world.watch.stall(world.job.id)
    assert seen is not None
    assert (seen.seen.sign, seen.seen.rank, seen.proven) == (Sign.STOPPED, 1, True)
    world.ranks[1] = {"frames": LOCKED}
    world.pass_by(10.0, lambda: step_alone(world))
    assert world.watch.stall(world.job.id) is None
    assert world.events == []


def test_a_rank_that_leaves_reports_to_others_is_no_hang() -> None:
    world = World()
    world.ranks = {0: {"frames": LOCKED, "busy": 0.9}, 1: {"frames": LOCKED}}
    world.pass_by(60.0, lambda: step_alone(world))
    assert world.events == []
    assert len(world.looked) <= 13, "no more often than ranks of a script that reports nothing"


def test_a_rank_that_was_stopped_for_a_moment_before_its_first_report_is_none() -> None:
    world = World()
    ranks = ({"frames": LOCKED, "state": "T"}, {"frames": LOCKED})

    def now_and_then() -> None:
        world.ranks = {0: {"frames": LOCKED, "busy": 0.9}, 1: ranks[int(world.now / 2) % 2]}
        step_alone(world)

    world.pass_by(60.0, now_and_then)
    assert world.events == []


def test_a_rank_stopped_before_the_first_step_of_a_later_attempt_is_a_hang_of_a_script_that_reports() -> None:
    world = World()
    world.ranks = {0: {"frames": LOCKED, "state": "T"}, 1: {"frames": LOCKED}}
    world.pass_by(20.0)
    assert world.events == [], "whether this script reports anything is not known"
    reported = replace(world.job.attempts[-1], first_step=5, first_step_at=1.0)
    again = replace(reported, number=2, first_step=None, first_step_at=None)
    world.job = replace(world.job, attempts=(reported, again))
    world.pass_by(20.0)
    assert world.codes == ["attempt_failed"]


def test_two_hangs_are_forgiven_and_not_a_third() -> None:
    world = World()
    world.job = replace(world.job, restarts={"hang": 2})
    world.report(*[0.1] * 8)
    world.pass_by(6.0)
    (failed,) = world.events
    assert isinstance(failed, ev.AttemptFailed)
    assert not failed.retry
    assert "2 of 2 hang restarts used" in failed.failure.sentence()


def test_a_stopped_rank_is_found_in_any_phase_and_without_reading_stacks_first() -> None:
    for page in ({"phase": "evaluate"}, {"saving_since": 1.0}, {"steps": 2}):
        world = World()
        world.ranks[1]["state"] = "T"
        world.report(*([0.1] * (2 if "steps" in page else 8)), **page)
        world.pass_by(5.0)
        assert world.codes == ["attempt_failed"], page
        assert any("pull" in line for line in world.logs[1])


def test_a_job_that_reports_nothing_is_told_of_and_left_alone() -> None:
    world = World()
    world.pass_by(120.0)
    assert world.events == []
    assert 0 < sum(world.looked) <= 14, "stacks are read ever less often: they cost a hundredth of a second each"
    assert world.watch.suspected(world.job.id) is None
    world.ranks[1]["state"] = "T"
    world.pass_by(30.0)
    assert world.events == []
    seen = world.watch.stall(world.job.id)
    assert seen is not None
    assert (seen.seen.sign, seen.seen.rank, seen.proven) == (Sign.STOPPED, 1, True)
    assert world.watch.suspected(world.job.id) is True
    assert world.job.state is JobState.RUNNING


@pytest.mark.parametrize(
    ("on_hang", "reports", "codes"), [("notify", True, []), ("restart", False, ["attempt_failed"])]
)
def test_what_follows_is_for_the_job_file_to_say(on_hang: str, reports: bool, codes: list[str]) -> None:
    world = World(on_hang=on_hang)
    world.ranks[1]["state"] = "T"
    if reports:
        world.report(*[0.1] * 8)
    world.pass_by(60.0)
    assert world.codes == codes
    assert set(world.logs) == {0, 1}


def test_what_is_only_slow_is_told_once_and_looked_at_less_and_less() -> None:
    world = World()
    world.ranks[0] = {"frames": LOCKED, "busy": 0.9}
    world.ranks[1] = {"frames": COLLECTIVE}
    world.report(*[0.1] * 8)
    world.pass_by(59.0)
    assert world.events == []
    assert world.watch.suspected(world.job.id) is False
    world.pass_by(240.0)
    assert world.events == []
    seen = world.watch.stall(world.job.id)
    assert seen is not None
    assert (seen.seen.sign, seen.seen.rank, seen.proven) == (Sign.SPINS, 0, False)
    assert seen.late.still_seconds > 200
    assert seen.longest_step == 0.1
    assert world.watch.suspected(world.job.id) is True
    assert sum(world.looked) <= 2 * 20
    world.report(*[0.1] * 8)
    assert world.watch.suspected(world.job.id) is False
    assert world.watch.stall(world.job.id) is None


def test_healthy_pauses_raise_no_alarm() -> None:
    world = World()
    world.ranks = {0: {"frames": LOCKED, "wait": Wait.OUTSIDE}, 1: {"frames": COLLECTIVE}}
    world.pass_by(900.0)  # the first step
    world.report(900.0, 0.1, steps=3)
    world.pass_by(30.0)
    world.report(*[0.1] * 8)
    world.pass_by(50.0)
    world.report(*[0.1] * 8, phase="evaluate")
    world.pass_by(50.0)
    world.report(*[0.1] * 8, saving_since=1.0)
    world.pass_by(50.0)
    assert world.events == []


def test_a_machine_that_slept_raises_no_alarm() -> None:
    world = World()
    world.report(*[0.1] * 8)
    world.now += 9 * 3600.0
    world.pass_by(1.0)
    world.report(*[0.1] * 8)
    assert (world.looked, world.events) == ([], [])


def test_a_rank_out_of_reach_is_not_still() -> None:
    world = World()
    world.report(*[0.1] * 8)
    world.job = changed(world.job, degraded=True)
    world.pass_by(60.0)
    assert (world.looked, world.events) == ([], [])
    world.job = changed(world.job, degraded=False)
    del world.ranks[0]
    world.pass_by(20.0)
    assert world.events == []  # rank 0 does not answer: it may be at work


def test_a_limit_in_the_job_file_is_kept_to_with_or_without_proof() -> None:
    world = World(heartbeat_timeout=timedelta(seconds=20))
    world.ranks[0] = {"frames": LOCKED, "busy": 0.9}
    world.report(*[0.1] * 8)
    world.pass_by(18.0)
    assert world.events == []
    world.pass_by(6.0)
    assert world.codes == ["attempt_failed"]


def test_output_counts_as_a_sign_of_life_of_a_script_that_reports_nothing() -> None:
    world = World(heartbeat_timeout=timedelta(seconds=20), on_hang="restart")
    lines = iter(range(1, 10_000))

    def prints() -> None:
        world.ranks[0]["printed"] = next(lines)

    world.pass_by(590.0)  # no sign of life is required before health.startup_timeout
    assert world.events == []
    world.pass_by(60.0, prints)
    assert world.events == []
    world.pass_by(40.0)
    assert world.codes == ["attempt_failed"]
    assert "no sign of life for" in world.job.failure.sentence()  # type: ignore[arg-type]


def test_progress_during_an_examination_ends_it() -> None:
    world = World()
    world.report(*[0.1] * 8)

    async def steps(seconds: float) -> None:
        world.now += seconds
        world.report(*[0.1] * 8)

    world.watch._pause = steps
    world.pass_by(60.0)
    assert world.events == []


def test_an_attempt_that_ends_meanwhile_is_not_ended_again() -> None:
    world = World()
    world.report(*[0.1] * 8)

    async def ends(seconds: float) -> None:
        world.now += seconds
        world.job = after(world.job, stop(world.job, StopPurpose.PAUSE))

    world.watch._pause = ends
    world.pass_by(10.0)
    assert world.events == []


def test_a_look_that_fails_costs_an_examination_and_no_more() -> None:
    world = World()
    world.fails = True
    world.report(*[0.1] * 8)
    world.pass_by(10.0)
    assert world.events == []
    world.fails = False
    world.pass_by(40.0)
    assert world.codes == ["attempt_failed"]


SET_UP = (
    Frame("_new_process_group_helper", "/site-packages/torch/distributed/distributed_c10d.py", 2169),
    Frame("init_process_group", "/site-packages/torch/distributed/distributed_c10d.py", 1899),
)


def test_a_rank_that_never_enters_the_rendezvous_is_seen_without_a_report() -> None:
    world = World()
    world.ranks = {0: {"frames": SET_UP, "world_size": 2}, 1: {"frames": LOCKED}}
    world.pass_by(40.0)
    stall = world.watch.stall(world.job.id)
    assert stall is not None
    assert (stall.seen.sign, stall.seen.rank, stall.seen.place) == (Sign.RENDEZVOUS, 1, "pull (/work/data.py:7)")
    assert world.events == []
    world.ranks[1] = {"frames": LOCKED, "busy": 0.9}
    world.pass_by(40.0)
    later = world.watch.stall(world.job.id)
    assert later is not None
    assert later.seen.sign is Sign.WORKS, "it is on its way"


def test_a_process_group_of_more_ranks_than_there_are_is_seen() -> None:
    world = World()
    world.ranks = {rank: {"frames": SET_UP, "world_size": 8} for rank in range(2)}
    world.pass_by(20.0)
    stall = world.watch.stall(world.job.id)
    assert stall is not None
    assert (stall.seen.sign, stall.seen.rank) == (Sign.WORLD_SIZE, None)
    assert (stall.seen.world_size, stall.seen.num_ranks) == (8, 2)


def test_a_look_without_stacks_forgets_nothing_that_one_with_them_has_seen() -> None:
    world = World(gpu=1.0)
    world.ranks = {0: {"frames": COLLECTIVE}, 1: {"frames": LOCKED, "wait": Wait.OUTSIDE, "wait_name": "timer"}}
    world.report(*[0.1] * 8)
    signs = set()

    def each() -> None:
        stall = world.watch.stall(world.job.id)
        if stall is not None:
            signs.add((stall.seen.sign, stall.seen.rank, stall.seen.waits))

    world.pass_by(30.0, each)
    assert not all(world.looked)
    assert signs == {(Sign.OUTSIDE, 1, "timer")}


def test_a_rank_that_ended_with_0_is_named_by_those_that_wait_for_it_in_a_collective() -> None:
    for on_hang, told in (("restart", ["attempt_failed"]), ("notify", [])):
        world = World(on_hang=on_hang)
        world.report(*[0.1] * 8)
        world.job = after(world.job, exited(world.job, 1, exit_code=0))
        world.ranks = {0: {"frames": COLLECTIVE}}
        world.pass_by(30.0)
        assert world.codes == told
        seen = world.watch.stall(world.job.id)
        for event in world.events:
            assert isinstance(event, ev.AttemptFailed)
            assert (event.failure.code, event.failure.rank) == ("ended_alone", 1), event.failure.sentence()
        if not told:
            assert seen is not None
            assert "rank 1 had ended with exit code 0" in seen.seen.sentence()
