"""Which of a job's events are marks on its charts: `orch_job_event_timestamp_seconds{event}`, drawn as annotations."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.core import events as ev
from orchestrator.core.states import StopPurpose


class Mark(StrEnum):
    """What happened to a run, in the words of the boards."""

    START = "start"
    CHECKPOINT = "checkpoint"
    FAILURE = "failure"
    RECOVERY = "recovery"
    PREEMPTION = "preemption"


def mark_of(event: ev.Event) -> tuple[Mark, float] | None:
    """The mark that an event leaves, and its wall time; None for most events."""
    match event:
        case ev.AttemptRunning():
            return Mark.START, event.at
        case ev.CheckpointSaved():
            return Mark.CHECKPOINT, event.at
        case ev.AttemptFailed():
            return Mark.FAILURE, event.failed_at
        case ev.FirstStep() if event.attempt > 1:
            return Mark.RECOVERY, event.step_at
        case ev.StopRequested() if event.purpose is StopPurpose.PREEMPT:
            return Mark.PREEMPTION, event.at
        case _:
            return None
