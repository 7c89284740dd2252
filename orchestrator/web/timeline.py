"""Draws a job's attempts on a time line, as SVG without inline styles or scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator import units
from orchestrator.web.rendering import render

if TYPE_CHECKING:
    from orchestrator.api.views import JobView

WIDTH: Final = 1000.0
LEAST: Final = 2.0
"""Minimum width: an attempt that failed at once is still visible."""


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt's place on the time line."""

    x: float
    width: float
    state: str
    label: str


def timeline(job: JobView, now: float) -> str:
    """Return the time line of the view's attempts; a table beside it shows the same. Empty without attempts."""
    if not job.attempts:
        return ""
    began = min(job.submitted_at, job.attempts[0].started_at) if len(job.attempts) == job.attempt else 0.0
    began = began or job.attempts[0].started_at
    ended = max(job.ended_at or now, job.attempts[-1].ended_at or 0.0, began + 1.0)
    scale = WIDTH / (ended - began)
    bars = [
        Bar(
            x=(one.started_at - began) * scale,
            width=max(LEAST, ((one.ended_at or ended) - one.started_at) * scale),
            state=one.state,
            label=f"attempt {one.number}: {one.state}, {units.duration((one.ended_at or ended) - one.started_at)}",
        )
        for one in job.attempts
    ]
    description = "; ".join(bar.label for bar in bars)
    return render("timeline.html", bars=bars, description=description, began=began, ended=ended, width=WIDTH, job=job)
