"""The store and the scheduler through random histories, without a runtime: checks the decisions after each step.

Jobs of several users, queues, names and limits are submitted, run, save, fail, are cancelled, paused and preempted; nodes are cordoned and reserved. Each
decision is made on the index that is kept, and again on a new one; its events are folded and stored. At the end none is submitted, the running
jobs end in turn, and each job must have ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core import events as ev
from orchestrator.core.cluster import NodeReservation
from orchestrator.core.facts.findings import GpusUnused
from orchestrator.core.facts.reasons import ByIdleReclaim, ByTimeSharing, ByUser
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.advance import request_resume, request_stop
from orchestrator.core.lifecycle.fold import change_of
from orchestrator.core.scheduler.live_jobs import MAX_IN_A_WINDOW, WINDOW_SECONDS, LiveJobs
from orchestrator.core.scheduler.preemption import REPEATED_SECONDS
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.scheduler.shares import Sharing
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose
from orchestrator.daemon.sharing import SharingState
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.queues import parse_queues
from tests.support.records import replace
from tests.support.stores import close_all, new_store
from tests.unit.core.builders import T0, checkpoint, exited, gone, make_spec, node, nodes, released, submission, up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

MAX_JOBS = 12
MAX_ROUNDS = 200
AGEING = 600.0
QUEUES = (
    "",
    "lab guaranteed=4 maximum=6; prod guaranteed=2",
    "top maximum=8; lab parent=top weight=2; prod parent=top guaranteed=4",
)
PICK = st.integers(0, 1000)


def told(commands: Commands) -> tuple[object, ...]:
    """Return the content of a decision, in an order that does not depend on the order of dictionaries."""
    return sorted(map(repr, commands.events)), dict(commands.waiting), commands.wake_at


class Scheduling(RuleBasedStateMachine):
    """A store, an index of its live jobs, the terms of sharing, and nodes."""

    @initialize(
        queues=st.sampled_from(QUEUES),
        user_gpus=st.sampled_from([None, None, 5]),
        idle=st.sampled_from([None, 90.0]),
        user_jobs=st.sampled_from([None, None, 3]),
    )
    def begin(
        self,
        queues: str,
        user_gpus: int | None,
        user_jobs: int | None,
        idle: float | None,
    ) -> None:
        self.now = T0
        self.runner = asyncio.Runner()
        self.store = new_store()
        self.jobs = LiveJobs()
        self.nodes: dict[str, Node] = nodes(node("a", gpus=4), node("b", gpus=4), node("c", gpus=2))
        sharing = Sharing(
            queues=parse_queues(queues),
            ageing=AGEING,
            user_gpus=user_gpus,
            user_jobs=user_jobs,
            reclaim_idle=idle,
        )
        self.names = [queue.name for queue in sharing.queues if queue.name != "top"] or ["default"]
        self.book = SharingState(sharing)
        self.ended: dict[JobId, Job] = {}
        self.submitted = 0
        self.reserved = False
        self.opened: dict[JobId, float] = {}

    # -- what happens

    @precondition(lambda self: self.submitted < MAX_JOBS)
    @rule(
        user=st.sampled_from(["ada", "bob"]),
        queue=PICK,
        workers=st.sampled_from([1, 1, 2, 3, 4, ElasticWorkers(min=1, max=4), ElasticWorkers(min=2, max=3)]),
        priority=st.sampled_from([50, 50, 60]),
        limit=st.sampled_from([None, None, 90.0, 4000.0]),
        name=st.sampled_from(["digits", "words"]),
        preemptible=st.sampled_from([True, True, False]),
        strategy=st.sampled_from(["PACK", "STRICT_PACK"]),
    )
    def submit(self, user: str, queue: int, limit: float | None, **keys: Any) -> None:
        self.submitted += 1
        duration = None if limit is None else timedelta(seconds=limit)
        spec = make_spec(queue=self.names[queue % len(self.names)], max_duration=duration, **keys)
        event = submission(spec, job_id=f"job-{self.submitted:03}", user=user, at=self.now)
        job, _ = self.runner.run(self.store.submit(event))
        self.jobs[job.id] = job
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 30.0, 100.0, 700.0, 4000.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(pick=PICK)
    def a_job_succeeds(self, pick: int) -> None:
        if job := self.one(pick, JobState.RUNNING):
            self.succeed(job)
            self.settle()

    @rule(pick=PICK)
    def the_gpus_of_a_job_are_idle_or_no_longer(self, pick: int) -> None:
        if job := self.one(pick, JobState.RUNNING):
            make = ev.FindingClosed if job.findings else ev.FindingOpened
            finding = GpusUnused(gpus=job.num_workers)
            self.take(make(job_id=job.id, at=self.now, attempt=job.attempt_number, finding=finding))
            self.opened[job.id] = self.now
            self.settle()

    @rule(pick=PICK)
    def a_rank_fails(self, pick: int) -> None:
        if (job := self.one(pick, JobState.RUNNING)) and not job.exits:
            self.take(exited(job, rank=0, exit_code=1, at=self.now))
            self.settle()

    @rule(pick=PICK)
    def a_job_saves(self, pick: int) -> None:
        if job := self.one(pick, JobState.RUNNING):
            self.take(checkpoint(job, job.checkpoints.step + 1, path=f"/c/{job.version}", at=self.now))
            self.settle()

    @rule(pick=PICK)
    def processes_and_actors_go(self, pick: int) -> None:
        if job := self.one(pick, JobState.DRAINING, JobState.RECOVERING):
            self.let_go(job)
            self.settle()

    @rule(pick=PICK, purpose=st.sampled_from([StopPurpose.CANCEL, StopPurpose.PAUSE]))
    def a_user_stops_a_job(self, pick: int, purpose: StopPurpose) -> None:
        if job := self.one(pick, *JobState):
            self.take(*request_stop(job, purpose, ByUser(name="ada"), self.now))
            self.settle()

    @rule(pick=PICK)
    def a_user_resumes_a_job(self, pick: int) -> None:
        if job := self.one(pick, JobState.SUSPENDED):
            self.take(*(request_resume(job, "ada", self.now) or ()))
            self.settle()

    @rule(name=st.sampled_from("abc"))
    def a_node_is_cordoned_or_no_longer(self, name: str) -> None:
        there = self.nodes[name]
        self.nodes = {**self.nodes, name: replace(there, cordoned=not there.cordoned)}
        self.settle()

    @rule(
        name=st.sampled_from("abc"), after=st.sampled_from([-5.0, 60.0, 900.0]), seconds=st.sampled_from([60.0, 2000.0])
    )
    def a_node_is_reserved(self, name: str, after: float, seconds: float) -> None:
        there, self.reserved = self.nodes[name], True
        one = NodeReservation(
            id=f"r{self.now}-{len(there.reservations)}", start=self.now + after, end=self.now + after + seconds
        )
        self.nodes = {**self.nodes, name: replace(there, reservations=(*there.reservations[-1:], one))}
        self.settle()

    # -- what follows

    def one(self, pick: int, *states: JobState) -> Job | None:
        """Return a live job in one of the states; None without any."""
        found = [job for job in self.jobs.values() if job.state in states]
        return found[pick % len(found)] if found else None

    def take(self, *events: ev.Event) -> None:
        """Fold and store events."""
        for event in events:
            change = change_of(self.jobs[event.job_id], event)
            if change is None:
                continue
            self.runner.run(self.store.append([change]))
            self.book.observe(change.after, event)
            if change.after.state.is_terminal:
                self.ended[change.after.id] = change.after
                del self.jobs[change.after.id]
            else:
                self.jobs[change.after.id] = change.after

    def settle(self) -> None:
        """Decide until no event follows; ranks are up as soon as they are ordered."""
        for _ in range(MAX_ROUNDS):
            commands = self.decided()
            if not commands.events:
                return
            for event in commands.events:
                if isinstance(event, ev.StopRequested) and isinstance(event.by, ByTimeSharing):
                    self.it_has_just_saved(self.jobs[event.job_id], self.jobs[JobId(event.by.job)])
                self.take(event)
                if isinstance(event, ev.AttemptStarted):
                    job = self.jobs[event.job_id]
                    assert len(event.nodes) == job.num_workers, "a gang is whole"
                    assert all(self.nodes[i].schedulable for i in event.nodes) or event.gang == job.attempts[-1].gang
                    self.ends_before_a_reservation(self.jobs[event.job_id], event.nodes)
                    self.take(up(job, at=self.now, attempt=job.attempt_number))
        raise AssertionError("decisions do not settle")

    def it_has_just_saved(self, job: Job, waiting: Job) -> None:
        """Check that a job that stops by time sharing repeats no more than a minute, and gives way only to its equals."""
        began, saved = job.attempts[-1].running_at, job.checkpoints.durable_at
        assert job.spec.preemptible
        assert began is not None
        assert saved is not None
        assert saved >= began
        assert self.now - saved <= REPEATED_SECONDS
        assert job.priority <= waiting.priority
        assert job.spec.queue == waiting.spec.queue or not self.book.sharing.queues

    def ends_before_a_reservation(self, job: Job, places: Iterable[str]) -> None:
        """Check that a job starting on a node is expected to end before the node is reserved; an existing gang stays."""
        if job.attempts[-1].gang != job.gang or len([a for a in job.attempts if a.gang == job.gang]) > 1:
            return
        left = self.book.past.run_times.left(job, self.now)
        end = math.inf if left is None else self.now + left.seconds
        for node_id in places:
            assert not [r for r in self.nodes[node_id].reservations if r.end > self.now and r.start < end]

    @invariant()
    def nothing_runs_on_a_node_while_it_is_reserved(self) -> None:
        for job in self.live():
            closed = [r for i in job.nodes for r in self.nodes[i].reservations if r.start <= self.now < r.end]
            assert not closed or job.state is not JobState.RUNNING or job.succeeded

    def decided(self) -> Commands:
        """Return a decision; check that it is the same on a new index, and when it is made again."""
        kept = State(
            jobs=self.jobs, nodes=self.nodes, sharing=self.book.sharing, past=self.book.past, idle=self.book.idle
        )
        anew = replace(kept, jobs=dict(self.jobs))
        first = decide(anew, self.now)
        assert told(decide(anew, self.now)) == told(first)
        commands = decide(kept, self.now)
        assert told(commands) == told(first)
        return commands

    def succeed(self, job: Job) -> None:
        for rank in range(job.num_workers):
            if not job.exits.has(rank):
                self.take(exited(self.jobs[job.id], rank=rank, exit_code=0, at=self.now))
        self.settle()
        self.let_go(self.jobs[job.id])

    def let_go(self, job: Job) -> None:
        if job.attempt_live:
            self.take(gone(job, at=self.now))
        if job.gang_open:
            self.take(released(self.jobs[job.id], at=self.now))

    # -- what always holds

    @invariant()
    def no_gpu_is_held_twice(self) -> None:
        held = Counter(place for job in self.live() for place in job.nodes)
        assert all(count <= self.nodes[place].gpus for place, count in held.items())

    @invariant()
    def a_gang_is_whole_or_absent(self) -> None:
        assert all(len(job.nodes) in (0, job.num_workers) for job in self.live())

    @invariant()
    def quotas_and_limits_are_held(self) -> None:
        sharing = self.book.sharing if self.live() else Sharing()
        parents = {queue.name: queue.parent for queue in sharing.queues}
        for queue in sharing.queues:
            there = [job for job in self.live() if queue.name in (job.spec.queue, parents.get(job.spec.queue))]
            assert queue.maximum is None or sum(len(job.nodes) for job in there) <= queue.maximum
        for user in ("ada", "bob"):
            mine = [job for job in self.live() if job.submission.user == user and job.gang_open]
            assert sharing.user_jobs is None or len(mine) <= sharing.user_jobs
            assert sharing.user_gpus is None or sum(len(job.nodes) for job in mine) <= sharing.user_gpus

    @invariant()
    def the_store_has_what_was_decided_and_what_has_ended_stays_so(self) -> None:
        if self.live() or getattr(self, "ended", None):
            assert {job.id: job for job in self.runner.run(self.store.load_live())} == dict(self.jobs)
            assert all(self.runner.run(self.store.job(job_id)) == job for job_id, job in self.ended.items())
            assert all(job.state.is_terminal for job in self.ended.values())

    @invariant()
    def budgets_are_kept(self) -> None:
        for job in (*self.live(), *getattr(self, "ended", {}).values()):
            allowed = job.spec.retry.max_restarts.user
            assert job.restarts.get(FailureClass.USER.value, 0) <= (allowed if isinstance(allowed, int) else 0)
            if self.reserved:  # stops by a reservation count towards the bound, but are not limited by it
                continue
            stops = [a.ended_at or 0.0 for a in job.attempts if a.state is AttemptState.PREEMPTED]
            many = zip(stops, stops[MAX_IN_A_WINDOW:], strict=False)
            assert all(last - first >= WINDOW_SECONDS for first, last in many)

    @invariant()
    def only_what_is_idle_for_long_is_reclaimed(self) -> None:
        for job in self.live():
            if job.stop is not None and isinstance(job.stop.by, ByIdleReclaim):
                assert self.book.sharing.reclaim_idle == job.stop.by.seconds
                assert job.stop.at - self.opened[job.id] >= job.stop.by.seconds

    def live(self) -> Sequence[Job]:
        return list(getattr(self, "jobs", {}).values())

    # -- in the end

    def teardown(self) -> None:
        try:
            self.let_all_end()
        finally:
            self.runner.close()
            close_all()

    def let_all_end(self) -> None:
        """Check that no job starves: with all nodes back, running jobs end in turn, and each job starts and ends."""
        if not self.live():
            return
        self.nodes = {name: replace(there, cordoned=False, reservations=()) for name, there in self.nodes.items()}
        for _ in range(MAX_ROUNDS):
            self.now += AGEING
            self.settle()
            if not self.live():
                return
            self.first(lambda job: job.state in (JobState.DRAINING, JobState.RECOVERING), self.let_go)
            self.first(lambda job: job.state is JobState.RUNNING, self.succeed)
            self.first(lambda job: job.state is JobState.SUSPENDED, self.resume)
        raise AssertionError(f"these never end: {[(job.id, job.state) for job in self.live()]}")

    def first(self, fits: Callable[[Job], bool], do: Callable[[Job], None]) -> None:
        found: Iterable[Job] = [job for job in self.live() if fits(job)][:1]
        for job in found:
            do(job)

    def resume(self, job: Job) -> None:
        self.take(*(request_resume(job, "ada", self.now) or ()))


Scheduling.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestScheduling = Scheduling.TestCase
