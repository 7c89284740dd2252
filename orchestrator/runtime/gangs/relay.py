"""Follows the ranks of gangs until they end, and reports their events for the record. Decides nothing."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator import clock
from orchestrator.checkpoint.errors import NOT_FAILING
from orchestrator.core import events as ev
from orchestrator.core.facts.notes import RankUnreachable, Reachable, ReportLeftOut, StartedCold
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import as_lost
from orchestrator.runtime.gangs.event_mapping import (
    exited,
    gang_lost,
    in_memory,
    noted,
    recorded_exits,
    saved,
    saves_fail_of,
    seats_of,
)
from orchestrator.runtime.gangs.rank_rpc import Timeouts
from orchestrator.runtime.node_clock import moved
from orchestrator.runtime.ranks.rank_events import AS_ASKED, PollCursor
from orchestrator.spec.entrypoint import cold_start_variables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.errors import GangLostError
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.runtime.gangs.table import Gang
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.ranks.rank_events import PollReply, RankEvent
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress_reading import ProgressSnapshot


MAX_LEFT_OUT: Final = 100
"""The most notes about a gang's reports: a rank actor chooses their texts."""
LATE_ANSWERS: Final = 2
"""How many polls in a row an actor may leave unanswered before it is ended."""


class EventRelay:
    """Relays events. ``post`` takes events for the record; ``progress`` takes a rank's newest progress.

    ``reports`` gives the newest report of each node, ``gpu_evidence`` the driver's evidence about GPUs. ``check_head``
    reports all gangs as lost if Ray's head is ending. ``same_clock``: all ranks run on the daemon's machine.
    """

    def __init__(
        self,
        calls: GangCalls,
        files: JobFiles,
        paths: Paths,
        *,
        reports: Callable[[], Mapping[str, NodeReport]],
        gpu_evidence: Callable[[Sequence[str]], Awaitable[tuple[Fact, ...]]],
        check_head: Callable[..., Awaitable[None]],
        post: Callable[[Sequence[ev.Event]], None],
        progress: Callable[[JobId, int, int, ProgressSnapshot], None],
        log: FilteringBoundLogger,
        same_clock: bool = False,
        timeouts: Timeouts | None = None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._calls = calls
        self._files = files
        self._paths = paths
        self._reports = reports
        self._gpu_evidence = gpu_evidence
        self._check_head = check_head
        self._post = post
        self._progress = progress
        self._log = log
        self._same_clock = same_clock
        self._timeouts = timeouts or Timeouts()
        self._now = now

    def watch(self, job: Job, gang: Gang, attempt: int) -> None:
        """Follow every rank of the attempt. Idempotent."""
        self._files.follow(job)
        if gang.watching == attempt:
            return
        gang.unwatch()
        gang.begin(attempt)
        gang.watchers = [
            asyncio.create_task(self.follow(job, gang, attempt, rank), name=f"watch-{job.id}-{rank}")
            for rank in range(job.num_workers)
        ]

    async def follow(self, job: Job, gang: Gang, attempt: int, rank: int) -> None:
        """Follow a rank until it ends. A report that cannot be processed is logged and skipped."""
        while True:
            try:
                await self._follow(job, gang, attempt, rank)
            except Exception:  # a fault of orch or of the report: a rank must stay followed
                self._log.exception("gang.watcher_failed", job=job.id, attempt=attempt, rank=rank)
                gang.gone.discard(rank)  # may have been set before the failure: the events are reported again
                gang.cursors.pop(rank, None)
                await asyncio.sleep(self._timeouts.retry_seconds)
            else:
                return

    async def _follow(self, job: Job, gang: Gang, attempt: int, rank: int) -> None:
        """Process one rank's events, from first to last; an actor that dies loses the gang."""
        late, timeouts = 0, self._timeouts
        while rank not in gang.gone:
            try:
                reply = await within(
                    timeouts.poll_seconds + timeouts.order_seconds,
                    gang.actors[rank].poll(attempt, gang.cursors.get(rank, PollCursor()), timeouts.poll_seconds),
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:
                lost = as_lost(rank, error)
                if lost is not None:
                    await self._actor_lost(job, gang, attempt, lost)
                    return
                late += isinstance(error, TimeoutError)
                await self._unreached(job, gang, rank, error, late)
                continue
            if rank in gang.unreached:
                gang.unreached.discard(rank)
                self._post([noted(job.id, Reachable(rank=rank), degraded=bool(gang.unreached))])
            late = 0
            gang.cursors[rank] = reply.cursor
            await self._take_reply(job, gang, attempt, rank, reply)

    async def _unreached(self, job: Job, gang: Gang, rank: int, error: Exception, late: int) -> None:
        """Handle an actor that has not answered ``late`` polls."""
        if isinstance(error, TimeoutError) and late >= LATE_ANSWERS:
            await self._calls.end_actor(job, rank)
        if rank not in gang.unreached:
            gang.unreached.add(rank)
            self._post([noted(job.id, RankUnreachable(rank=rank, said=str(error)), degraded=True)])
        await asyncio.sleep(self._timeouts.retry_seconds)

    async def _actor_lost(self, job: Job, gang: Gang, attempt: int, lost: GangLostError) -> None:
        exits: Sequence[ev.Event] = ()
        await self._check_head(node_lost=lost.node_lost)
        try:
            await self._files.bring_ends(job)
            exits = [
                structs.replace(each, exit=moved(each.exit, gang.clocks[each.exit.rank].behind))
                if isinstance(each, ev.RankExited)
                else each
                for each in recorded_exits(self._paths, job.id, attempt, job.num_workers, lost)
            ]
        except Exception:  # the loss is reported even if the ends cannot be read
            self._log.exception("gang.ends_not_read", job=job.id, attempt=attempt)
        self._post([*exits, gang_lost(job.id, gang.number, lost)])

    async def _take_reply(self, job: Job, gang: Gang, attempt: int, rank: int, reply: PollReply) -> None:
        """Process an actor's reply. A part that fails is skipped, so that the rest and the next reply still count."""
        left_out = partial(self._left_out, job, gang, rank)
        behind = 0.0 if self._same_clock else gang.clocks[rank].heard(reply.sent_at, self._now())
        for part in reply.unusable:
            self._note_left_out(job, gang, ReportLeftOut(rank=rank, part=part, error_type="a value is invalid"))
        if reply.progress is not None:
            with left_out("its progress"):
                gang.newest[rank] = snapshot = moved(reply.progress, behind)
                self._progress(job.id, attempt, rank, snapshot)
        if reply.processes is not None:
            gang.processes[rank] = structs.replace(reply.processes, rank=rank)
        if reply.storage is not None:
            gang.storage[rank] = structs.replace(moved(reply.storage, behind), rank=rank)
        if reply.terminal is not None:
            gang.terminals[rank] = structs.replace(moved(reply.terminal, behind), rank=rank)
        with left_out("the status of a snapshot"):
            failing = gang.failing.get(rank, NOT_FAILING)
            gang.failing[rank] = saves_fail_of(reply.persisted, failing)
            if facts := saved(job.id, reply.persisted, failing=failing, behind=behind):
                self._post(facts)
        if any(event.kind != "started" for event in reply.events):  # what ended it may be ending the head as well
            await self._check_head()
        if reply.events:  # the rank's end is reported, whatever its progress page says
            events = await self._with_gpu_evidence(gang, rank, [moved(event, behind) for event in reply.events])
            if facts := facts_of(job, gang, attempt, rank, events, self._now()):
                self._post(facts)

    @contextmanager
    def _left_out(self, job: Job, gang: Gang, rank: int, part: str) -> Iterator[None]:
        """Continue after an error in the block: log it, and add a note to the job, once for each part."""
        try:
            yield
        except Exception as error:
            note = ReportLeftOut(rank=rank, part=part, error_type=type(error).__name__)
            if note not in gang.left_out:
                self._log.exception("gang.report_left_out", job=job.id, rank=rank, what=part)
            self._note_left_out(job, gang, note)

    def _note_left_out(self, job: Job, gang: Gang, note: ReportLeftOut) -> None:
        if note not in gang.left_out and len(gang.left_out) < MAX_LEFT_OUT:
            gang.left_out.add(note)
            self._post([noted(job.id, note)])

    async def _with_gpu_evidence(self, gang: Gang, rank: int, events: Sequence[RankEvent]) -> Sequence[RankEvent]:
        """Add the driver's evidence about the rank's GPUs to a failure among the events."""
        if all(event.exit is None or event.exit.ok for event in events) or len(gang.greetings) <= rank:
            return events
        try:
            uuids = seats_of(gang.greetings, self._reports())[rank].gpu_uuids
            found = await self._gpu_evidence(uuids) if uuids else ()
        except Exception:  # the end is reported without it
            self._log.exception("gang.no_gpu_evidence", rank=rank)
            return events
        return [
            structs.replace(e, exit=structs.replace(e.exit, evidence=(*e.exit.evidence, *found)))
            if e.exit and found
            else e
            for e in events
        ]


def facts_of(job: Job, gang: Gang, attempt: int, rank: int, events: Sequence[RankEvent], now: float) -> list[ev.Event]:
    """Return the facts, learnt ``now``, that follow from a rank's events and from what the others reported before."""
    facts: list[ev.Event] = []
    for event in events:
        match event.kind:
            case "started":
                gang.started[rank] = event.pid
                cold = _cold(job, event)
                if cold and (rank, attempt) == (0, 1):  # reported once: all ranks begin alike
                    facts.append(noted(job.id, StartedCold(rank=rank, said=cold)))
                if len(gang.started) == job.num_workers:
                    pids = tuple(gang.started[r] for r in range(job.num_workers))
                    facts.append(ev.AttemptRunning(job_id=job.id, at=now, attempt=attempt, pids=pids))
            case "exited":
                facts += in_memory(job.id, attempt, gang.newest.get(0))
                facts.append(exited(job.id, attempt, rank, event, job.submission.work_dir, at=now))
            case _:
                gang.gone.add(rank)
                if len(gang.gone) == job.num_workers:
                    facts.append(ev.AttemptGone(job_id=job.id, at=now, attempt=attempt))
    return facts


def _cold(job: Job, event: RankEvent) -> str:
    """Return why a rank began in a fresh interpreter; empty if it did not, or if runtime_env requires it."""
    if event.cold != AS_ASKED:
        return event.cold or ""
    names = cold_start_variables(job.spec.env)
    return f"environment variable {', '.join(names)}" if names else ""
