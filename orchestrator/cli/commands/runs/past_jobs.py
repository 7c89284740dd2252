"""Makes a trace for the simulator from the daemon's ended jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.simulation.trace import TraceJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.api.views import JobView


def trace_of(jobs: Iterable[JobView]) -> list[TraceJob]:
    """Return the ended jobs that ran on GPUs, by submission; each lasts from its first start to its end."""
    found = []
    for job in jobs:
        gpus = float((job.resources.get("resources_per_worker") or {}).get("gpu") or 0)
        if gpus <= 0 or job.started_at is None or job.ended_at is None:
            continue
        found.append(
            TraceJob(
                at=job.submitted_at,
                seconds=max(1.0, job.ended_at - job.started_at),
                ranks=job.num_workers,
                gpus=gpus,
                user=job.user,
                priority=job.priority,
            )
        )
    return sorted(found, key=lambda job: job.at)
