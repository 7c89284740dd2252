"""Reads a keeper's record of its rank's end into the typed fields of an exit.

The record is in a directory that ranks can write to, and repeats values from the rank's page: types and ranges are
checked here, and invalid values count as unknown.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.conformance import is_count, is_time
from orchestrator.core.states import EndOrder, StopScope

if TYPE_CHECKING:
    from orchestrator.runtime.spawn.lifeline import Ending, Exited, ExitRecord
    from orchestrator.train.script.progress import ProgressSnapshot


SHUTDOWN_SECONDS: Final = 300.0
"""Longest wait of a machine that shuts down, from SIGTERM on: systemd's limit is 90 s, unless a unit sets another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFacts:
    """Time at which a rank noticed a request to stop, the request's scope, the rank's last steps; None where unknown."""

    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None


def order_of(cause: str | None) -> EndOrder | None:
    """Return the order that preceded the end, as the keeper recorded it; None: the process ended by itself.

    A cause that no keeper writes counts as an order: an end that may have been ordered is no success.
    """
    if cause is None:
        return None
    return EndOrder(cause) if cause in set(EndOrder) else EndOrder.KILL


def was_killed(end: Exited | ExitRecord) -> bool:
    """Whether SIGKILL ended the process, and not by an order to its keeper."""
    return end.cause is None and end.signal == signal.SIGKILL


def stop_facts(ending: Ending, printed: ProgressSnapshot | None = None, *, ended_at: float, killed: bool) -> StopFacts:
    """Return the facts of an ending; for a rank that reports no steps, those read from its output.

    A SIGTERM to the keeper alone explains an end of the rank soon after it, but not that of a rank that was ``killed``
    (``was_killed``): a machine that shuts down kills the keeper with it.
    """
    by_rank, by_keeper = _time(ending.stop_seen_at), _time(ending.keeper_terminated_at)
    if by_rank is None and by_keeper is not None and (killed or ended_at - by_keeper > SHUTDOWN_SECONDS):
        by_keeper = None
    step, total = _count(ending.last_step), _count(ending.total_steps)
    if step is None and printed is not None:
        step, total = printed.max_step, printed.total_steps
    scope = None if by_rank is None else StopScope.RANK
    return StopFacts(
        stop_seen_at=min((at for at in (by_rank, by_keeper) if at is not None), default=None),
        stop_scope=scope if by_keeper is None else StopScope.MACHINE,
        last_step=step,
        total_steps=total,
    )


def _time(value: Any) -> float | None:
    return float(value) if is_time(value) and value > 0 else None


def _count(value: Any) -> int | None:
    return value if is_count(value) else None
