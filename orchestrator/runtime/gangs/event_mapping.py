"""Maps reports of a gang's actors and keepers to facts for the record. Decides nothing, waits for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator import clock
from orchestrator.checkpoint.errors import NOT_FAILING, failure_cause
from orchestrator.checkpoint.format import layout
from orchestrator.core import codec
from orchestrator.core import events as ev
from orchestrator.core.conformance import repaired
from orchestrator.core.diagnosis.signatures import missing_file
from orchestrator.core.facts import notes
from orchestrator.core.facts.gangs import RecordRestored
from orchestrator.runtime.node_clock import moved
from orchestrator.runtime.nodes.workdir_walk import left_out_by
from orchestrator.runtime.ranks.exit_evidence import memory_use, order_of, stop_facts, was_killed
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS
from orchestrator.runtime.spawn.client import ForkServerError, read_exit_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.gangs.errors import GangLostError
    from orchestrator.runtime.gangs.launch_spec import Resumption
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.ranks.rank_events import RankEvent, RankGreeting
    from orchestrator.runtime.spawn.client import ExitRecord
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress import ProgressSnapshot


MESSAGE_CHARACTERS: Final = 1000  # of a message from outside


def seats_of(greetings: Sequence[RankGreeting], reports: Mapping[str, NodeReport]) -> tuple[ev.Seat, ...]:
    """Return the seat of each rank, from its actor's and its node agent's reports."""
    seats = []
    for rank, greeting in enumerate(greetings):
        report = reports.get(greeting.node_id)
        uuids = {str(g.index): g.uuid for g in report.gpus} if report else {}
        seats.append(
            ev.Seat(
                rank=rank,
                node_id=greeting.node_id,
                node_name=report.hostname if report else greeting.address,
                gpu_ids=greeting.gpu_ids,
                gpu_uuids=tuple(uuids.get(i, i) for i in greeting.gpu_ids),
                actor_pid=greeting.pid,
            )
        )
    return tuple(seats)


def repaired_progress(snapshot: ProgressSnapshot) -> ProgressSnapshot:
    """Return the progress with defaults for invalid values."""
    checked, names = repaired(snapshot)
    return replace(checked, unusable=(*checked.unusable, *names)) if names else checked


def repaired_event(event: RankEvent) -> RankEvent:
    """Return the event with defaults for invalid values in it and in its end."""
    end = event.exit
    return repaired(replace(event, exit=codec.repaired(end)) if isinstance(end, ev.Exit) else event)[0]


def exited(job_id: JobId, attempt: int, rank: int, event: RankEvent, work_dir: str = "", *, at: float) -> ev.RankExited:
    """Map the end of a rank's process, as its actor reports it at ``at``. ``work_dir`` is the job's working copy."""
    end = event.exit or ev.Exit(rank=rank, at=event.at, exit_code=None, signal=None)
    missing = end.missing_file or missing_file(end)
    left_out = _left_out_by(work_dir, missing)
    end = structs.replace(end, rank=rank, missing_file=missing, left_out_by=left_out)
    return ev.RankExited(job_id=job_id, at=at, attempt=attempt, exit=end)


def noted(job_id: JobId, note: Fact, *, degraded: bool | None = None) -> ev.JobNoted:
    """Create a note about a gang for the user; ``degraded``: one of its ranks is out of reach."""
    return ev.JobNoted(job_id=job_id, at=clock.now(), note=note, degraded=degraded)


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
    job_id: JobId, reported: PersisterStatus | None, *, failing: tuple[str, str] = NOT_FAILING, behind: float = 0.0
) -> list[ev.Event]:
    """Return the event of a snapshot that became a checkpoint on storage, or failed to.

    ``failing`` is the previous failure of saves: a failure is reported when it begins, not with each save. The node's clock is
    ``behind`` seconds behind.
    """
    if reported is None:
        return []
    status, unusable = repaired(reported)
    facts: list[ev.Event] = []
    if unusable:
        facts.append(noted(job_id, notes.UnusableStatus(fields=unusable)))
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


def saves_fail_of(reported: PersisterStatus | None, before: tuple[str, str]) -> tuple[str, str]:
    """Return the present failure of saves; ``before`` without a report."""
    if reported is None:
        return before
    status, _ = repaired(reported)
    return failure_cause(status.failure, status.failure_kind)


def resumed(job_id: JobId, resumption: Resumption, masker: Masker) -> list[ev.Event]:
    """Return the results of the search for the checkpoint to resume from; secrets in texts are masked."""
    now = clock.now()
    events: list[ev.Event] = [
        noted(job_id, notes.CheckpointQuarantined(said=masker.text(message))) for message in resumption.problems
    ]
    events += [
        noted(job_id, notes.CheckpointFileNote(note_code=note.code, said=masker.text(note.message)))
        for note in resumption.notes
    ]
    found = resumption.found
    if found is not None:
        events.append(
            ev.CheckpointSaved(
                job_id=job_id,
                at=found.created_at or now,
                attempt=found.attempt,
                step=found.step,
                path=found.path,
                digest=found.digest,
            )
        )
    return events


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
