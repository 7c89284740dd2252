"""Store and scheduler against a simulated world in which anything happens at any time.

The machine is a daemon without its shell: it writes what ``decide`` says, lets the world carry out the effects, and is
fed with the world's facts, late and twice. After every step the record is what its events say and breaks no rule; in
the end, once the world is left in peace, every job ends.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core import events as ev
from orchestrator.core.failure import SETTLE_SECONDS
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.scheduler import State, decide, request_stop
from orchestrator.core.states import FailureClass, JobState, StopPurpose
from orchestrator.spec.job import Backoff, HealthSpec, MaxRestarts, RetrySpec
from orchestrator.store.memory import MemoryStore
from orchestrator.store.sqlite import SqliteStore
from tests.stateful.world import LEASE_SECONDS, World
from tests.unit.core.builders import make_spec, submission
from tests.unit.store.lives import write

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from orchestrator.core.job import Job
    from orchestrator.store.port import Store

MOST_JOBS = 5
pick = st.integers(0, 1000)
HOW_RANKS_END: tuple[dict[str, Any], ...] = (
    {"exit_code": 0},
    {"exit_code": 1},
    {"exit_code": 75},
    {"signal": 9},
    {"exit_code": 1, "error": "boom"},
    {"exit_code": 1, "error": "Connection closed by peer"},
)


class DaemonMachine(RuleBasedStateMachine):
    """A daemon on a store in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Store = self.open_store()
        self.world = World()
        self.view = dict(self.world.nodes)
        self.jobs: dict[JobId, Job] = {}
        self.ended: dict[JobId, Job] = {}
        self.accepted = 0
        self.wake_at: float | None = None

    def open_store(self) -> Store:
        return MemoryStore()

    def reopen(self) -> None:
        """What is in memory stays; a store on a disk is closed and opened again."""

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call to the store in memory, which never waits."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("the store in memory waited for something")

    # -- what the daemon does ------------------------------------------------------------------------------------------

    def write(self, events: list[ev.Event]) -> list[Job]:
        """Write events and keep the records that come back."""
        records = self.wait(write(self.store, events))
        for record in records:
            if record.state.is_terminal:
                self.jobs.pop(record.id, None)
                self.ended.setdefault(record.id, record)
            else:
                self.jobs[record.id] = record
        return list(records)

    def settle(self) -> None:
        """Decide until nothing more follows."""
        for _ in range(200):
            commands = decide(State(jobs=self.jobs, nodes=self.view), self.world.now)
            if not commands.events:
                self.wake_at = commands.wake_at
                return
            for event in commands.events:
                before = self.jobs[event.job_id]
                (after,) = self.write([event])
                assert after.version == before.version + 1, f"a decision that changes nothing: {event}"
        raise AssertionError("decisions do not settle")

    def act(self, job: Job) -> None:
        """Have the world do one step of what the record wants, as ``decide`` orders it."""
        commands = decide(State(jobs={job.id: job}, nodes={}), self.world.now)
        for effect in commands.effects:
            self.world.carry_out(effect, job)

    def one(self, index: int, *states: JobState) -> Job:
        """Some live job, in one of ``states`` if there is one."""
        found = [j for j in self.jobs.values() if not states or j.state in states] or list(self.jobs.values())
        return sorted(found, key=lambda j: j.sequence)[index % len(found)]

    # -- what happens --------------------------------------------------------------------------------------------------

    @initialize(workers=st.integers(1, 4))
    def begin(self, workers: int) -> None:
        self.submit(workers=workers, priority=50, user=1, infra=2, max_no_progress=2, strategy="PACK")

    @precondition(lambda self: len(self.jobs) < MOST_JOBS)
    @rule(
        workers=st.integers(1, 4),
        priority=st.sampled_from([40, 50, 60]),
        user=st.integers(0, 1),
        infra=st.integers(0, 3),
        max_no_progress=st.integers(1, 3),
        strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK"]),
    )
    def submit(self, workers: int, priority: int, user: int, infra: int, max_no_progress: int, strategy: str) -> None:
        retry = RetrySpec(
            max_restarts=MaxRestarts(user=user, infra=infra),
            max_no_progress=max_no_progress,
            backoff=Backoff(initial=timedelta(seconds=8)),
        )
        spec = make_spec(
            workers=workers,
            priority=priority,
            retry=retry,
            strategy=strategy,
            health=HealthSpec(startup_timeout=timedelta(minutes=30)),
            max_duration=timedelta(hours=2),
        )
        self.accepted += 1
        event = submission(spec, job_id=f"job-{self.accepted}", at=self.world.now)
        job, new = self.wait(self.store.submit(event))
        assert new
        assert self.wait(self.store.submit(event)) == (job, False), "a lost reply never submits twice"
        self.jobs[job.id] = job

    @rule()
    def decide(self) -> None:
        self.settle()

    @precondition(lambda self: self.jobs)
    @rule(index=pick)
    def runtime_acts_on_one(self, index: int) -> None:
        self.settle()
        if self.jobs:
            self.act(self.one(index, *[state for state in JobState if state.may_hold_gang]))

    @precondition(lambda self: self.jobs)
    @rule(times=st.integers(1, 4))
    def runtime_acts_on_all(self, times: int) -> None:
        for _ in range(times):
            self.settle()
            for job in list(self.jobs.values()):
                self.act(job)
            self.deliver(100)
        self.settle()

    @precondition(lambda self: self.world.outbox)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        facts, self.world.outbox = self.world.outbox[:count], self.world.outbox[count:]
        self.write(facts)

    @precondition(lambda self: self.world.history)
    @rule(index=pick)
    def deliver_again(self, index: int) -> None:
        fact = self.world.history[index % len(self.world.history)]
        if fact not in self.world.outbox:
            before = self.wait(self.store.job(fact.job_id))
            assert self.write([fact]) == [before], f"a fact told twice changed something: {fact}"

    @precondition(lambda self: self.world.running())
    @rule(index=pick, how=st.sampled_from(HOW_RANKS_END))
    def rank_ends(self, index: int, how: dict[str, Any]) -> None:
        running = self.world.running()
        self.world.end_process(running[index % len(running)], **how)

    @precondition(lambda self: self.world.running())
    @rule(index=pick, told=st.booleans())
    def actor_dies(self, index: int, told: bool) -> None:
        running = self.world.running()
        self.world.lose_actor(running[index % len(running)], told=told)

    @rule(node_id=st.sampled_from("ab"), cut_off=st.booleans(), noticed=st.booleans())
    def node_dies(self, node_id: str, cut_off: bool, noticed: bool) -> None:
        if self.world.nodes[node_id].alive:
            self.world.lose_node(node_id, cut_off=cut_off)
        if noticed:
            self.look()

    @rule(node_id=st.sampled_from("ab"))
    def node_returns(self, node_id: str) -> None:
        if self.world.can_return(node_id):
            self.world.return_node(node_id)
            self.look()

    @rule()
    def look(self) -> None:
        self.view = dict(self.world.nodes)

    @precondition(lambda self: self.world.running())
    @rule(index=pick, step=st.integers(1, 60), in_memory=st.booleans())
    def checkpoint(self, index: int, step: int, in_memory: bool) -> None:
        running = self.world.running()
        process = running[index % len(running)]
        path = "" if in_memory else f"/ckpt/{step}"
        self.world.tell(
            ev.CheckpointSaved(job_id=process.job_id, at=self.world.now, attempt=process.attempt, step=step, path=path)
        )

    @precondition(lambda self: self.jobs)
    @rule(index=pick, purpose=st.sampled_from([StopPurpose.CANCEL, StopPurpose.PAUSE, StopPurpose.PREEMPT]))
    def stop(self, index: int, purpose: StopPurpose) -> None:
        job = self.one(index, JobState.RUNNING, JobState.STARTING, JobState.RECOVERING)
        self.write(request_stop(job, purpose, "somebody", self.world.now))

    @precondition(lambda self: any(j.state is JobState.SUSPENDED for j in self.jobs.values()))
    @rule(index=pick)
    def resume(self, index: int) -> None:
        job = self.one(index, JobState.SUSPENDED)
        self.write([ev.JobResumed(job_id=job.id, at=self.world.now, by="somebody")])

    @precondition(lambda self: self.jobs)
    @rule(index=pick)
    def ignore_sigterm(self, index: int) -> None:
        self.world.stubborn.add(self.one(index).id)

    @precondition(lambda self: self.jobs)
    @rule(index=pick, priority=st.integers(40, 60))
    def reprioritise(self, index: int, priority: int) -> None:
        job = self.one(index, JobState.PENDING)
        self.write([ev.JobUpdated(job_id=job.id, at=self.world.now, by="somebody", priority=priority)])

    @rule(seconds=st.sampled_from([0.1, SETTLE_SECONDS, 3.0, LEASE_SECONDS, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def wake_up(self) -> None:
        if self.wake_at is not None and self.wake_at < self.world.now + 60:
            self.world.pass_time(max(0.0, self.wake_at - self.world.now))
        self.settle()

    @rule()
    def restart_the_daemon(self) -> None:
        held = self.jobs
        self.reopen()
        self.jobs = {job.id: job for job in self.wait(self.store.load_live())}
        assert self.jobs == held, "what the daemon knew is what the store knows"
        self.wake_at = None

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_record_equals_the_fold_of_its_events(self) -> None:
        assert self.wait(self.store.verify()) == []

    @invariant()
    def terminal_is_final(self) -> None:
        for job_id, job in self.ended.items():
            assert self.wait(self.store.job(job_id)) == job
            assert not job.gang_open
            assert not any(key[0] == job_id for key in self.world.gangs), "it ended before its gang was gone"
            assert not any(p.job_id == job_id for p in self.world.running()), "it ended before its processes"

    @invariant()
    def no_gpu_is_held_twice(self) -> None:
        held = Counter(n for job in self.jobs.values() if job.gang_open for n in job.nodes)
        assert all(held[node_id] <= node.gpus for node_id, node in self.world.nodes.items())

    @invariant()
    def a_gang_is_whole_or_absent(self) -> None:
        for job in self.jobs.values():
            assert len(job.nodes) == (job.num_workers if job.gang_open else 0)
            assert len(job.seats) in (0, job.num_workers)
            assert job.state.may_hold_gang or not job.gang_open

    @invariant()
    def restarts_stay_within_their_budgets(self) -> None:
        for job in (*self.jobs.values(), *self.ended.values()):
            limits = job.spec.retry.max_restarts
            assert job.restarts.get(FailureClass.USER, 0) <= limits.user
            assert job.restarts.get(FailureClass.INFRA, 0) <= limits.infra
            assert job.no_progress <= job.spec.retry.max_no_progress
            failures = sum(a.failure is not None for a in job.attempts)
            assert failures <= sum(job.restarts.values()) + 1

    @invariant()
    def a_job_that_runs_has_an_attempt(self) -> None:
        for job in self.jobs.values():
            assert [a.number for a in job.attempts] == list(range(1, len(job.attempts) + 1))
            if job.state in (JobState.STARTING, JobState.RUNNING):
                attempt = job.attempts[-1]
                assert attempt.gang == job.gang
                assert attempt.ended_at is None or job.succeeded or not job.attempt_live
            else:
                assert not job.attempt_live or job.state in (JobState.RECOVERING, JobState.DRAINING)

    @invariant()
    def at_most_one_attempt_lives(self) -> None:
        attempts = {(p.job_id, p.attempt) for p in self.world.processes}
        assert max(Counter(job_id for job_id, _ in attempts).values(), default=0) <= 1

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.leave_in_peace()
        finally:
            self.store.close()

    def leave_in_peace(self) -> None:
        """Nothing breaks any more: every job ends."""
        for _ in range(400):
            if not self.jobs:
                break
            for node_id in self.world.nodes:
                self.node_returns(node_id)
            for job in [j for j in self.jobs.values() if j.state is JobState.SUSPENDED]:
                self.write([ev.JobResumed(job_id=job.id, at=self.world.now, by="somebody")])
            self.settle()
            for job in list(self.jobs.values()):
                self.act(job)
            for process in self.world.running():
                if self.jobs[process.job_id].state is JobState.RUNNING:
                    self.world.end_process(process, exit_code=0)
            facts, self.world.outbox = self.world.outbox, []
            self.write(facts)
            self.world.pass_time(3.0)
        left = {j.id: (j.state, j.story) for j in self.jobs.values()}
        assert not left, f"these never end: {left}"
        assert not self.world.gangs
        assert not self.world.running()
        self.terminal_is_final()
        self.restarts_stay_within_their_budgets()
        self.the_record_equals_the_fold_of_its_events()
        assert len(self.ended) == self.accepted, "nothing that was accepted is lost"


class DurableDaemonMachine(DaemonMachine):
    """The same daemon on a store in SQLite, which every restart closes and opens again."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="orch-stateful-"))
        self.runner = asyncio.Runner()
        super().__init__()

    def open_store(self) -> Store:
        return SqliteStore.open(self.home / "orch.db", reserve=None, min_free_bytes=0)

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open_store()

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.runner.close()
            shutil.rmtree(self.home)


TestDaemon = DaemonMachine.TestCase
TestDaemon.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestDurableDaemon = DurableDaemonMachine.TestCase
TestDurableDaemon.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
