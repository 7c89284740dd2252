"""The daemon's loop: takes facts, makes decisions, and writes everything before it is carried out.

One task owns the live jobs. Facts, commands and deadlines wake it; it polls nothing but the clock. In one round it folds what arrived,
calls ``core.scheduler.decide`` until nothing more follows, writes all of it in one transaction (the store takes the
records as folded here), and only then publishes it and passes the effects to the runtime: what was reported to a user stays
true after a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from orchestrator.clock import CLOCK
from orchestrator.core.codec import misfits
from orchestrator.core.errors import CoreError
from orchestrator.core.events import ClockStepped, GangAbandoned, JobNoted
from orchestrator.core.facts.notes import DroppedFact
from orchestrator.core.lifecycle.advance import desired_effect
from orchestrator.core.lifecycle.fold import change_of
from orchestrator.core.scheduler.live_jobs import LiveJobs, Reasons
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.daemon.jobs.prerequisites import PrerequisiteEnds, prerequisite_states
from orchestrator.daemon.sharing import SharingState
from orchestrator.store.errors import BrokenChainError, VersionConflictError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.clock import SteadyClock
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.states import JobState
    from orchestrator.daemon.ports import GangRuntime
    from orchestrator.store.store import Store

CLOCK_SECONDS: Final = 5.0
"""How often an idle loop compares its clock with the wall clock."""
READING_SECONDS: Final = 60.0
"""How often a reading of the clock is stored, beside those with each write: after a boot it tells when the last daemon ran."""
WRITE_RETRY_SECONDS: Final = 0.5
MAX_ROUNDS: Final = 1000
FACTS_AT_ONCE: Final = 64
"""Number of facts that are folded before other tasks of the daemon get a turn."""


def _ignore(_job: Job, _event: Event) -> None:
    """No-op default."""


def _ignore_seconds(_seconds: float) -> None:
    """No-op default."""


def _ignore_failure() -> None:
    """No-op default."""


@dataclass(slots=True)
class _Inbox:
    """Facts that have arrived since the last round, and commands with their waiters."""

    events: list[Event] = field(default_factory=list)
    commands: list[tuple[Callable[[], Sequence[Event]], asyncio.Future[None]]] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> tuple[list[Event], list[tuple[Callable[[], Sequence[Event]], asyncio.Future[None]]]]:
        """Return and clear the content, for one round."""
        self.wake.clear()
        taken = self.events, self.commands
        self.events, self.commands = [], []
        return taken


class Published(dict["JobId", "Job"]):
    """Live jobs by id; ``begun`` are those that have had an attempt."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        super().__init__()
        self.begun: dict[JobId, Job] = {}
        for job in jobs:
            self[job.id] = job

    def __setitem__(self, job_id: JobId, job: Job) -> None:
        super().__setitem__(job_id, job)
        if job.attempts:
            self.begun[job_id] = job

    def __delitem__(self, job_id: JobId) -> None:
        super().__delitem__(job_id)
        self.begun.pop(job_id, None)


class Loop:
    """Folds, decides and writes. ``on_change`` is called with each changed job; ``on_end`` with those that became terminal.

    ``jobs`` are the live jobs as written, for readers. ``decided`` are the same with the decisions of the present
    round: a command's new facts must follow from them. ``shares`` has the queues, and past use.
    """

    def __init__(
        self,
        *,
        store: Store,
        runtime: Callable[[], GangRuntime | None],
        on_change: Callable[[Job], None],
        on_end: Callable[[Job], None],
        on_event: Callable[[Job, Event], None] = _ignore,
        on_decision: Callable[[float], None] = _ignore_seconds,
        on_write_failed: Callable[[], None] = _ignore_failure,
        shares: SharingState | None = None,
        log: FilteringBoundLogger,
        clock: SteadyClock = CLOCK,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self.now = clock.now
        self._unmeasured = 0.0
        self._clock_read_at = clock.now()
        self._pause = pause
        self._store = store
        self._runtime = runtime
        self._on_change = on_change
        self._on_end = on_end
        self._on_event = on_event
        self._on_decision = on_decision
        self._on_write_failed = on_write_failed
        self._log = log
        self.jobs = Published()
        self.decided = LiveJobs()
        self.nodes: dict[str, Node] = {}
        self.waiting = Reasons()
        self.shares = SharingState() if shares is None else shares
        self._ends = PrerequisiteEnds()
        self.blocked_by_disk: str | None = None
        self._inbox = _Inbox()

    async def load(self) -> None:
        """Read the clock and every live job; the first round orders their pending effects again."""
        if (reading := await self._store.clock()) is None:
            await self._write([])
        else:
            self._unmeasured = self._clock.resume(reading)
        stored = await self._store.load_live()
        self.jobs = Published(stored)
        self.decided = LiveJobs(self.jobs.values())
        for name in await self.shares.load(self._store, stored, self.now()):
            self._log.warning("queue.change_does_not_fit_the_settings", queue=name)
        for job in stored:
            self._ends.expect(job, await prerequisite_states(job, self.decided, self._store))
        self._inbox.wake.set()

    def post(self, events: Sequence[Event]) -> None:
        """Add facts from the runtime. Call in the loop's thread."""
        self._inbox.events.extend(events)
        self._inbox.wake.set()

    def add(self, job: Job, prerequisites: Mapping[JobId, JobState | None] | None = None) -> None:
        """Add a job that was just accepted, and is in the store, with the ends of its prerequisites that are not live."""
        self._ends.expect(job, prerequisites or {})
        self.jobs[job.id] = self.decided[job.id] = job
        self._on_change(job)
        self._inbox.wake.set()

    def set_nodes(self, nodes: dict[str, Node]) -> None:
        """Set the present nodes of the cluster."""
        if nodes != self.nodes:
            self.nodes = nodes
            self._inbox.wake.set()

    @property
    def woken(self) -> bool:
        """Whether something has arrived that no round has taken yet."""
        return self._inbox.wake.is_set()

    def wake(self) -> None:
        """Decide again."""
        self._inbox.wake.set()

    async def command(self, make: Callable[[], Sequence[Event]]) -> None:
        """Run a user's command on the current state and wait until its events are durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.commands.append((make, done))
        self._inbox.wake.set()
        await done

    async def run(self) -> None:
        """Run rounds until cancelled."""
        wake_at: float | None = None
        while True:
            while not (self.woken or self._is_due(wake_at)):
                left = CLOCK_SECONDS if wake_at is None else max(0.0, wake_at - self.now())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, CLOCK_SECONDS)):
                        await self._inbox.wake.wait()
            wake_at = await self.step()

    def _is_due(self, wake_at: float | None) -> bool:
        """Whether a round is due though nothing has arrived: by its time, or because of the clock."""
        return (wake_at is not None and wake_at <= self.now()) or self._clock.step != 0.0 or self._reading_due()

    def _reading_due(self) -> bool:
        return self.now() - self._clock_read_at >= READING_SECONDS

    async def step(self) -> float | None:
        """Run one round; return the wall time of the next one without a wake-up. ``run`` repeats this until it is cancelled."""
        inbox, commands = self._inbox.take()
        batch: list[Change] = []
        for number, event in enumerate(inbox, 1):
            self._take(event, batch)
            if number % FACTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        answered: list[asyncio.Future[None]] = []
        for make, done in commands:
            try:
                for event in make():
                    self._fold(event, batch)
                answered.append(done)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
        moved = self._follow_clock(batch)
        wake_at = self._decide(batch)
        if batch or moved or self._reading_due():
            await self._write(batch, moved)
            for number, change in enumerate(batch, 1):
                self.jobs[change.after.id] = change.after
                self._observe(change.after, change.event)
                if number % FACTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        for done in answered:
            if not done.done():
                done.set_result(None)
        self._publish(batch)
        return wake_at

    def _take(self, event: Event, batch: list[Change]) -> None:
        """Fold a fact from outside. A fact that cannot be folded is skipped, with a note on its job only."""
        unusable = misfits(event)
        if unusable:
            self._log.warning("loop.unusable_fact", job=event.job_id, fact=event.kind, fields=unusable)
            self._note_dropped(DroppedFact(event=event.kind, fields=unusable), event.job_id, batch)
            return
        try:
            self._fold(event, batch)
        except Exception as error:
            self._log.exception("loop.impossible_fact", job=event.job_id, fact=event.kind)
            if not isinstance(error, CoreError):  # CoreError is for repeated or late facts
                self._note_dropped(DroppedFact(event=event.kind, error_type=type(error).__name__), event.job_id, batch)

    def _note_dropped(self, note: DroppedFact, job_id: JobId, batch: list[Change]) -> None:
        job = self.decided.get(job_id)
        if job is not None and note not in job.notes:
            self._fold(JobNoted(job_id=job.id, at=self.now(), note=note), batch)

    def _fold(self, event: Event, batch: list[Change]) -> None:
        job = self.decided.get(event.job_id)
        if job is None:
            return
        change = change_of(job, event)
        if change is not None:
            self.decided[job.id] = change.after
            self._ends.decided(change.after)
            self.shares.observe(change.after, event)
            batch.append(change)

    def _observe(self, job: Job, event: Event) -> None:
        """Call observers; their failure must not stop the loop for all jobs."""
        try:
            self._on_event(job, event)
        except Exception:
            self._log.exception("loop.observer_failed", job=job.id, fact=event.kind)

    def _follow_clock(self, batch: list[Change]) -> float:
        """Move the records of live jobs, and the clock, by what the wall clock has stepped; return those seconds.

        No fact may arrive between the two, and both are written together, so this waits for nothing.
        """
        step, unmeasured = self._clock.step, self._unmeasured
        if step or unmeasured:
            self._log.warning("clock.stepped", seconds=round(step, 3), unmeasured=round(unmeasured, 3))
            for job_id in list(self.decided):
                event = ClockStepped(job_id=job_id, at=self.now() + step, seconds=step, unmeasured=unmeasured)
                self._fold(event, batch)
        self._clock.move(step)
        self._unmeasured = 0.0
        return step

    def _decide(self, batch: list[Change]) -> float | None:
        for _ in range(MAX_ROUNDS):
            began = time.perf_counter()
            commands = decide(self.state(), self.now())
            self._on_decision(time.perf_counter() - began)
            if not commands.events:
                self.waiting = commands.waiting
                return commands.wake_at
            for event in commands.events:
                self._fold(event, batch)
        raise RuntimeError(f"decisions do not settle; the last were {[change.event.kind for change in batch[-5:]]}")

    def state(self) -> State:
        """Return the input of a decision."""
        shares = self.shares
        return State(
            jobs=self.decided,
            nodes=self.nodes,
            ended=self._ends.known,
            sharing=shares.sharing,
            past=shares.past,
            failed_fast=self._ends.failed_fast,
            idle=shares.idle,
        )

    async def _write(self, batch: list[Change], moved: float = 0.0) -> None:
        """Write until it succeeds: no effect is carried out before. A full disk delays decisions, never training."""
        reading, self._clock_read_at = self._clock.reading(), self.now()
        while True:
            try:
                await self._store.append(batch, clock=reading, moved=moved)
            except (VersionConflictError, BrokenChainError):
                raise  # memory and store disagree: stop, and start again from the store
            except Exception as error:
                self._on_write_failed()
                if self.blocked_by_disk is None:
                    self._log.exception("store.write_failed", events=len(batch))
                self.blocked_by_disk = str(error)
                await self._pause(WRITE_RETRY_SECONDS)
            else:
                self.blocked_by_disk = None
                return

    def _publish(self, batch: Sequence[Change]) -> None:
        """Publish what a round has written, and order the required effects, those in progress again."""
        before: dict[JobId, Job] = {}
        abandoned: list[Job] = []
        for change in batch:
            before.setdefault(change.after.id, change.before)
            if isinstance(change.event, GangAbandoned):
                abandoned.append(change.before)
        for job_id, was in before.items():
            self._log_transition(was, self.jobs[job_id])
            self._on_change(self.jobs[job_id])
        runtime = self._runtime()
        for job_id in {**before, **self.decided.active}:
            job = self.jobs[job_id]
            if job.state.is_terminal:
                del self.jobs[job_id], self.decided[job_id]
                self._ends.ended(job)
                if runtime is not None:
                    runtime.apply(job, None)
                self._on_end(job)
            elif runtime is not None:
                runtime.apply(job, desired_effect(job))
        for job in abandoned:
            self._log.warning("job.gang_abandoned", job=job.id, gang=job.gang, nodes=sorted(set(job.nodes)))
            if runtime is not None:
                runtime.abandon(job)

    def _log_transition(self, before: Job, job: Job) -> None:
        if before.state is not job.state:
            self._log.info(
                "job.state",
                job=job.id,
                attempt=job.attempt_number,
                was=before.state.value,
                now=job.state.value,
                reason=job.reason.sentence(),
            )


def readable(loop: Loop) -> State:
    """Return the input of a decision, with the live jobs as they are written."""
    return replace(loop.state(), jobs={i: job for i, job in loop.jobs.items() if not job.state.is_terminal})


def live_jobs(loop: Loop) -> Callable[[], Collection[Job]]:
    """Return a function that returns the jobs with an attempt: the loop replaces its dictionary after reading the store."""

    def live() -> Collection[Job]:
        return loop.jobs.begun.values()

    return live


def decided_jobs(loop: Loop) -> Callable[[], Collection[Job]]:
    """Return a function that returns the jobs that may hold a gang, by the last decision."""

    def decided() -> Collection[Job]:
        return loop.decided.active.values()

    return decided
