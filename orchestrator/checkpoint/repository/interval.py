"""Computes how often to save: the interval that loses the least time, by the costs of saves, recoveries and failures. Pure.

Frequent saves cost their own time; rare ones cost the steps since the last save. With a save of Ts, a recovery
of Tr, and a mean time Tf between failures, the share of time that moves training forward is greatest when
saves start every Ts + sqrt(2 (Tf + Tr) Ts + Ts^2) (arXiv 2410.18124; for small Ts this is Young's sqrt(2 Tf Ts)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.units import duration

PRIOR_FAILURE_SECONDS = 4 * 3600.0  # assumed for a job that has not failed yet
DEFAULT_RECOVERY_SECONDS = 1.0
_SHORTEST_STEP_SECONDS = 1e-6
CHEAP_SHARE = 0.005  # of the time: cheaper saves are made even if failures seem rarer
LONGEST_SECONDS = 600.0  # a wrong estimate costs at most ten minutes of work


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """A chosen interval: in seconds, in whole steps of the present length, and as a sentence."""

    seconds: float
    steps: int
    reason: str


def optimal_interval(*, save_seconds: float, recovery_seconds: float, failure_seconds: float) -> float:
    """Return the seconds between the starts of two saves that keep the most time productive.

    ``save_seconds`` is how long a save stalls training, ``recovery_seconds`` how long it takes from a failure to the
    next step, ``failure_seconds`` the mean time between failures. Raises ValueError for invalid durations.
    """
    if not (save_seconds >= 0 and recovery_seconds >= 0 and failure_seconds > 0):
        raise ValueError(
            f"invalid durations: save {save_seconds}, recovery {recovery_seconds}, failure {failure_seconds}"
        )
    return save_seconds + math.sqrt(2 * (failure_seconds + recovery_seconds) * save_seconds + save_seconds**2)


def choose_interval(
    *, save_seconds: float, step_seconds: float, recovery_seconds: float, failure_seconds: float
) -> IntervalChoice:
    """Return the best interval, with a sentence for users. A ``step_seconds`` of 0 means unknown.

    The failure rate is the least known input: a job that fails every minute has no history before its first failure. So
    the interval is never longer than that at which saves take ``CHEAP_SHARE`` of the time. Writes to storage have their
    own pace and do not become more frequent.
    """
    best = optimal_interval(
        save_seconds=save_seconds, recovery_seconds=recovery_seconds, failure_seconds=failure_seconds
    )
    cheap = save_seconds / CHEAP_SHARE
    seconds = min(best, cheap, LONGEST_SECONDS)
    steps = max(1, round(seconds / max(step_seconds, _SHORTEST_STEP_SECONDS)))
    reason = (
        f"every {'step' if steps == 1 else f'{steps} steps'} ({duration(steps * step_seconds)}): a save takes {duration(save_seconds)}, a step"
        f" {duration(step_seconds)}, a recovery {duration(recovery_seconds)}, failures are expected every"
        f" {duration(failure_seconds)}"
        + (
            f"; saves that take {CHEAP_SHARE:.1%} of the time are made anyway, as the failure rate is an estimate"
            if cheap < best
            else ""
        )
    )
    return IntervalChoice(seconds=seconds, steps=steps, reason=reason)
