"""Contract of every runtime with jobs' records: the same tests for Ray and for the runtime in memory.

A subclass of ``RuntimeContract`` provides its arm in a fixture; the tests check what holds, the arm runs the runtime.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import ProcessSignal
from orchestrator.core.lifecycle.advance import Ensure, KillRanks, ReleaseGang, StopRanks
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import FailureClass
from tests.unit.core.builders import failed, make_spec, pending, started

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.ports import GangRuntime

GPUS = 2  # of each node
_numbers = itertools.count(1)


class Does(enum.Enum):
    """Behaviour of a job's ranks."""

    WAIT = "wait"  # until SIGTERM, then end with 0
    ENDURE = "endure"  # as WAIT, but SIGTERM is ignored
    SUCCEED = "succeed"
    FAIL = "fail"  # exit code 3


class Arm(ABC):
    """A runtime with two nodes of ``GPUS`` GPUs, the facts that it has posted, and the records folded from them."""

    def __init__(self) -> None:
        self.facts: list[ev.Event] = []
        self.records: dict[JobId, Job] = {}
        self.gangs: GangRuntime

    def post(self, events: Sequence[ev.Event]) -> None:
        """Record facts that the runtime posts, and fold them."""
        for event in events:
            self.facts.append(event)
            if event.job_id in self.records:
                self.records[event.job_id] = fold(self.records[event.job_id], event)

    def of(self, job: Job, kind: type[ev.Event]) -> list[Any]:
        """Return the posted facts of a kind about a job."""
        return [fact for fact in self.facts if fact.job_id == job.id and isinstance(fact, kind)]

    def job(self, does: Does, *, workers: int = 1, gpu: float = 1, nodes: Sequence[str] | None = None) -> Job:
        """Return the record of a new job with a started first attempt, on the first node unless ``nodes`` are given."""
        name = f"contract-{does.value}-{next(_numbers):06}"
        spec = make_spec(
            workers=workers,
            gpu=gpu,
            cpu=0.1,
            name=name,
            entrypoint=self.entrypoint(does),
            stop_duration=timedelta(seconds=30),
        )
        job = pending(spec, job_id=name, at=self.now(), **self.submission(name))
        placed = tuple(nodes or [self.node_ids()[0]] * workers)
        self.records[job.id] = fold(job, started(job, at=self.now(), nodes=placed))
        return self.records[job.id]

    def record(self, job: Job) -> Job:
        """Return the job's present record."""
        return self.records[job.id]

    def ensure(self, job: Job) -> None:
        """Order the record's present attempt."""
        job = self.record(job)
        self.gangs.apply(job, Ensure(job.id, job.attempt_number, job.gang))

    def stop(self, job: Job, *, seconds: float = 30.0) -> None:
        """Order the ranks to stop."""
        job = self.record(job)
        self.gangs.apply(job, StopRanks(job.id, job.attempt_number, job.gang, self.now() + seconds))

    def kill(self, job: Job) -> None:
        """Order the ranks to be killed."""
        job = self.record(job)
        self.gangs.apply(job, KillRanks(job.id, job.attempt_number, job.gang))

    def release(self, job: Job) -> None:
        """Order the gang's release."""
        job = self.record(job)
        self.gangs.apply(job, ReleaseGang(job.id, job.gang))

    async def up(self, job: Job) -> None:
        """Order the attempt; return when every rank is up."""
        self.ensure(job)
        await self.until("every rank is up", lambda: self.of(job, ev.AttemptRunning))
        await self.until("every script runs", lambda: self.alive(job) == job.num_workers)

    async def released(self, job: Job) -> None:
        """Release the gang; return when that is reported."""
        before = len(self.of(job, ev.GangReleased))
        self.release(job)
        await self.until("the gang is released", lambda: len(self.of(job, ev.GangReleased)) > before)
        self.gangs.apply(self.record(job), None)

    @abstractmethod
    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test."""

    @abstractmethod
    def now(self) -> float:
        """Return the wall time."""

    @abstractmethod
    def node_ids(self) -> list[str]:
        """Return the nodes' ids, in a fixed order."""

    @abstractmethod
    async def nodes(self) -> dict[str, Node]:
        """Return the nodes, as the runtime sees them now."""

    @abstractmethod
    def entrypoint(self, does: Does) -> str:
        """Return the entry point of a job with this behaviour."""

    @abstractmethod
    def submission(self, name: str) -> dict[str, Any]:
        """Return further fields of a submission to this runtime."""

    @abstractmethod
    async def until(self, what: str, condition: Callable[[], object]) -> None:
        """Let time pass until a condition holds; fail, naming it, when it never does."""

    @abstractmethod
    async def restart(self) -> None:
        """Replace the daemon, as after a kill."""

    @abstractmethod
    def starts(self, job: Job) -> int:
        """Return the number of processes of ranks that were ever started for a job."""

    @abstractmethod
    def alive(self, job: Job) -> int:
        """Return the number of processes of ranks that a job has now."""

    @abstractmethod
    def kill_rank(self, job: Job, rank: int) -> None:
        """Send SIGKILL to a rank's process."""

    @abstractmethod
    def kill_actor(self, job: Job, rank: int) -> None:
        """Send SIGKILL to a rank's actor."""

    @abstractmethod
    async def lose_node(self, node_id: str) -> None:
        """Kill a node; return when the runtime reports it dead."""


class RuntimeContract:
    """Tests that hold for every runtime; a subclass provides ``arm``."""

    def test_a_gang_is_placed_launched_and_reported(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            await arm.up(job)
            (placed,) = arm.of(job, ev.GangPlaced)
            assert [seat.rank for seat in placed.seats] == [0, 1]
            assert {seat.node_id for seat in placed.seats} == {arm.node_ids()[0]}
            assert len({uuid for seat in placed.seats for uuid in seat.gpu_uuids}) == 2, "a GPU each"
            (running,) = arm.of(job, ev.AttemptRunning)
            assert running.attempt == 1
            assert len(set(running.pids)) == arm.alive(job) == arm.starts(job) == 2
            await arm.released(job)

        arm.run(test())

    def test_ensure_is_idempotent(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            arm.ensure(job)
            arm.ensure(job)
            await arm.up(job)
            arm.gangs.apply(arm.record(job), None)
            arm.ensure(job)
            arm.stop(job)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            assert arm.starts(job) == 2
            await arm.released(job)

        arm.run(test())

    def test_the_end_of_every_rank_is_reported(self, arm: Arm) -> None:
        async def test() -> None:
            for does, code in ((Does.SUCCEED, 0), (Does.FAIL, 3)):
                job = arm.job(does, workers=2)
                arm.ensure(job)
                await arm.until("the attempt is gone", lambda job=job: arm.of(job, ev.AttemptGone))
                exits = {e.exit.rank: e.exit for e in arm.of(job, ev.RankExited)}
                assert {rank: (e.exit_code, e.signal) for rank, e in exits.items()} == {
                    0: (code, None),
                    1: (code, None),
                }
                assert arm.record(job).ended_well is (code == 0)
                await arm.released(job)

        arm.run(test())

    def test_a_stop_lets_ranks_end_and_may_be_repeated(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            await arm.up(job)
            arm.stop(job, seconds=60.0)
            arm.stop(job, seconds=50.0)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            assert [(e.exit_code, e.signal) for e in arm.record(job).exits] == [(0, None), (0, None)]
            assert arm.alive(job) == 0
            await arm.released(job)

        arm.run(test())

    def test_a_rank_that_ignores_a_stop_is_killed_at_the_deadline(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.ENDURE)
            await arm.up(job)
            arm.stop(job, seconds=1.0)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            assert [(e.exit_code, e.signal) for e in arm.record(job).exits] == [(None, 9)]
            await arm.released(job)

        arm.run(test())

    def test_kill_ends_every_rank_and_may_be_repeated(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.ENDURE, workers=2)
            await arm.up(job)
            arm.kill(job)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            assert arm.alive(job) == 0
            arm.gangs.apply(arm.record(job), None)
            arm.kill(job)
            await arm.released(job)

        arm.run(test())

    def test_a_job_that_is_stopped_before_it_is_placed_never_starts(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT)
            arm.stop(job)
            await arm.until("there is no gang", lambda: arm.of(job, ev.GangLost))
            await arm.released(job)
            assert arm.starts(job) == 0

        arm.run(test())

    def test_release_may_be_repeated_and_gives_everything_back(self, arm: Arm) -> None:
        async def test() -> None:
            first = arm.job(Does.ENDURE, workers=GPUS)
            await arm.up(first)
            held = arm.record(first)
            await arm.released(first)
            assert arm.alive(first) == 0
            arm.gangs.apply(held, ReleaseGang(first.id, held.gang))
            await arm.until("it is released again", lambda: len(arm.of(first, ev.GangReleased)) == 2)
            arm.gangs.apply(held, None)
            second = arm.job(Does.WAIT, workers=GPUS)
            await arm.up(second)
            await arm.released(second)

        arm.run(test())

    def test_no_gpu_is_given_out_twice(self, arm: Arm) -> None:
        async def test() -> None:
            jobs = [arm.job(Does.WAIT) for _ in range(GPUS)]
            for job in jobs:
                await arm.up(job)
            uuids = Counter(u for job in jobs for seat in arm.record(job).seats for u in seat.gpu_uuids)
            assert len(uuids) == GPUS
            assert set(uuids.values()) == {1}
            for job in jobs:
                await arm.released(job)

        arm.run(test())

    def test_nodes_report_what_they_have(self, arm: Arm) -> None:
        async def test() -> None:
            nodes = await arm.nodes()
            assert [nodes[i].gpus for i in arm.node_ids()] == [GPUS, GPUS]
            assert all(nodes[i].schedulable and nodes[i].cpus >= 1 for i in arm.node_ids())

        arm.run(test())

    def test_the_next_daemon_adopts_what_runs(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            await arm.up(job)
            (before,) = arm.of(job, ev.AttemptRunning)
            await arm.restart()
            arm.ensure(job)
            await arm.until("its events are asked for again", lambda: len(arm.of(job, ev.AttemptRunning)) == 2)
            assert arm.of(job, ev.AttemptRunning)[1].pids == before.pids
            assert arm.starts(job) == arm.alive(job) == 2
            arm.stop(job)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            await arm.released(job)

        arm.run(test())

    def test_an_end_that_no_daemon_saw_is_told_to_the_next(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            await arm.up(job)
            arm.gangs.apply(arm.record(job), None)
            await arm.gangs.close()
            arm.kill_rank(job, 1)
            await arm.until("the rank is gone", lambda: arm.alive(job) == 1)
            await arm.restart()
            arm.ensure(job)
            await arm.until("the exit is told", lambda: arm.of(job, ev.RankExited))
            (ended,) = arm.record(job).exits
            assert (ended.rank, ended.exit_code, ended.signal) == (1, None, 9)
            await arm.released(job)

        arm.run(test())

    def test_the_next_attempt_starts_in_the_same_gang_when_the_last_is_gone(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2)
            await arm.up(job)
            arm.kill_rank(job, 0)
            await arm.until("the death is told", lambda: arm.of(job, ev.RankExited))
            record = arm.record(job)
            arm.post([failed(record, at=arm.now(), failure=_infra(), keep_gang=True)])
            arm.kill(job)
            await arm.until("the attempt is gone", lambda: arm.of(job, ev.AttemptGone))
            assert arm.alive(job) == 0
            arm.post([started(arm.record(job), at=arm.now(), nodes=record.nodes, gang=record.gang)])
            arm.gangs.apply(arm.record(job), None)
            arm.ensure(job)
            await arm.until("the second attempt is up", lambda: arm.record(job).pids)
            assert arm.of(job, ev.AttemptRunning)[-1].attempt == 2
            assert arm.record(job).seats == record.seats
            await arm.until("every script of it runs", lambda: arm.alive(job) == 2)
            assert arm.starts(job) == 4
            await arm.released(job)

        arm.run(test())

    def test_an_actor_that_dies_loses_the_gang(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.ENDURE, workers=2)
            await arm.up(job)
            arm.kill_actor(job, 1)
            await arm.until("the gang is lost", lambda: arm.of(job, ev.GangLost))
            lost = arm.of(job, ev.GangLost)[0]
            assert (lost.gang, lost.rank) == (1, 1)
            await arm.released(job)
            assert arm.alive(job) == 0

        arm.run(test())

    def test_a_gang_for_a_node_that_is_not_there_is_absent(self, arm: Arm) -> None:
        async def test() -> None:
            job = arm.job(Does.WAIT, workers=2, nodes=(arm.node_ids()[0], "f" * 56))
            arm.ensure(job)
            await arm.until("the gang is lost", lambda: arm.of(job, ev.GangLost))
            assert not arm.of(job, ev.GangPlaced)
            assert arm.starts(job) == 0

        arm.run(test())

    def test_a_lost_node_loses_its_gangs_and_no_other(self, arm: Arm) -> None:
        async def test() -> None:
            kept, hit = arm.job(Does.WAIT), arm.job(Does.ENDURE, workers=2, nodes=arm.node_ids())
            await arm.up(kept)
            await arm.up(hit)
            gone = arm.node_ids()[1]
            before = (await arm.nodes())[gone]
            await arm.lose_node(gone)
            await arm.until("the gang is lost", lambda: arm.of(hit, ev.GangLost))
            assert arm.of(hit, ev.GangLost)[0].not_before > arm.now(), "its ranks may run until their lease ends"
            down = (await arm.nodes())[gone]
            assert not down.alive
            has = [(node.name, node.cpus, node.gpus, node.memory_bytes, node.gpu_models) for node in (before, down)]
            assert has[0] == has[1], "jobs that fit only there wait for it"
            await arm.released(hit)
            assert arm.alive(hit) == 0
            assert not arm.of(kept, ev.GangLost)
            assert arm.alive(kept) == 1
            await arm.released(kept)

        arm.run(test())


def _infra() -> ev.Failure:
    return ev.Failure(failure_class=FailureClass.INFRA, cause=ProcessSignal(rank=0, signal=9))
