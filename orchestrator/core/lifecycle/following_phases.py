"""The phases that follow from others, for the fold: pure functions of phases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.job.phases import Gang, GivingUp, Leaving, LostGang, Replacing, Restarting, Running, Starting

if TYPE_CHECKING:
    from orchestrator.core import events as ev
    from orchestrator.core.job.phases import HoldingPhase, Phase, Recovering


def gang_changed(phase: HoldingPhase, **changes: Any) -> HoldingPhase:
    """Return the phase with these changes to its gang, if it has one."""
    if isinstance(phase, Restarting):
        return replace(phase, gang=replace(phase.gang, **changes))
    return phase if phase.gang is None else replace(phase, gang=replace(phase.gang, **changes))


def losing(phase: HoldingPhase, gang: Gang | LostGang, fenced_until: float) -> Phase:
    """Return the phase once a part of its gang is lost; a job on a fenced node is not placed before ``fenced_until``."""
    lost = LostGang(nodes=gang.nodes, seats=gang.seats, pids=gang.pids, degraded=gang.degraded)
    if isinstance(phase, Restarting | Replacing):
        return replacing(phase, lost, max(phase.not_before, fenced_until))
    return replace(phase, gang=lost)


def replacing(phase: Restarting | Replacing, gang: Gang | LostGang | None, not_before: float) -> Replacing:
    """Return the phase in which the job waits for another gang, after this one is released."""
    return Replacing(
        gang=gang, files_on=phase.files_on, exits=phase.exits, failure=phase.failure, not_before=not_before
    )


def recovering(phase: Starting | Running | Leaving, event: ev.AttemptFailed, fenced_until: float) -> Recovering:
    """Return the phase after an attempt that failed."""
    gang, exits, failure = phase.gang, phase.exits, event.failure
    not_before = max(event.not_before, fenced_until)
    if not event.retry:
        return GivingUp(gang=gang, exits=exits, failure=failure)
    if event.keep_gang and isinstance(gang, Gang):
        return Restarting(gang=gang, exits=exits, failure=failure, not_before=not_before)
    return Replacing(gang=gang, exits=exits, failure=failure, not_before=not_before)


def leaving(phase: Running, deadline: float) -> Leaving:
    """Return the phase in which the ranks that still run are asked to stop."""
    return Leaving(gang=phase.gang, exits=phase.exits, failure=phase.failure, deadline=deadline)
