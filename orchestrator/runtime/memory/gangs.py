"""The daemon's side of the in-memory runtime: carries out effects, follows the ranks, posts events.

The counterpart of ``runtime.gangs.gangs`` on Ray. Its state is discarded when the daemon ends; ``MemoryCluster`` stays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import ActorLost, HeadLost, RecordRestored
from orchestrator.core.facts.notes import CheckpointQuarantined, NodeUnreachable, Reachable
from orchestrator.core.lifecycle.advance import CollectFiles, Ensure, KillRanks, ReleaseGang, StopRanks
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.relay import exited
from orchestrator.runtime.memory.cluster import NoAnswerError, Saved
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS, StaleAttemptError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.advance import Effect
    from orchestrator.runtime.memory.cluster import Greeting, MemoryActor, MemoryCluster, MemoryNode, Network, News
    from orchestrator.runtime.ranks.rank_events import RankEvent

_FIRST_DELAY: Final = 0.2
_LONGEST_DELAY: Final = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """An action for a node; None means the control plane."""

    node: MemoryNode | None
    do: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Continue at wall time ``until``."""

    until: float


Steps: TypeAlias = Generator[Sequence[Order] | Pause, list[Any], None]
"""Yields orders that are sent at once, and receives their answers in the same order; or yields a pause."""


@dataclass(slots=True)
class EffectTask:
    """Runs the steps of ``make`` to their end. ``lost`` is called when the gang turns out to be lost."""

    job_id: JobId
    network: Network
    make: Callable[[], Steps]
    lost: Callable[[GangLostError], None]
    _steps: Steps | None = None
    _delay: float = _FIRST_DELAY
    _asked: int = 0
    _answers: dict[int, Any] = field(default_factory=dict)
    _wanted: int = 0
    _ended: bool = False

    def start(self) -> None:
        """Begin soon: no step runs before the caller has returned."""
        self.network.agenda.after(0.0, self._begin)

    def cancel(self) -> None:
        """Send no more orders. Orders already sent are still carried out."""
        self._ended = True
        if self._steps is not None:
            self._steps.close()

    def _begin(self) -> None:
        if not self._ended:
            self._steps = self.make()
            self._advance(partial(next, self._steps))

    def _advance(self, resume: Callable[[], Sequence[Order] | Pause]) -> None:
        try:
            wanted = resume()
        except StopIteration:
            self._ended = True
        except GangLostError as error:
            self._ended = True
            self.lost(error)
        except StaleAttemptError:
            self._ended = True
            self.lost(GangLostError(RecordRestored()))
        except NoAnswerError:
            self.network.agenda.after(self._delay, self._begin)
            self._delay = min(self._delay * 2, _LONGEST_DELAY)
        else:
            self._ask(wanted)

    def _ask(self, wanted: Sequence[Order] | Pause) -> None:
        self._asked += 1
        self._answers = {}
        match wanted:
            case Pause():
                self._wanted = 1
                self.network.agenda.at(wanted.until, partial(self._answered, self._asked, 0, None))
            case _:
                self._wanted = len(wanted)
                for number, order in enumerate(wanted):
                    answer = partial(self._answered, self._asked, number)
                    self.network.ask(self.job_id, order.node, order.do, answer)

    def _answered(self, asked: int, number: int, what: Any) -> None:
        if self._ended or asked != self._asked or self._steps is None or number in self._answers:
            return  # the task has continued without this answer, or has it already
        self._answers[number] = what
        if len(self._answers) < self._wanted:
            return
        answers = [self._answers[n] for n in range(self._wanted)]
        errors = [a for a in answers if isinstance(a, Exception)]
        if errors:
            worst = next((e for e in errors if isinstance(e, GangLostError)), errors[0])
            self._advance(partial(self._steps.throw, worst))
        else:
            self._advance(partial(self._steps.send, answers))


_RETRY_SECONDS: Final = 0.5


@dataclass(slots=True)
class _Gang:
    """State of a gang in the daemon's memory; all of it can be found again."""

    number: int
    actors: Sequence[MemoryActor]
    greetings: Sequence[Greeting] = ()
    watching: int = 0
    cursors: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Work:
    effect: Effect
    task: EffectTask


Attaching: TypeAlias = Generator[Sequence[Order] | Pause, list[Any], _Gang]


class MemoryGangs:
    """``daemon.ports.GangRuntime`` in memory. ``post`` takes events for the record; ``now`` is the daemon's clock."""

    def __init__(
        self,
        cluster: MemoryCluster,
        *,
        post: Callable[[Sequence[ev.Event]], None],
        now: Callable[[], float] | None = None,
    ) -> None:
        self._cluster = cluster
        self._now = cluster.now if now is None else now
        self._post_to = post
        self._gangs: dict[JobId, _Gang] = {}
        self._work: dict[JobId, _Work] = {}
        self._closed = False

    def apply(self, job: Job, effect: Effect | None) -> None:
        """Start ``effect`` for ``job``; do nothing if it is in progress. See ``daemon.ports``."""
        work = self._work.get(job.id)
        if work is not None and work.effect == effect:
            return
        if work is not None:
            work.task.cancel()
            del self._work[job.id]
        if job.state.is_terminal:
            self._cluster.forget(job.id)
        if effect is None:
            return
        task = EffectTask(
            job.id,
            self._cluster.network,
            make=partial(self._steps, job, effect),
            lost=partial(self._lost, job.id, job.gang, job.attempt_number, job.num_workers),
        )
        self._work[job.id] = _Work(effect, task)
        task.start()

    async def survey(self, jobs: Collection[Job]) -> None:
        """End what exists and the records of live jobs do not know, and post it. See ``daemon.ports``."""
        held = {(job.id, job.gang) for job in jobs if job.gang_open}
        unknown = {gang.job_id: gang.number for gang in self._cluster.gangs.values()}
        attempts = self._cluster.latest_attempts()
        for job_id, number in unknown.items():
            if (job_id, number) not in held:
                self._cluster.remove(job_id, number)
        for job in jobs:
            attempt, gang = attempts.get(job.id, 0), unknown.get(job.id, 0)
            if attempt >= job.next_attempt or gang >= job.next_gang:
                found = ev.LaterAttemptsFound(job_id=job.id, at=self._now(), attempt=attempt, gang=gang)
                self._post([found])

    def abandon(self, job: Job) -> None:
        """End the gang as soon as it can be reached. See ``daemon.ports``."""
        self._gangs.pop(job.id, None)
        self._cluster.abandon(job.id)
        EffectTask(job.id, self._cluster.network, make=partial(self._end, job), lost=lambda _: None).start()

    def _end(self, job: Job) -> Steps:
        if not self._closed:
            yield [Order(None, partial(self._cluster.remove, job.id, job.gang))]
            for node_id in dict.fromkeys(job.nodes):
                yield from self._confirm_gone(job, node_id)

    def report_reachability(self, jobs: Iterable[Job]) -> None:
        """Post the jobs that have ranks on nodes that do not answer, and those that no longer have any."""
        silent = self._cluster.silent
        for job in jobs:
            if not (job.gang_open and job.seats) or job.gang_lost:
                continue
            ranks = [rank for rank, node_id in enumerate(job.nodes) if node_id in silent]
            if ranks and not job.degraded:
                self._note(job.id, NodeUnreachable(rank=ranks[0], node=job.nodes[ranks[0]]), degraded=True)
            elif job.degraded and not ranks:
                self._note(job.id, Reachable(), degraded=False)

    def forget_all(self) -> None:
        """Drop all gangs and post each as lost: the control plane has died."""
        for work in self._work.values():
            work.task.cancel()
        self._work.clear()
        gangs, self._gangs = self._gangs, {}
        for job_id, gang in gangs.items():
            lost = GangLostError(HeadLost())
            self._lost(job_id, gang.number, gang.watching, len(gang.actors), lost)

    async def close(self) -> None:
        """Stop watching; everything continues to run."""
        self.crash()

    def crash(self) -> None:
        """End the daemon abruptly: it sends no more orders and receives no more answers."""
        self._closed = True
        for work in self._work.values():
            work.task.cancel()
        self._work.clear()
        self._gangs.clear()

    def _post(self, events: Sequence[ev.Event]) -> None:
        if not self._closed:
            self._post_to(events)

    def _lost(self, job_id: JobId, number: int, attempt: int, ranks: int, lost: GangLostError) -> None:
        now = self._now()
        not_before = now + FENCE_SECONDS if lost.node_lost else 0.0
        event = ev.GangLost(
            job_id=job_id, at=now, gang=number, rank=lost.cause.rank, reason=lost.cause, not_before=not_before
        )
        restored = isinstance(
            lost.cause, RecordRestored
        )  # what is recorded of it was known, and followed by other attempts
        self._post([*([] if restored else self._recorded_exits(job_id, attempt, ranks)), event])

    def _recorded_exits(self, job_id: JobId, attempt: int, ranks: int) -> list[ev.Event]:
        """Return the exits of ranks that had ended by themselves, by their exit records."""
        records = self._cluster.processes.records.get(job_id, {})
        found = [rank for rank in range(ranks) if (attempt, rank) in records]
        return [exited(job_id, attempt, rank, records[attempt, rank], at=self._now()) for rank in found]

    def _note(self, job_id: JobId, note: Fact, *, degraded: bool | None = None) -> None:
        now = self._now()
        self._post([ev.JobNoted(job_id=job_id, at=now, note=note, degraded=degraded)])

    # -- effects

    def _steps(self, job: Job, effect: Effect) -> Steps:
        match effect:
            case Ensure():
                return self._ensure(job)
            case StopRanks():
                return self._stop(job, effect.deadline)
            case KillRanks():
                return self._kill(job)
            case ReleaseGang():
                return self._release(job)
            case CollectFiles():
                return self._collect(job)

    def _ensure(self, job: Job) -> Steps:
        gang = yield from self._attach(job, create=True)
        attempt = job.attempt_number
        if gang.watching == attempt:
            return
        gang.greetings = yield [Order(a.node, a.hello) for a in gang.actors]
        seats = _seats(gang)
        if seats != job.seats:
            self._post([ev.GangPlaced(job_id=job.id, at=self._now(), gang=job.gang, seats=seats)])
        waiting = [
            actor for actor, greeting in zip(gang.actors, gang.greetings, strict=True) if greeting.launched < attempt
        ]
        if waiting:
            _refuse_to_repeat(job.attempt_number, waiting, self._cluster.processes.records.get(job.id, {}))
            yield [Order(a.node, partial(a.prepare, attempt)) for a in gang.actors]
            self._report_torn(job)
            yield [Order(a.node, partial(a.launch, attempt)) for a in gang.actors]
        self._watch(job, gang)

    def _report_torn(self, job: Job) -> None:
        """Report checkpoints that turned out to be torn in the search for the one that the attempt resumes from."""
        for torn in self._cluster.checkpoints.broken.pop(job.id, ()):
            self._note(job.id, CheckpointQuarantined(said=f"{torn.path} is torn"))

    def _stop(self, job: Job, deadline: float) -> Steps:
        gang = yield from self._attach(job, create=False)
        self._watch(job, gang)
        grace = max(0.0, deadline - self._now())
        yield [Order(a.node, partial(a.stop, job.attempt_number, grace)) for a in gang.actors]

    def _kill(self, job: Job) -> Steps:
        gang = yield from self._attach(job, create=False)
        self._watch(job, gang)
        yield [Order(a.node, partial(a.kill, job.attempt_number)) for a in gang.actors]

    def _release(self, job: Job) -> Steps:
        if job.seats and not job.gang_lost:
            yield from self._flush(job)
        gang = self._gangs.pop(job.id, None)
        yield [Order(None, partial(self._cluster.remove, job.id, job.gang))]
        if gang is None or len(gang.gone) < job.num_workers:
            for node_id in dict.fromkeys(job.nodes):
                yield from self._confirm_gone(job, node_id)
        files = self._cluster.script_of(job.id).collect_seconds > 0
        self._post([ev.GangReleased(job_id=job.id, at=self._now(), gang=job.gang, files=files)])

    def _collect(self, job: Job) -> Steps:
        yield Pause(self._cluster.now() + self._cluster.script_of(job.id).collect_seconds)
        self._post([ev.FilesCollected(job_id=job.id, at=self._now(), gang=job.gang)])

    def _flush(self, job: Job) -> Steps:
        """Write the newest snapshot to storage before the actors that hold it end."""
        flush = partial(self._cluster.flush, job.id, job.gang)
        (saved,) = yield [Order(None, flush)]
        if saved is not None:
            self._post([_checkpoint(job.id, saved)])

    def _confirm_gone(self, job: Job, node_id: str) -> Steps:
        fenced_at = self._cluster.fenced_at(node_id)
        if fenced_at is not None:
            yield Pause(fenced_at)
            return
        node = self._cluster.nodes[node_id]
        (gone,) = yield [Order(node, partial(self._cluster.gone_from, job.id, node_id))]
        if not gone:
            raise NoAnswerError

    def _attach(self, job: Job, *, create: bool) -> Attaching:
        """Return the job's gang: known, found, or created. Raises GangLostError."""
        gang = self._gangs.get(job.id)
        if gang is None or gang.number != job.gang:
            (found,) = yield [Order(None, partial(self._cluster.find_or_create, job, create=create))]
            gang = self._gangs[job.id] = _Gang(job.gang, found.actors)
        return gang

    # -- watching

    def _watch(self, job: Job, gang: _Gang) -> None:
        attempt = job.attempt_number
        if gang.watching == attempt:
            return
        gang.watching = attempt
        gang.cursors, gang.started, gang.gone = {}, {}, set()
        for actor in gang.actors:
            self._follow(gang, attempt, actor)

    def _is_current(self, gang: _Gang, attempt: int, actor: MemoryActor) -> bool:
        return not self._closed and self._gangs.get(actor.job_id) is gang and gang.watching == attempt

    def _follow(self, gang: _Gang, attempt: int, actor: MemoryActor) -> None:
        """Poll a rank for news until it has ended."""
        if not self._is_current(gang, attempt, actor) or actor.rank in gang.gone:
            return
        network, cursor = self._cluster.network, gang.cursors.get(actor.rank, 0)
        heard = partial(self._take_answer, gang, attempt, actor, cursor)
        network.follow(actor.job_id, actor.node, partial(actor.poll, attempt, cursor), heard)

    def _take_answer(self, gang: _Gang, attempt: int, actor: MemoryActor, cursor: int, answer: Any) -> None:
        if not self._is_current(gang, attempt, actor):
            return
        match answer:
            case GangLostError():
                self._lost(actor.job_id, gang.number, attempt, len(gang.actors), answer)
            case NoAnswerError():
                self._cluster.agenda.after(_RETRY_SECONDS, partial(self._follow, gang, attempt, actor))
            case StaleAttemptError():
                restored = GangLostError(RecordRestored(rank=actor.rank))
                self._lost(actor.job_id, gang.number, attempt, len(gang.actors), restored)
            case (reached, news):
                self._report(actor.job_id, gang, attempt, actor.rank, news)
                if gang.cursors.get(actor.rank, 0) == cursor:  # ignore a repeated answer
                    gang.cursors[actor.rank] = reached
                    self._follow(gang, attempt, actor)

    def _report(self, job_id: JobId, gang: _Gang, attempt: int, rank: int, news: Sequence[News]) -> None:
        facts: list[ev.Event] = []
        for event in news:
            if isinstance(event, Saved):
                facts += [_checkpoint(job_id, event)] if event.path else []
            elif event.kind == "started":
                gang.started[rank] = event.pid
                if len(gang.started) == len(gang.actors):
                    pids = tuple(gang.started[r] for r in range(len(gang.actors)))
                    facts.append(ev.AttemptRunning(job_id=job_id, at=self._now(), attempt=attempt, pids=pids))
            elif event.kind == "exited":
                facts += self._snapshot(job_id, gang)
                facts.append(exited(job_id, attempt, rank, event, at=self._now()))
            else:
                gang.gone.add(rank)
                if len(gang.gone) == len(gang.actors):
                    facts.append(ev.AttemptGone(job_id=job_id, at=self._now(), attempt=attempt))
        if facts:
            self._post(facts)

    def _snapshot(self, job_id: JobId, gang: _Gang) -> list[ev.Event]:
        """Return the snapshot that dead ranks leave in the memory of their gang, from which the next attempt resumes."""
        saved = self._cluster.checkpoints.snapshots.get(job_id)
        return [_checkpoint(job_id, saved)] if saved is not None and saved.gang == gang.number else []


def _refuse_to_repeat(
    attempt: int, actors: Sequence[MemoryActor], records: Mapping[tuple[int, int], RankEvent]
) -> None:
    """Raise GangLostError when a rank has already run in an actor that has ended: its recorded end is reported instead."""
    for actor in actors:
        if (attempt, actor.rank) in records:
            raise GangLostError(ActorLost(rank=actor.rank))


def _checkpoint(job_id: JobId, saved: Saved) -> ev.CheckpointSaved:
    return ev.CheckpointSaved(job_id=job_id, at=saved.at, attempt=saved.attempt, step=saved.step, path=saved.path)


def _seats(gang: _Gang) -> tuple[ev.RankPlacement, ...]:
    seats = []
    for actor, greeting in zip(gang.actors, gang.greetings, strict=True):
        node = actor.node
        seats.append(
            ev.RankPlacement(
                rank=actor.rank,
                node_id=node.node.id,
                node_name=node.node.name,
                gpu_ids=tuple(str(i) for i in greeting.gpus),
                gpu_uuids=tuple(node.uuid(i) for i in greeting.gpus),
                actor_pid=greeting.pid,
            )
        )
    return tuple(seats)
