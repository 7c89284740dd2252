"""One rank: its script, its actor with numbered events, and its process with its exit record.

As on Ray, an attempt is launched once, orders of older attempts are refused, an attempt that is stopped before its
launch never starts, and an attempt's events stay available to any cursor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from orchestrator.core import events
from orchestrator.core.states import EndOrder
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.memory.nodes import Saved, UnsafeOrderError
from orchestrator.runtime.ranks.rank_events import RankEvent, StaleAttemptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.core.facts.faults import GangFault
    from orchestrator.core.ids import JobId
    from orchestrator.core.states import StopScope
    from orchestrator.runtime.memory.network import Agenda
    from orchestrator.runtime.memory.nodes import MemoryNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, for the runtime's purposes. Times are seconds.

    ``seconds`` is how long a rank takes from step 0 to its end; None: until it is ended. A resumed attempt takes the
    rest. ``save_every`` is the interval of rank 0's saves. ``stop_takes`` is the time from SIGTERM to a rank's end;
    None: it ignores SIGTERM. Its outputs take ``collect_seconds`` to be copied home; 0: it has none.
    """

    seconds: float | None = None
    exit_code: int = 0
    save_every: float | None = None
    stop_takes: float | None = 0.0
    stop_exit_code: int = 0
    collect_seconds: float = 0.0


_FIRST_PID: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End of a rank's process: an exit code or a signal, the exception of its script, the steps that it reported."""

    code: int | None = None
    signal: int | None = None
    error_type: str = ""
    error_message: str = ""
    log_tail: tuple[str, ...] = ()
    last_step: int | None = None
    total_steps: int | None = None


KILLED: Final = Exit(signal=9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """An actor's launched attempt, its process id, and its GPUs."""

    launched: int
    pid: int
    gpus: tuple[int, ...]


News: TypeAlias = RankEvent | Saved
PollAnswer: TypeAlias = tuple[int, Sequence[News]] | GangLostError
"""The next cursor and what is new, or the loss of the actor."""


@dataclass(slots=True)
class _Poll:
    """A poll that waits for events above its cursor."""

    attempt: int
    cursor: int
    answer: Callable[[PollAnswer], None]


@dataclass(slots=True, kw_only=True)
class MemoryActor:
    """The actor of one rank of one gang."""

    job_id: JobId
    gang: int
    rank: int
    pid: int
    gpus: tuple[int, ...]
    node: MemoryNode
    agenda: Agenda
    processes: Processes
    attempt: int = 0
    launched: int = 0
    called_off: int = 0
    events: list[News] = field(default_factory=list)
    process: Process | None = None
    dead: GangLostError | None = None
    _polls: list[_Poll] = field(default_factory=list)

    # -- orders

    def hello(self) -> Greeting:
        """Return the actor's greeting."""
        self._check_alive()
        return Greeting(launched=self.launched, pid=self.pid, gpus=self.gpus)

    def prepare(self, attempt: int) -> None:
        """Prepare for an attempt: no process of an older one is left on return."""
        self._check(attempt)
        if attempt > self.attempt:
            if self.process is not None:
                self.process.kill()
            self.attempt, self.events, self.process = attempt, [], None

    def launch(self, attempt: int) -> None:
        """Start the rank's process, once per attempt; not for an attempt that was cancelled."""
        self._check(attempt)
        if self.launched >= attempt or self.called_off >= attempt:
            return
        self.launched = attempt
        self.process = self.processes.start(self)
        self.report(kind="started", pid=self.process.pid)

    def stop(self, attempt: int, grace_seconds: float) -> None:
        """Send SIGTERM now, SIGKILL after the grace."""
        self._call_off(attempt)
        if self.process is not None:
            self.process.stop(grace_seconds)

    def kill(self, attempt: int) -> None:
        """Send SIGKILL to the whole tree now."""
        self._call_off(attempt)
        if self.process is not None:
            self.process.kill()

    def poll(self, attempt: int, cursor: int, answer: Callable[[PollAnswer], None]) -> None:
        """Call ``answer`` with the events above ``cursor`` once there are some, or with the loss of the actor."""
        if self.dead is not None:
            answer(self.dead)
            return
        self._check(attempt)
        if attempt == self.attempt and len(self.events) > cursor:
            answer((len(self.events), tuple(self.events[cursor:])))
        else:
            self._polls.append(_Poll(attempt, cursor, answer))

    def _call_off(self, attempt: int) -> None:
        self._check(attempt)
        self.called_off = max(self.called_off, attempt)
        if attempt > self.attempt:
            self.prepare(attempt)
        if self.launched < attempt:
            self.launched = attempt
            self.report(kind="gone")

    def _check(self, attempt: int) -> None:
        self._check_alive()
        if attempt < self.attempt:
            raise StaleAttemptError(f"{self.job_id} rank {self.rank}: attempt {attempt} was replaced by {self.attempt}")

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    # -- events

    @property
    def clock(self) -> float:
        """The time by the clock of its node."""
        return self.agenda.now + self.node.clock_ahead

    def report(self, **fields: Any) -> None:
        """Number an event and answer the waiting polls."""
        self.add(RankEvent(number=len(self.events) + 1, at=self.clock, **fields))

    def add(self, news: News) -> None:
        """Keep an event or checkpoint, and answer the waiting polls."""
        self.events.append(news)
        polls, self._polls = self._polls, []
        for poll in polls:
            if poll.attempt >= self.attempt:
                self.poll(poll.attempt, poll.cursor, poll.answer)

    def die(self, cause: GangFault, *, node_lost: bool = False, kill: bool = True) -> None:
        """End the actor; with ``kill`` also its process, as a keeper does when its lifeline to the actor breaks."""
        if self.dead is not None:
            return
        self.dead = GangLostError(cause, node_lost=node_lost)
        if kill and self.process is not None:
            self.process.kill()
        polls, self._polls = self._polls, []
        for poll in polls:
            poll.answer(self.dead)


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One rank's process. ``stop_seen_at`` is when it noticed a SIGTERM, ``ended_as`` how it ended."""

    pid: int
    job_id: JobId
    gang: int
    attempt: int
    rank: int
    script: Script
    actor: MemoryActor
    processes: Processes
    alive: bool = True
    began: float = 0.0
    """Seconds into its script at which it began."""
    hangs: bool = False
    ordered: EndOrder | None = None
    """The last order to end it."""
    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    ended_as: Exit | None = None

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM now, SIGKILL after the grace; a second stop can only shorten it."""
        if self.alive:
            self.ordered = EndOrder.STOP
        self.processes.agenda.after(grace_seconds, partial(self.kill, EndOrder.STOP_DEADLINE))
        self.terminate()

    def kill(self, order: EndOrder = EndOrder.KILL) -> None:
        """Send SIGKILL to the whole tree, as ordered."""
        if self.alive:
            self.ordered = order
        self.end(KILLED)

    def terminate(self, *, exit_code: int | None = None, scope: StopScope | None = None) -> None:
        """Send SIGTERM: the script saves and ends, unless it hangs or ignores the signal."""
        takes = self.script.stop_takes
        if not self.alive or self.hangs or takes is None or self.stop_seen_at is not None:
            return
        self.stop_seen_at, self.stop_scope = self.actor.clock, scope
        code = self.script.stop_exit_code if exit_code is None else exit_code
        self.processes.agenda.after(takes, partial(self.end, Exit(code=code)))

    def end(self, how: Exit) -> None:
        """End the process and its whole tree. Idempotent."""
        if self.alive:
            self.alive, self.ended_as = False, how
            self.processes.ended(self, how)

    def end_by_itself(self, how: Exit) -> None:
        """Reach the end of the script."""
        if not self.hangs:
            self.end(how)


@dataclass(slots=True)
class Processes:
    """Every running rank process, and the records of the ended ones. ``on_end`` is called at each end."""

    agenda: Agenda
    on_end: Callable[[Process], None]
    script_of: Callable[[JobId], Script]
    on_start: Callable[[Process], float]
    """Called at each start; returns how far into its script, in seconds, the process begins."""
    records: dict[JobId, dict[tuple[int, int], RankEvent]] = field(default_factory=dict)
    """Exit records by job, then attempt and rank, of processes that ended by themselves."""
    started: Counter[JobId] = field(default_factory=Counter)
    """How many processes were ever started, by job."""
    latest: dict[JobId, int] = field(default_factory=dict)
    """The highest attempt that was started, by job."""
    _running: dict[JobId, dict[int, Process]] = field(default_factory=dict)
    _pids: int = _FIRST_PID

    def start(self, actor: MemoryActor) -> Process:
        """Start a process for the actor's attempt. Raises UnsafeOrderError when one of another attempt still runs."""
        others = self._running.setdefault(actor.job_id, {})
        beside = others.get(actor.rank) or next(iter(others.values()), None)
        if beside is not None and (beside.attempt != actor.attempt or beside.rank == actor.rank):
            raise UnsafeOrderError(
                f"rank {actor.rank} of {actor.job_id}, attempt {actor.attempt}, starts beside rank {beside.rank} of"
                f" attempt {beside.attempt}"
            )
        self._pids += 1
        self.started[actor.job_id] += 1
        self.latest[actor.job_id] = max(self.latest.get(actor.job_id, 0), actor.attempt)
        process = Process(
            pid=self._pids,
            job_id=actor.job_id,
            gang=actor.gang,
            attempt=actor.attempt,
            rank=actor.rank,
            script=self.script_of(actor.job_id),
            actor=actor,
            processes=self,
        )
        others[actor.rank] = process
        process.began = self.on_start(process)
        if process.script.seconds is not None:
            left = max(0.0, process.script.seconds - process.began)
            self.agenda.after(left, partial(process.end_by_itself, Exit(code=process.script.exit_code)))
        return process

    def of(self, job_id: JobId) -> tuple[Process, ...]:
        """Return the job's running processes, in the order in which they started."""
        return tuple(self._running.get(job_id, {}).values())

    def of_rank(self, job_id: JobId, rank: int) -> Process | None:
        """Return the running process of a rank."""
        return self._running.get(job_id, {}).get(rank)

    def __iter__(self) -> Iterator[Process]:
        for running in self._running.values():
            yield from running.values()

    def forget(self, job_id: JobId) -> None:
        """Drop the exit records of a job."""
        self.records.pop(job_id, None)

    def ended(self, process: Process, how: Exit) -> None:
        """Record the end; the actor reports it if it lives."""
        running = self._running[process.job_id]
        del running[process.rank]
        if not running:
            del self._running[process.job_id]
        if process.actor.dead is None:
            number, now = len(process.actor.events) + 1, process.actor.clock
            event = RankEvent(number=number, kind="exited", at=now, exit=_exit(process, how, now))
            if process.ordered is None:
                self.records.setdefault(process.job_id, {})[process.attempt, process.rank] = event
            process.actor.add(event)
            process.actor.report(kind="gone")
        self.on_end(process)


def _exit(process: Process, how: Exit, at: float) -> events.Exit:
    return events.Exit(
        rank=process.rank,
        at=at,
        exit_code=how.code,
        signal=how.signal,
        error_type=how.error_type,
        error_message=how.error_message,
        log_tail=how.log_tail,
        stop_seen_at=process.stop_seen_at,
        stop_scope=process.stop_scope,
        last_step=how.last_step,
        total_steps=how.total_steps,
        ordered=process.ordered,
    )
