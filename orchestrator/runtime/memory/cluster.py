"""A cluster in memory: time and messages, nodes and storage, gangs, ranks and their processes. All of it outlives the daemon.

Messages are delayed, lost or repeated as faults require. As on Ray, an attempt is launched once, orders of older attempts are refused, an attempt
that is stopped before its launch never starts, and an attempt's events stay available to any cursor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from orchestrator.clock import SteadyClock
from orchestrator.core import events
from orchestrator.core.facts.faults import ActorMissing, ActorNotPlaced, NodeLost, StoppedUnplaced
from orchestrator.core.scheduler.placement import rank_size
from orchestrator.core.states import EndOrder
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS, LEASE_SECONDS, RankEvent, StaleAttemptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from orchestrator.core.cluster import Node
    from orchestrator.core.facts.faults import GangFault
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.states import StopScope


@dataclass(slots=True, eq=False)
class Entry:
    """One pending action, which ``cancel`` voids."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Void the action."""
        self.action = None


class Agenda:
    """Runs actions in the order of their times; actions of the same time in the order in which they were added."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Entry]] = []
        self._entered = 0

    def at(self, when: float, action: Callable[[], None]) -> Entry:
        """Add an action for wall time ``when``, or for now if that has passed."""
        entry = Entry(action)
        self._entered += 1
        heapq.heappush(self._heap, (max(when, self.now), self._entered, entry))
        return entry

    def after(self, seconds: float, action: Callable[[], None]) -> Entry:
        """Add an action that is due in ``seconds``."""
        return self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """Return when the next action is due; None when there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def step(self, until: float) -> bool:
        """Run the next action that is due by ``until``, at its time. False when there is none."""
        when = self.next_at
        if when is None or when > until:
            return False
        _, _, entry = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        action, entry.action = entry.action, None
        if action is not None:
            action()
        return True

    def run_until(self, until: float) -> int:
        """Run everything that is due by ``until``, which becomes the current time; return the number of actions."""
        count = 0
        while self.step(until):
            count += 1
        self.now = max(self.now, until)
        return count


ANSWER_SECONDS: Final = 20.0
"""After this time an answer counts as lost, and the request is repeated."""


class NoAnswerError(Exception):
    """No answer arrived: the request may be carried out or not."""


@dataclass(slots=True)
class Network:
    """The network. ``latency`` is the delay of a message each way, in seconds."""

    agenda: Agenda
    latency: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    _arrived: dict[JobId, float] = field(default_factory=dict)

    def ask(self, job_id: JobId, node: MemoryNode | None, do: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """Run ``do`` on a node (None: on the control plane), and call ``answer`` with its result or exception.

        Messages about one job arrive in the order in which they were sent. A lost answer becomes a NoAnswerError.
        """
        arrives = max(self.agenda.now + self._accepts(node), self._arrived.get(job_id, 0.0))
        self._arrived[job_id] = arrives
        self.agenda.at(arrives, partial(self._deliver, job_id, node, do, answer))

    def follow(
        self,
        job_id: JobId,
        node: MemoryNode | None,
        do: Callable[[Callable[[Any], None]], None],
        answer: Callable[[Any], None],
    ) -> None:
        """Run ``do`` on a node like ``ask``, for a deferred result: ``do`` gets a function to call with it."""
        replying = partial(self.reply, job_id, node, answer)

        def begin() -> None:
            if node is not None and node.silent:
                node.waiting.append(begin)
                return
            try:
                do(replying)
            except (GangLostError, StaleAttemptError) as error:
                replying(error)

        self.agenda.after(self._accepts(node), begin)

    def reply(self, job_id: JobId, node: MemoryNode | None, answer: Callable[[Any], None], what: Any) -> None:
        """Send ``what`` back."""
        if self.lost[job_id] > 0:
            self.lost[job_id] -= 1
            self.agenda.after(ANSWER_SECONDS, partial(answer, NoAnswerError()))
            return
        if self.repeated[job_id] > 0:
            self.repeated[job_id] -= 1
            self.agenda.after(self._accepts(node), partial(answer, what))
        self.agenda.after(self._accepts(node), partial(answer, what))

    def forget(self, job_id: JobId) -> None:
        """Drop what belongs to an ended job."""
        self._arrived.pop(job_id, None)
        self.lost.pop(job_id, None)
        self.repeated.pop(job_id, None)

    def _accepts(self, node: MemoryNode | None) -> float:
        return self.latency + (node.slow if node is not None else 0.0)

    def _deliver(
        self, job_id: JobId, node: MemoryNode | None, do: Callable[[], Any], answer: Callable[[Any], None]
    ) -> None:
        if node is not None and node.silent:
            node.waiting.append(partial(self._deliver, job_id, node, do, answer))
            return
        try:
            what = do()
        except (GangLostError, StaleAttemptError) as error:
            what = error
        self.reply(job_id, node, answer, what)


Holder: TypeAlias = "tuple[JobId, int, int]"
"""A job, its gang, and a rank of it."""

_ROUNDING = 1e-9


class UnsafeOrderError(AssertionError):
    """An order that must never be given: a GPU twice, or a second attempt or gang of a job at the same time."""


@dataclass(frozen=True, slots=True)
class Hold:
    """GPUs and CPUs of a node that one rank holds."""

    gpus: tuple[int, ...]
    share: float
    """Share of each of those GPUs."""
    cpus: float


@dataclass(slots=True)
class MemoryNode:
    """A node; ``node`` is the scheduler's initial view, ``slow`` the extra delay of each message, in seconds.

    By ``clock_ahead`` seconds its clock is ahead of the cluster's time.
    """

    node: Node
    alive: bool = True
    silent: bool = False
    slow: float = 0.0
    clock_ahead: float = 0.0
    died_at: float = 0.0
    lost: set[int] = field(default_factory=set)
    held: dict[Holder, Hold] = field(default_factory=dict)
    abandoned: set[Holder] = field(default_factory=set)
    """Those that the record has given up, as `orch cancel --force` does: for the daemon they are other users of the node."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests that arrived while it was silent."""

    def view(self) -> Node:
        """Return the node as the scheduler sees it."""
        given_up = [self.held[holder] for holder in self.abandoned & self.held.keys()]
        gpus = self.node.other_gpus + len(self.lost) + sum(hold.share * len(hold.gpus) for hold in given_up)
        cpus = self.node.other_cpus + sum(hold.cpus for hold in given_up)
        return replace(self.node, alive=self.alive, reachable=not self.silent, other_gpus=gpus, other_cpus=cpus)

    def take(self, holder: Holder, gpus: float, cpus: float) -> Hold | None:
        """Reserve a rank's share; None when too few healthy GPUs are left, or a gang that was given up holds them.

        Raises UnsafeOrderError where a gang of the record holds them.
        """
        found = self._find(gpus)
        if found is None:
            return None
        if sum(h.cpus for h in self.held.values()) + cpus > self.node.cpus + _ROUNDING:
            if self.abandoned & self.held.keys():
                return None
            raise UnsafeOrderError(f"{holder} gets CPUs of {self.node.id} that {sorted(self.held)} hold")
        hold = self.held[holder] = Hold(found, min(gpus, 1.0), cpus)
        return hold

    def _find(self, gpus: float) -> tuple[int, ...] | None:
        used = dict.fromkeys(range(int(self.node.gpus)), 0.0)
        for hold in self.held.values():
            for index in hold.gpus:
                used[index] += hold.share
        share, count = (gpus, 1) if 0 < gpus < 1 else (1.0, round(gpus))
        fitting = [i for i, taken in used.items() if taken + share <= 1 + _ROUNDING]
        healthy = [i for i in fitting if i not in self.lost]
        if len(fitting) < count and self.abandoned & self.held.keys():
            return None
        if len(fitting) < count:
            raise UnsafeOrderError(f"{gpus:g} GPUs of {self.node.id} are given away twice; {self.held} hold them")
        if len(healthy) < count:
            return None
        healthy.sort(key=lambda i: (-used[i], i))  # as in Ray, a shared GPU is filled first
        return tuple(healthy[:count])

    def uuid(self, index: int) -> str:
        """Return a GPU's UUID."""
        return f"GPU-{self.node.id}-{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint. An empty ``path`` means a snapshot in the memory of its gang."""

    attempt: int
    gang: int
    step: int
    at: float
    path: str


@dataclass(slots=True)
class Checkpoints:
    """The valid checkpoints on storage, ``stored``, by job in the order of saving, and the torn ones, ``broken``."""

    stored: dict[JobId, list[Saved]] = field(default_factory=dict)
    broken: dict[JobId, list[Saved]] = field(default_factory=dict)
    snapshots: dict[JobId, Saved] = field(default_factory=dict)

    def keep(self, job_id: JobId, saved: Saved) -> None:
        """Record a checkpoint that an attempt has saved."""
        if saved.path:
            self.stored.setdefault(job_id, []).append(saved)
        else:
            self.snapshots[job_id] = saved

    def flush(self, job_id: JobId, gang: int, at: float) -> Saved | None:
        """Write the snapshot of a gang to storage before the gang ends."""
        snapshot = self.snapshots.pop(job_id, None)
        if snapshot is None or snapshot.gang != gang:
            return None
        saved = replace(snapshot, at=at, path=path_of(job_id, snapshot.attempt, snapshot.step))
        self.keep(job_id, saved)
        return saved

    def newest(self, job_id: JobId, gang: int) -> Saved | None:
        """Return what an attempt in ``gang`` resumes from: the snapshot in its memory, or the newest on storage."""
        stored = self.stored.get(job_id, [])
        snapshot = self.snapshots.get(job_id)
        found = [*stored, snapshot] if snapshot is not None and snapshot.gang == gang else stored
        return max(found, key=lambda saved: (saved.step, saved.at), default=None)

    def resume(self, job_id: JobId, gang: int) -> int:
        """Return the step at which an attempt in ``gang`` begins."""
        newest = self.newest(job_id, gang)
        return 0 if newest is None else newest.step

    def break_newest(self, job_id: JobId) -> Saved | None:
        """Tear the newest checkpoint on storage and return it; None when there is none."""
        stored = self.stored.get(job_id)
        if not stored:
            return None
        torn = max(stored, key=lambda saved: (saved.step, saved.at))
        stored.remove(torn)
        self.broken.setdefault(job_id, []).append(torn)
        return torn


def path_of(job_id: JobId, attempt: int, step: int) -> str:
    """Return the path of a checkpoint on storage."""
    return f"/checkpoints/{job_id}/{attempt}/{step}"


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


_FIRST_ACTOR_PID = 100


@dataclass(slots=True)
class MemoryGang:
    """A gang's actors by rank. It exists as a whole, or not at all."""

    job_id: JobId
    number: int
    actors: list[MemoryActor] = field(default_factory=list)


class MemoryCluster:
    """Nodes, and what runs on them. ``script_of`` gives the script of a job's ranks.

    Time passes in ``step`` and ``run_until`` only; ``now`` is the time, which no clock's step changes. Faults are
    injected by ``faults.py``. An order that must never be given (a GPU twice, two attempts at once) raises
    UnsafeOrderError where it arrives.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        now: float = 0.0,
        script_of: Callable[[JobId], Script] = lambda _: Script(),
        latency: float = 0.0,
    ) -> None:
        self.agenda = Agenda(now)
        self.network = Network(self.agenda, latency)
        self.nodes = {node.id: MemoryNode(node) for node in nodes}
        self.gangs: dict[JobId, MemoryGang] = {}
        self.checkpoints = Checkpoints()
        self.script_of = script_of
        self.processes = Processes(self.agenda, self._process_ended, script_of, self._process_started)
        self.disk_full = False
        self.wall_ahead = 0.0
        self.boots = 0
        self.connected = True
        self._actors = 0

    # -- time

    def now(self) -> float:
        """Return the wall time."""
        return self.agenda.now

    def clock(self) -> SteadyClock:
        """Return a new clock for a daemon, whose wall clock steps with ``wall_ahead``; ``boots`` counts its machine's boots."""
        return SteadyClock(
            wall=lambda: self.now() + self.wall_ahead, elapsed=self.now, boot=lambda: f"boot-{self.boots}"
        )

    def step(self, until: float) -> bool:
        """Run the next action that is due by ``until``; False when there is none."""
        return self.agenda.step(until)

    def run_until(self, until: float) -> int:
        """Run every action that is due by ``until``, which becomes the current time."""
        return self.agenda.run_until(until)

    # -- nodes

    async def refresh(self) -> dict[str, Node]:
        """Return every node, as the scheduler sees it."""
        return self.views()

    def views(self) -> dict[str, Node]:
        """Return every node, as the scheduler sees it."""
        return {node_id: node.view() for node_id, node in self.nodes.items()}

    @property
    def silent(self) -> set[str]:
        """Return the nodes that do not answer though they count as alive."""
        return {node_id for node_id, node in self.nodes.items() if node.silent and node.alive}

    # -- gangs

    def find_or_create(self, job: Job, *, create: bool) -> MemoryGang:
        """Return the job's gang; ``create`` creates one that was never placed. Raises GangLostError."""
        gang = self.gangs.get(job.id)
        if gang is not None and gang.number == job.gang:
            return gang
        if job.seats:
            raise GangLostError(ActorMissing(rank=0))
        if not create:
            raise GangLostError(StoppedUnplaced())
        if gang is not None:
            raise UnsafeOrderError(f"gang {job.gang} of {job.id} is placed beside gang {gang.number}")
        if not all(node_id in self.nodes and self.nodes[node_id].alive for node_id in job.nodes):
            raise GangLostError(NodeLost(), node_lost=True)
        return self._create(job)

    def _create(self, job: Job) -> MemoryGang:
        cpus, gpus, _ = rank_size(job)
        gang = MemoryGang(job.id, job.gang)
        for rank, node_id in enumerate(job.nodes):
            node, holder = self.nodes[node_id], (job.id, job.gang, rank)
            hold = node.take(holder, gpus, cpus)
            if hold is None:
                self._free(gang)
                raise GangLostError(ActorNotPlaced(rank=rank, said=f"node {node_id} has no GPUs for it"))
            self._actors += 1
            gang.actors.append(
                MemoryActor(
                    job_id=job.id,
                    gang=job.gang,
                    rank=rank,
                    pid=_FIRST_ACTOR_PID + self._actors,
                    gpus=hold.gpus,
                    node=node,
                    agenda=self.agenda,
                    processes=self.processes,
                )
            )
        self.gangs[job.id] = gang
        return gang

    def abandon(self, job_id: JobId) -> None:
        """Count what the job's gang holds as held by another program."""
        for node in self.nodes.values():
            node.abandoned |= {holder for holder in node.held if holder[0] == job_id}

    def remove(self, job_id: JobId, number: int) -> None:
        """End the gang's actors and their processes, and free what they hold. Idempotent."""
        gang = self.gangs.get(job_id)
        if gang is None or gang.number != number:
            return
        del self.gangs[job_id]
        for actor in gang.actors:
            actor.die(ActorMissing(rank=actor.rank), kill=actor.node.alive)
        self._free(gang)

    def _free(self, gang: MemoryGang) -> None:
        for actor in gang.actors:
            if actor.process is None or not actor.process.alive:
                actor.node.held.pop((gang.job_id, gang.number, actor.rank), None)

    def latest_attempts(self) -> dict[JobId, int]:
        """Return the highest attempt of each job that has started a process, as its directories show it."""
        return dict(self.processes.latest)

    def flush(self, job_id: JobId, number: int) -> Saved | None:
        """Write the snapshot in a gang's memory to storage; None when there is none, or the disk is full."""
        gang = self.gangs.get(job_id)
        if gang is None or gang.number != number or self.disk_full:
            return None
        return self.checkpoints.flush(job_id, number, self.now())

    def forget(self, job_id: JobId) -> None:
        """Drop the data that only restarts of an ended job would need."""
        self.network.forget(job_id)
        self.processes.forget(job_id)

    def gone_from(self, job_id: JobId, node_id: str) -> bool:
        """Whether no process of the job is left on a node, as its agent sees it."""
        return all(p.actor.node.node.id != node_id for p in self.processes.of(job_id))

    def fenced_at(self, node_id: str) -> float | None:
        """Return when a dead node can run nothing more; None when the node is alive."""
        node = self.nodes[node_id]
        return None if node.alive else node.died_at + FENCE_SECONDS

    # -- losses, saves and ends

    def lose_node(self, node: MemoryNode, *, cut_off: bool) -> None:
        """Make the node dead for all other programs; with ``cut_off`` its processes run until their lease ends."""
        node.alive, node.silent, node.died_at = False, False, self.agenda.now
        for actor in [a for gang in self.gangs.values() for a in gang.actors if a.node is node]:
            actor.die(NodeLost(rank=actor.rank, node=node.node.id), node_lost=True, kill=not cut_off)
        for process in [p for p in self.processes if p.actor.node is node]:
            self.agenda.after(LEASE_SECONDS, process.kill)
        waiting, node.waiting = node.waiting, []
        for deliver in waiting:
            deliver()

    def _process_started(self, process: Process) -> float:
        """Schedule the saves of rank 0. Returns how far into its script the process begins, in seconds."""
        began = self.checkpoints.resume(process.job_id, process.gang)
        every = process.script.save_every
        if every is not None and process.rank == 0:
            self.agenda.after(every, partial(self._save_again, process, began + every, every))
        return began

    def _save_again(self, process: Process, step: float, every: float) -> None:
        if process.alive and not process.hangs:
            self.save(process, int(step), durable=True)
            self.agenda.after(every, partial(self._save_again, process, step + every, every))

    def save(self, process: Process, step: int, *, durable: bool) -> None:
        """Save at ``step``: to storage, or into the memory of the gang."""
        if process.actor.dead is None and not (durable and self.disk_full):
            path = path_of(process.job_id, process.attempt, step) if durable else ""
            saved = Saved(attempt=process.attempt, gang=process.gang, step=step, at=process.actor.clock, path=path)
            self.checkpoints.keep(process.job_id, saved)
            process.actor.add(saved)

    def _process_ended(self, process: Process) -> None:
        gang = self.gangs.get(process.job_id)
        if gang is None or gang.number != process.gang:
            process.actor.node.held.pop((process.job_id, process.gang, process.rank), None)
