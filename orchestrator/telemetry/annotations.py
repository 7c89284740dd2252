"""Selects a job's events that are annotations on its charts: `orch_job_event_timestamp_seconds{event}`."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.core import events as ev
from orchestrator.core.states import StopPurpose


class AnnotationKind(StrEnum):
    """The kind of an event, in the boards' terms."""

    START = "start"
    CHECKPOINT = "checkpoint"
    FAILURE = "failure"
    RECOVERY = "recovery"
    PREEMPTION = "preemption"


def mark_of(event: ev.Event) -> tuple[AnnotationKind, float] | None:
    """Return the annotation of an event, and its wall time; None for most events."""
    match event:
        case ev.AttemptRunning():
            return AnnotationKind.START, event.at
        case ev.CheckpointSaved():
            return AnnotationKind.CHECKPOINT, event.at
        case ev.AttemptFailed():
            return AnnotationKind.FAILURE, event.failed_at
        case ev.FirstStep() if event.attempt > 1:
            return AnnotationKind.RECOVERY, event.step_at
        case ev.StopRequested() if event.purpose is StopPurpose.PREEMPT:
            return AnnotationKind.PREEMPTION, event.at
        case _:
            return None
