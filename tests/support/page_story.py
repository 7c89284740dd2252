"""Jobs and nodes for a page to show: as many kinds of things as there are, and names that would be markup elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.api.views import AttemptView, CheckpointView, FailureView, FindingView, ProgressView, RankView

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService

HOSTILE: Final = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{ 7*7 }}\x1b[31m\u202e</pre></textarea><svg onload=alert(3)>"


def tell_story(service: FakeService) -> str:
    """Jobs in every state with what they have; the id of one that runs."""
    now = service.now
    slow = FindingView(
        kind="slow_rank",
        sentence="rank 3 is slower than the others: 61 ms a step of its own, the others 48 ms",
        advice="look at the temperature and the clock of GPU 3 of node-a",
        severity="critical",
        node="node-a",
        rank=3,
    )
    service.add("later", priority=10, reason="behind queued: 4 GPUs")
    service.add("paused", state="SUSPENDED", reason="paused by ada", attempt=1)
    failure = FailureView(
        failure_class="user", sentence="rank 0 raised ValueError: loss is NaN", advice="lower the rate"
    )
    failed = service.add("broken", state="FAILED", reason="failed", failure=failure, ended_at=now, attempt=1)
    service.write(failed.id, "Traceback (most recent call last):", "ValueError: loss is NaN", stream="stderr")
    service.add("done", state="SUCCEEDED", reason="succeeded", ended_at=now, attempt=1)
    attempts = (
        AttemptView(number=1, state="LOST", started_at=now - 3600, ended_at=now - 1900, reason="node-b was lost"),
        AttemptView(number=2, state="RUNNING", started_at=now - 1890),
    )
    job = service.add(
        "digits",
        state="RUNNING",
        reason="runs",
        attempt=2,
        attempts=attempts,
        restarts=1,
        submitted_at=now - 3700,
        started_at=now - 3600,
        num_workers=4,
        gpus=tuple(
            RankView(rank=n, node="node-a", gpu_uuids=(f"GPU-{n}",), pid=100 + n, step_seconds=0.06, own_seconds=0.05)
            for n in range(4)
        ),
        findings=(slow,),
        progress=ProgressView(step=620, total_steps=1000, fraction=0.62, eta_seconds=700.0, metrics={"loss": 0.31}),
        balance={"band": "fair", "quantities": {"utilization": {"cv": 0.12}, "power": {"cv": 0.07}}},
    )
    for rank in range(4):
        service.write(job.id, f"rank {rank} is ready", rank=rank, attempt=2)
    service.save(
        job.id, CheckpointView(step=600, at=now, path="/home/ada/.orch/jobs/digits/checkpoints/600", is_best=True)
    )
    return job.id


def tell_hostile(service: FakeService) -> str:
    """A job of which everything that a user or a script chooses would be markup."""
    finding = FindingView(
        kind="x", sentence=HOSTILE, advice=HOSTILE, node=HOSTILE, severity=HOSTILE, confidence=HOSTILE
    )
    job = service.add(
        "digits",
        state="RUNNING",
        user=HOSTILE,
        queue=HOSTILE,
        reason=HOSTILE,
        attempt=1,
        attempts=(AttemptView(number=1, state=HOSTILE, started_at=1.0, reason=HOSTILE, failure_class=HOSTILE),),
        gpus=(RankView(rank=0, node=HOSTILE, gpu_uuids=(HOSTILE,), pid=7, step_seconds=0.05),),
        findings=(finding,),
        failure=FailureView(failure_class="user", sentence=HOSTILE, advice=HOSTILE),
        progress=ProgressView(step=3, fraction=0.5, metrics={HOSTILE: 1.0, "loss": None}),
    )
    service.write(job.id, HOSTILE, stream="stderr")
    service.save(job.id, CheckpointView(step=3, at=5.0, path=HOSTILE, problem=HOSTILE))
    return job.id
