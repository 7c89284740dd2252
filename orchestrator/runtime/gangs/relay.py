"""Follows the ranks of gangs until they end, and makes events of the record of what their actors and keepers report. Decides nothing."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator import clock
from orchestrator.checkpoint.errors import NOT_FAILING, failure_cause
from orchestrator.checkpoint.format import layout
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.signatures import missing_file
from orchestrator.core.facts import notes
from orchestrator.core.facts.faults import RecordRestored
from orchestrator.core.facts.notes import RankUnreachable, Reachable, ReportLeftOut, StartedCold
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import as_lost
from orchestrator.runtime.gangs.rank_rpc import Timeouts, noted
from orchestrator.runtime.node_clock import moved
from orchestrator.runtime.nodes.workdir_walk import left_out_by
from orchestrator.runtime.ranks.exit_evidence import memory_use, order_of, stop_facts, was_killed
from orchestrator.runtime.ranks.rank_events import AS_ASKED, FENCE_SECONDS, PollCursor
from orchestrator.runtime.spawn.client import ForkServerError, read_exit_record
from orchestrator.spec.entrypoint import cold_start_variables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.errors import GangLostError
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.runtime.gangs.table import Gang
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.ranks.rank_events import PollReply, RankEvent, RankGreeting
    from orchestrator.runtime.spawn.client import ExitRecord
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


MESSAGE_CHARACTERS: Final = 1000  # of a message from outside


def seats_of(greetings: Sequence[RankGreeting], reports: Mapping[str, NodeReport]) -> tuple[ev.RankPlacement, ...]:
    """Return the seat of each rank, from its actor's and its node agent's reports."""
    seats = []
    for rank, greeting in enumerate(greetings):
        report = reports.get(greeting.node_id)
        uuids = {str(g.index): g.uuid for g in report.gpus} if report else {}
        seats.append(
            ev.RankPlacement(
                rank=rank,
                node_id=greeting.node_id,
                node_name=report.hostname if report else greeting.address,
                gpu_ids=greeting.gpu_ids,
                gpu_uuids=tuple(uuids.get(i, i) for i in greeting.gpu_ids),
                actor_pid=greeting.pid,
            )
        )
    return tuple(seats)


def exited(job_id: JobId, attempt: int, rank: int, event: RankEvent, work_dir: str = "", *, at: float) -> ev.RankExited:
    """Map the end of a rank's process, as its actor reports it at ``at``. ``work_dir`` is the job's working copy."""
    end = event.exit or ev.Exit(rank=rank, at=event.at, exit_code=None, signal=None)
    missing = end.missing_file or missing_file(end)
    left_out = _left_out_by(work_dir, missing)
    end = structs.replace(end, rank=rank, missing_file=missing, left_out_by=left_out)
    return ev.RankExited(job_id=job_id, at=at, attempt=attempt, exit=end)


def gang_lost(job_id: JobId, gang: int, error: GangLostError) -> ev.GangLost:
    """Create the event of a lost gang. A node that is out of reach may still run its ranks until their lease ends."""
    now = clock.now()
    not_before = now + FENCE_SECONDS if error.node_lost else 0.0
    return ev.GangLost(
        job_id=job_id, at=now, gang=gang, rank=error.cause.rank, reason=error.cause, not_before=not_before
    )


def _left_out_by(work_dir: str, missing: str) -> str:
    if not (work_dir and missing):
        return ""
    try:
        return left_out_by(Path(work_dir), missing)
    except (OSError, ValueError):
        return ""  # the copy is out of reach, or the name is invalid: the exception is enough


def recorded_exits(paths: Paths, job_id: JobId, attempt: int, ranks: int, lost: GangLostError) -> list[ev.Event]:
    """Return the exits, from keepers' records, of ranks that had ended by themselves when their actor died.

    A rank that was killed with its actor while its node was shutting down counts as having been told to stop. An attempt
    that others have followed ended in an earlier life of the store: that end is no news.
    """
    if isinstance(lost.cause, RecordRestored):
        return []
    exits: list[ev.Event] = []
    for rank in range(ranks):
        try:
            record = read_exit_record(paths.exit_record(job_id, attempt, rank))
        except ForkServerError as error:
            exits.append(noted(job_id, notes.UnusableRecord(rank=rank, said=str(error))))
            continue
        if record is None:
            continue
        shut_down = record.cause == "lifeline" and record.ending.keeper_terminated_at is not None
        if record.cause is None or shut_down:
            exits.append(_recorded_exit(job_id, attempt, rank, record))
    return exits


def saved(
    job_id: JobId, status: PersisterStatus | None, *, failing: tuple[str, str] = NOT_FAILING, behind: float = 0.0
) -> list[ev.Event]:
    """Return the event of a snapshot that became a checkpoint on storage, or failed to.

    ``failing`` is the previous failure of saves: a failure is reported when it begins, not with each save. The node's clock is
    ``behind`` seconds behind.
    """
    if status is None:
        return []
    facts: list[ev.Event] = []
    # The rank that stored its part last names the checkpoint; the others still report the one before.
    if status.step is not None and status.attempt is not None and (status.watched or _is_of(status.path, status.step)):
        at = moved(status, behind).at or clock.now()
        facts.append(
            ev.CheckpointSaved(
                job_id=job_id,
                at=at,
                attempt=status.attempt,
                step=status.step,
                path=status.path,
                digest=status.digest,
            )
        )
    if status.failure and failure_cause(status.failure, status.failure_kind) != failing:
        facts.append(noted(job_id, notes.SaveFailed(said=status.failure[:MESSAGE_CHARACTERS])))
    return facts


def saves_fail_of(status: PersisterStatus | None, before: tuple[str, str]) -> tuple[str, str]:
    """Return the present failure of saves; ``before`` without a report."""
    if status is None:
        return before
    return failure_cause(status.failure, status.failure_kind)


def in_memory(job_id: JobId, attempt: int, newest: ProgressSnapshot | None) -> list[ev.Event]:
    """Return the snapshot that the dead ranks leave in shared memory, from which the next attempt resumes. Its path is empty.

    ``newest`` is rank 0's last report.
    """
    if newest is None or newest.snapshot_step is None:
        return []
    at = newest.snapshot_at or clock.now()
    return [ev.CheckpointSaved(job_id=job_id, at=at, attempt=attempt, step=newest.snapshot_step, path="")]


def _is_of(path: str, step: int) -> bool:
    found = layout.parse_name(path.rpartition("/")[2])
    return found is not None and found.step == step


def _recorded_exit(job_id: JobId, attempt: int, rank: int, record: ExitRecord) -> ev.RankExited:
    error = record.error
    stop = stop_facts(record.ending, ended_at=record.ended_at, killed=was_killed(record))
    end = ev.Exit(
        rank=rank,
        at=record.ended_at,
        exit_code=record.exit_code,
        signal=record.signal,
        error_type=error.type if error else "",
        error_message=error.message if error else "",
        error_at=error.at if error else None,
        stop_seen_at=stop.stop_seen_at,
        stop_scope=stop.stop_scope,
        last_step=stop.last_step,
        total_steps=stop.total_steps,
        memory=memory_use(record.memory, machine=False),
        ordered=order_of(record.cause),
    )
    return ev.RankExited(job_id=job_id, at=clock.now(), attempt=attempt, exit=end)
