"""The production loop and service through random histories: users, faults, time, and crashes of the daemon between any two steps.

After every step the record equals the fold of its events and breaks no rule; at the end, without further faults, every
job ends. The in-memory runtime refuses orders that must never occur: a GPU used twice, an attempt beside another.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.api.errors import DiskFullError, RefusedError
from orchestrator.api.protocol import Verb
from orchestrator.core import events as ev
from orchestrator.core.lifecycle.failure import SETTLE_SECONDS
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import FailureClass, JobState
from orchestrator.runtime.memory import faults as f
from orchestrator.runtime.memory.cluster import MemoryCluster, Script
from orchestrator.runtime.ranks.rank_events import LEASE_SECONDS
from orchestrator.spec.settings import Settings
from orchestrator.store.store import Store
from tests.stateful.daemon import Crash, FaultyStore, SteppedDaemon
from tests.support.stores import IN_MEMORY, in_this_thread
from tests.unit.core.builders import T0, node

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.memory.cluster import Process
    from orchestrator.store.store import Store

T = TypeVar("T")
MAX_JOBS = 5
JOB = """
version: 1
name: job
entrypoint: python -c pass
working_dir: null
resources:
  num_workers: {workers}
  resources_per_worker: {{gpu: 1, cpu: 1}}
  placement_strategy: {strategy}
priority: {priority}
max_duration: 2h
stop_duration: 30s
retry:
  max_restarts: {{user: {user}, infra: {infra}}}
  max_no_progress: {max_no_progress}
  backoff: {{initial: 8s}}
health: {{startup_timeout: 30m}}
"""
SCRIPTS = (
    Script(stop_takes=5.0),
    Script(stop_takes=None),
    Script(seconds=100.0, save_every=30.0),
    Script(seconds=40.0, exit_code=1),
)
pick = st.integers(0, 1000)
exits = st.sampled_from(
    [
        f.Exit(code=0),
        f.Exit(code=1),
        f.Exit(code=75),
        f.Exit(signal=9),
        f.Exit(code=1, error_type="RuntimeError", error_message="boom"),
        f.Exit(code=1, error_type="RuntimeError", error_message="Connection closed by peer"),
    ]
)


class DaemonMachine(RuleBasedStateMachine):
    """A daemon on a store that every restart closes and opens again."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="orch-stateful-", dir=IN_MEMORY))
        self.runner = asyncio.Runner()
        self.settings = Settings.from_environ({"ORCH_HOME": str(self.home)})
        self.scripts: dict[JobId, Script] = {}
        self.cluster = MemoryCluster(
            [node("a", gpus=4, cpus=16), node("b", gpus=2, cpus=16)],
            now=T0,
            script_of=lambda job_id: self.scripts.get(job_id, Script()),
            latency=0.01,
        )
        self.store = FaultyStore(self.open_store(), self.cluster)
        self.accepted: dict[str, JobId] = {}
        self.submitted = 0
        self.ended: dict[JobId, Job] = {}
        self.past: list[ev.Event] = []
        self.begin_daemon()

    def open_store(self) -> Store:
        return in_this_thread(Store.open(self.home / "orch.db", reserve=None, min_free_bytes=0))

    def begin_daemon(self) -> None:
        self.daemon = SteppedDaemon(self.store, self.cluster, self.settings)
        self.runner.run(self.daemon.start())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def attempt(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call of the daemon; None when it was killed meanwhile and another one was started."""
        try:
            return self.wait(coroutine)
        except Crash:
            self.crash()
            return None

    def crash(self) -> None:
        self.daemon.gangs.crash()
        self.past += self.daemon.history
        self.store.close()
        self.store.store = self.open_store()
        self.begin_daemon()

    @property
    def jobs(self) -> dict[JobId, Job]:
        """The live jobs, as they are stored."""
        return self.daemon.loop.jobs

    def one(self, index: int, *states: JobState) -> Job:
        """Return a live job, in one of ``states`` if there is one."""
        found = [j for j in self.jobs.values() if not states or j.state in states] or list(self.jobs.values())
        return sorted(found, key=lambda j: j.submission.sequence)[index % len(found)]

    def process(self, index: int) -> Process:
        running = sorted(self.cluster.processes, key=lambda p: p.pid)
        return running[index % len(running)]

    def has_processes(self) -> bool:
        return next(iter(self.cluster.processes), None) is not None

    # -- users -------------------------------------------------------------------------------------------------------

    @initialize(workers=st.integers(1, 4))
    def first_job(self, workers: int) -> None:
        self.submit(
            workers=workers, priority=50, user=1, infra=2, max_no_progress=2, strategy="PACK", script=SCRIPTS[0]
        )

    @precondition(lambda self: len(self.jobs) < MAX_JOBS)
    @rule(
        workers=st.integers(1, 4),
        priority=st.sampled_from([40, 50, 60]),
        user=st.integers(0, 1),
        infra=st.integers(0, 3),
        max_no_progress=st.integers(1, 3),
        strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK"]),
        script=st.sampled_from(SCRIPTS),
    )
    def submit(self, script: Script, **keys: Any) -> None:
        text = JOB.format(**keys)
        self.submitted += 1
        key = f"key-{self.submitted}"
        job_id = self.accept(text, key)
        if job_id is None:
            return
        assert self.wait(self.daemon.submit(text, key)) == job_id, "a lost reply never submits twice"
        self.accepted[key] = job_id
        self.scripts[job_id] = script

    def accept(self, text: str, key: str) -> JobId | None:
        """Submit a job, again after a kill of the daemon, and return its id; None when the job is refused."""
        try:
            return self.attempt(self.daemon.submit(text, key)) or self.wait(self.daemon.submit(text, key))
        except DiskFullError:
            assert self.cluster.disk_full
        except RefusedError:  # it does not fit on the existing nodes
            assert not all(found.alive for found in self.daemon.loop.nodes.values())
        assert all(job.submission.idempotency_key != key for job in self.jobs.values()), (
            "a job that was refused is not stored"
        )
        return None

    @precondition(lambda self: self.jobs)
    @rule(index=pick, verb=st.sampled_from([Verb.CANCEL, Verb.PAUSE]))
    def stop(self, index: int, verb: Verb) -> None:
        job = self.one(index, JobState.RUNNING, JobState.STARTING, JobState.RECOVERING)
        self.act(job, verb)

    @precondition(lambda self: any(j.state is JobState.SUSPENDED for j in self.jobs.values()))
    @rule(index=pick)
    def resume(self, index: int) -> None:
        self.act(self.one(index, JobState.SUSPENDED), Verb.RESUME)

    @precondition(lambda self: self.jobs)
    @rule(index=pick, priority=st.integers(40, 60))
    def reprioritise(self, index: int, priority: int) -> None:
        self.act(self.one(index, JobState.PENDING), Verb.UPDATE, priority)

    def act(self, job: Job, verb: Verb, priority: int | None = None) -> None:
        with contextlib.suppress(RefusedError):  # it has ended, or drains, meanwhile
            self.attempt(self.daemon.act(job.id, verb, priority))

    # -- the daemon and the runtime -----------------------------------------------------------------------------------

    @rule()
    def round(self) -> None:
        self.attempt(self.daemon.step())

    @rule(count=st.integers(1, 12))
    def things_happen(self, count: int) -> None:
        for _ in range(count):
            self.cluster.step(self.cluster.now() + 1.0)

    @rule(seconds=st.sampled_from([0.1, SETTLE_SECONDS, 8.0, LEASE_SECONDS, 20.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.run_until(self.cluster.now() + seconds)

    @rule(rounds=st.integers(1, 6))
    def all_goes_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.daemon.deliver(len(self.daemon.outbox))
            self.attempt(self.daemon.step())
            self.cluster.run_until(self.cluster.now() + 0.1)

    @precondition(lambda self: self.daemon.outbox)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        self.daemon.deliver(count)
        self.attempt(self.daemon.step())

    @precondition(lambda self: self.past or self.daemon.history)
    @rule(index=pick)
    def deliver_again(self, index: int) -> None:
        """Check that a fact that was processed before changes nothing when it is delivered again."""
        facts = [*self.past, *self.daemon.history]
        fact = facts[index % len(facts)]
        job = self.daemon.loop.decided.get(fact.job_id)
        if job is not None and not isinstance(fact, ev.JobNoted) and not self.daemon.loop.woken:
            assert fold(job, fact) is job, f"a fact told twice changed something: {fact}"

    @rule()
    def wake_up(self) -> None:
        wake_at, now = self.daemon.wake_at, self.cluster.now()
        if wake_at is not None and wake_at < now + 60:
            self.cluster.run_until(max(wake_at, now))
        self.attempt(self.daemon.step())

    @rule()
    def look(self) -> None:
        self.daemon.look()

    @rule()
    def restart_the_daemon(self) -> None:
        held = dict(self.jobs)
        self.crash()
        assert self.jobs == held, "what the daemon knew is what the store knows"

    @rule(before=st.booleans())
    def crash_at_the_next_write(self, before: bool) -> None:
        self.store.crash_before, self.store.crash_after = before, not before

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    @precondition(has_processes)
    @rule(index=pick, how=exits)
    def rank_ends(self, index: int, how: f.Exit) -> None:
        process = self.process(index)
        f.RankDies(job=process.job_id, rank=process.rank, exit=how).inject(self.cluster)

    @precondition(has_processes)
    @rule(index=pick)
    def rank_hangs(self, index: int) -> None:
        process = self.process(index)
        f.RankHangs(job=process.job_id, rank=process.rank).inject(self.cluster)

    @precondition(has_processes)
    @rule(index=pick, machine=st.booleans())
    def stop_from_outside(self, index: int, machine: bool) -> None:
        process = self.process(index)
        f.StopSeen(job=process.job_id, rank=process.rank, machine=machine).inject(self.cluster)

    @precondition(lambda self: self.cluster.gangs)
    @rule(index=pick)
    def actor_dies(self, index: int) -> None:
        gangs = sorted(self.cluster.gangs.values(), key=lambda g: g.actors[0].pid)
        gang = gangs[index % len(gangs)]
        f.ActorDies(job=gang.job_id, rank=index % len(gang.actors)).inject(self.cluster)

    @rule(node_id=st.sampled_from("ab"), cut_off=st.booleans(), noticed=st.booleans())
    def node_dies(self, node_id: str, cut_off: bool, noticed: bool) -> None:
        f.NodeLost(node=node_id, cut_off=cut_off).inject(self.cluster)
        if noticed:
            self.daemon.look()

    @rule(node_id=st.sampled_from("ab"))
    def node_returns(self, node_id: str) -> None:
        f.NodeReturns(node=node_id).inject(self.cluster)
        self.daemon.look()

    @rule(node_id=st.sampled_from("ab"), silent=st.booleans())
    def node_answers(self, node_id: str, silent: bool) -> None:
        (f.NodeSilent(node=node_id) if silent else f.NodeAnswers(node=node_id)).inject(self.cluster)
        self.daemon.look()

    @precondition(lambda self: self.jobs)
    @rule(index=pick, count=st.integers(1, 3), lost=st.booleans())
    def replies(self, index: int, count: int, lost: bool) -> None:
        job = self.one(index)
        ((f.ReplyLost if lost else f.ReplyRepeated)(job=job.id, count=count)).inject(self.cluster)

    @rule(node_id=st.sampled_from("ab"), seconds=st.sampled_from([0.0, 2.0]))
    def slow(self, node_id: str, seconds: float) -> None:
        f.Slow(node=node_id, seconds=seconds).inject(self.cluster)

    @rule(index=st.integers(0, 1))
    def gpu_drops_out(self, index: int) -> None:
        f.GpuLost(node="a", index=index).inject(self.cluster)

    @rule()
    def disk_is_full(self) -> None:
        f.DiskFull().inject(self.cluster)

    @precondition(has_processes)
    @rule(index=pick, step=st.integers(1, 60), durable=st.booleans())
    def checkpoint(self, index: int, step: int, durable: bool) -> None:
        self.cluster.save(self.process(index), step, durable=durable)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_record_equals_the_fold_of_its_events(self) -> None:
        assert self.wait(self.store.verify()) == []

    @invariant()
    def what_is_shown_is_written(self) -> None:
        for job in self.jobs.values():
            assert self.wait(self.store.job(job.id)) == job

    @invariant()
    def nothing_acknowledged_is_lost_and_terminal_is_final(self) -> None:
        for job_id in self.accepted.values():
            if job_id in self.jobs:
                assert job_id not in self.ended
                continue
            job = self.wait(self.store.job(job_id))
            assert job.state.is_terminal
            assert self.ended.setdefault(job_id, job) == job
            assert not job.gang_open
            assert job_id not in self.cluster.gangs, "it ended before its gang was gone"
            assert not self.cluster.processes.of(job_id), "it ended before its processes"

    @invariant()
    def no_gpu_is_held_twice(self) -> None:
        held = Counter(n for job in self.jobs.values() if job.gang_open for n in job.nodes)
        assert all(held[node_id] <= of.node.gpus for node_id, of in self.cluster.nodes.items())
        used = Counter((p.actor.node.node.id, gpu) for p in self.cluster.processes for gpu in p.actor.gpus)
        assert max(used.values(), default=0) <= 1

    @invariant()
    def a_gang_is_whole_or_absent(self) -> None:
        for job in self.jobs.values():
            assert len(job.nodes) == (job.num_workers if job.gang_open else 0)
            assert len(job.seats) in (0, job.num_workers)
            assert job.state.may_hold_gang or not job.gang_open
        for job_id, gang in self.cluster.gangs.items():
            record = self.wait(self.store.job(job_id))
            assert (record.gang, record.gang_open) == (gang.number, True)
            assert len(gang.actors) == record.num_workers

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
        attempts = {(p.job_id, p.attempt) for p in self.cluster.processes}
        assert max(Counter(job_id for job_id, _ in attempts).values(), default=0) <= 1
        for process in self.cluster.processes:
            assert process.attempt <= self.wait(self.store.job(process.job_id)).attempt_number, "written, then done"

    @invariant()
    def an_attempt_begins_at_the_newest_good_checkpoint(self) -> None:
        for process in self.cluster.processes:
            saved = self.cluster.checkpoints.stored.get(process.job_id, [])
            earlier = [s.step for s in saved if s.attempt < process.attempt]
            assert process.began >= max(earlier, default=0)
        for job in self.jobs.values():
            paths = [s.path for s in self.cluster.checkpoints.stored.get(job.id, [])]
            assert not job.checkpoints.path or job.checkpoints.path in paths

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.leave_in_peace()
        finally:
            self.store.close()
            self.runner.close()
            shutil.rmtree(self.home)

    def leave_in_peace(self) -> None:
        """Without further faults every job ends, woken only by facts and the times that the loop requests."""
        self.store.crash_before = self.store.crash_after = self.cluster.disk_full = False
        for node_id, found in self.cluster.nodes.items():
            found.lost.clear()
            for fault in (f.NodeAnswers(node=node_id), f.NodeReturns(node=node_id), f.Slow(node=node_id, seconds=0.0)):
                fault.inject(self.cluster)
        self.daemon.look()
        for _ in range(2000):
            self.daemon.deliver(len(self.daemon.outbox))
            self.wait(self.daemon.step())
            if not self.jobs:
                break
            self.let_it_go_on()
        left = {j.id: (j.state, j.story) for j in self.jobs.values()}
        assert not left, f"these never end: {left}"
        assert not self.cluster.gangs
        assert not list(self.cluster.processes)
        assert not any(found.held for found in self.cluster.nodes.values())
        self.nothing_acknowledged_is_lost_and_terminal_is_final()
        self.restarts_stay_within_their_budgets()
        self.the_record_equals_the_fold_of_its_events()

    def let_it_go_on(self) -> None:
        for job in [j for j in self.jobs.values() if j.state is JobState.SUSPENDED]:
            self.act(job, Verb.RESUME)
        for process in list(self.cluster.processes):
            job = self.jobs[process.job_id]
            if job.state is JobState.RUNNING and process.actor.dead is None:
                process.end(f.Exit(code=0))
        if self.daemon.outbox or self.daemon.loop.woken:
            return
        times = [t for t in (self.cluster.agenda.next_at, self.daemon.wake_at) if t is not None]
        assert times, f"nothing will ever wake the loop: {[(j.id, j.state, j.story) for j in self.jobs.values()]}"
        self.cluster.run_until(max(min(times), self.cluster.now()))
        self.daemon.look()


TestDaemon = DaemonMachine.TestCase
TestDaemon.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
