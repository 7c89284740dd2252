"""Whether a job has stopped making steps, judged by its own pace: what `orch_job_hang_suspected` shows. Pure.

Suspicion only: it ends nothing. A rank that never reported steps cannot be judged, and neither can one that is saving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.train.progress import ProgressSnapshot

LEAST_SECONDS: Final = 60.0
"""Nobody is suspected sooner: loading data, evaluating and compiling take this long in jobs of short steps."""
PATIENCE: Final = 20.0
"""A rank may be still for this many times its longest recent step."""
LEAST_STEPS: Final = 5
"""So many steps have to be seen before they say anything about the next one."""


def allowed_seconds(rank: ProgressSnapshot) -> float | None:
    """How long this rank may be still; None while its pace is not known."""
    if rank.steps_reported < LEAST_STEPS or rank.step_seconds is None:
        return None
    return max(LEAST_SECONDS, PATIENCE * max((rank.step_seconds, *rank.recent_step_seconds)))


def still_for_too_long(ranks: Iterable[ProgressSnapshot], now: float) -> bool | None:
    """Whether any rank is, at wall time `now`; None when there is no rank that can be judged."""
    judged = False
    for rank in ranks:
        allowed = allowed_seconds(rank)
        if allowed is None or rank.last_report_at is None or rank.saving_since is not None:
            continue
        judged = True
        if now - rank.last_report_at > allowed:
            return True
    return False if judged else None
