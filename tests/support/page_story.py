"""Jobs and nodes for a page to show: every kind of content, and names that would be markup if they were not escaped."""

from __future__ import annotations

from math import cos, exp, sin
from time import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.curve_views import ChartView, CurvesView, CurveView, GpuHistoryView, GpuUseView
from orchestrator.api.matrix_views import MatrixCellView, MatrixJobView, MatrixView
from orchestrator.api.views import (
    AttemptView,
    CheckpointView,
    FailureView,
    FindingView,
    HealthView,
    NodeView,
    ProgressView,
    RankView,
)
from tests.support.records import replace

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService
    from orchestrator.api.spec_views import SpecView
    from orchestrator.core.ids import JobId

MATRIX: Final = "sweep-w2pqsy"
HOSTILE: Final = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{ 7*7 }}\x1b[31m\u202e</pre></textarea><svg onload=alert(3)>"


def wave(label: str, begin: float, phase: float, middle: float, height: float, points: int = 120) -> CurveView:
    """Return a line that goes up and down a little, with a gap where an attempt ended."""
    xs = [begin + 30.0 * n for n in range(points) if not 55 <= n < 68]
    values = [middle + height * sin(n / 5 + phase) * cos(n / 17) for n in range(points) if not 55 <= n < 68]
    lows, highs = [value - height / 3 for value in values], [value + height / 3 for value in values]
    return CurveView(label=label, x=tuple(xs), values=tuple(values), lows=tuple(lows), highs=tuple(highs))


def falling(label: str, begin: float, rate: float, points: int = 120) -> CurveView:
    """Return a falling line, like a loss."""
    xs = tuple(begin + 30.0 * n for n in range(points))
    values = tuple(2.3 * exp(-rate * n / points) + 0.02 * sin(n) + 0.2 for n in range(points))
    return CurveView(
        label=label,
        x=xs,
        values=values,
        lows=tuple(v - 0.05 for v in values),
        highs=tuple(v + 0.08 for v in values),
        not_finite=2,
    )


def recorded(job_id: str, begin: float, gpus: int = 4, rate: float = 3.0) -> CurvesView:
    """Return the charts of a job of an hour."""

    def lines(middle: float, height: float) -> tuple[CurveView, ...]:
        return tuple(wave(f"GPU {n}", begin, n / 2, middle - 2 * (n == 3) * height, height) for n in range(gpus))

    return CurvesView(
        job_id=job_id,
        begin=begin,
        end=begin + 3570,
        charts=(
            ChartView(name="loss", unit="", curves=(falling("loss", begin, rate),)),
            ChartView(name="step time", unit="s", curves=(wave("step time", begin, 0.0, 0.06, 0.004),)),
            ChartView(
                name="step time by rank, waiting left out",
                unit="s",
                curves=tuple(wave(f"rank {n}", begin, n, 0.05 + 0.01 * (n == 3), 0.002) for n in range(gpus)),
            ),
            ChartView(name="GPU load", unit="%", curves=lines(80.0, 12.0)),
            ChartView(name="GPU memory", unit="GiB", curves=lines(61.0, 1.0)),
            ChartView(name="GPU power", unit="W", curves=lines(410.0, 60.0)),
        ),
    )


def tell_story(service: FakeService) -> str:
    """Add jobs in every state with their data; return the id of one that runs."""
    now = service.now = time()
    service._nodes = {
        name: NodeView(
            id=name * 4, name=name, state=state, reason=reason, cpus_total=64, cpus_free=40, gpus_total=8, gpus_free=4
        )
        for name, state, reason in (("node-a", "READY", ""), ("node-b", "CORDONED", "cordoned by ada"))
    }
    slow = FindingView(
        kind="slow_rank",
        sentence="rank 3 is slower than the others: 61 ms a step of its own, the others 48 ms",
        advice="look at the temperature and the clock of GPU 3 of node-a",
        severity="critical",
        node="node-a",
        rank=3,
    )
    held = {"num_workers": 8, "resources": {"resources_per_worker": {"gpu": 1}}}
    service.add("sweep", priority=60, user="grace", reason="waits for 8 GPUs: 3 are free on node-a", **held)
    service.add("later", priority=10, reason="behind sweep: 8 GPUs", **held)
    service.add("paused", state="SUSPENDED", reason="paused by ada", attempt=1)
    failure = FailureView(
        failure_class="user", sentence="rank 0 raised ValueError: loss is NaN", advice="lower the rate"
    )
    failed = service.add(
        "broken",
        state="FAILED",
        reason="failed",
        failure=failure,
        ended_at=now - 60,
        submitted_at=now - 1800,
        attempt=1,
    )
    service.write(failed.id, "Traceback (most recent call last):", "ValueError: loss is NaN", stream="stderr")
    service.add("done", state="SUCCEEDED", reason="succeeded", ended_at=now - 60, submitted_at=now - 1800, attempt=1)
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
    service._nodes["node-a"] = replace(service._nodes["node-a"], jobs=(job.id,))
    _count_gpus(service)
    service.recorded[job.id] = recorded(job.id, now - 3600)
    service.recorded[failed.id] = replace(recorded(failed.id, now - 9000, rate=1.0), sampled=True)
    service.gpu_rows = [gpu_row(n, job.id) for n in range(8)]
    uses = [GpuUseView(gpu_uuid=f"GPU-{n}", job_id=job.id, begin=now - 3600, end=now) for n in range(4)]
    service.history = GpuHistoryView(
        uses=tuple(uses), begin=now - 3600, end=now - 30, charts=service.recorded[job.id].charts[3:]
    )
    return job.id


def _count_gpus(service: FakeService) -> None:
    plain = service.health

    async def health() -> HealthView:
        return replace(await plain(), gpus_total=16.0, gpus_free=12.0)

    service.health = health  # type: ignore[method-assign]  # the fake counts none


def gpu_row(number: int, job_id: str) -> dict[str, Any]:
    """Return one GPU of node-a: the first four are the job's, the last one is quarantined."""
    held = number == 7
    return {
        "node": "node-a",
        "gpu_uuid": f"GPU-{number}",
        "index": number,
        "model": "NVIDIA H100 80GB HBM3",
        "utilization_ratio": None if held else (0.95 - 0.2 * (number == 3) if number < 4 else 0.0),
        "memory_used_bytes": 61 * 2**30 if number < 4 else 2**29,
        "memory_total_bytes": 80 * 2**30,
        "power_watts": 410.0 if number < 4 else 71.0,
        "temperature_celsius": 66.0 if number < 4 else 31.0,
        "condition": "quarantined" if held else "ok",
        "problem": "Xid 79: the GPU has fallen off the bus" if held else None,
        "job_id": job_id if number < 4 else None,
        "rank": number if number < 4 else None,
    }


def tell_hostile(service: FakeService) -> str:
    """Add a job in which every text of a user or a script would be markup; return its id."""
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
    curve = CurveView(label=HOSTILE, x=(1.0, 2.0), values=(1.0, 2.0), lows=(1.0, 2.0), highs=(1.0, 2.0))
    charts = (ChartView(name=HOSTILE, unit=HOSTILE, curves=(curve,)),)
    service.recorded[job.id] = CurvesView(job_id=job.id, begin=1.0, end=2.0, charts=charts)
    service.gpu_rows = [{**gpu_row(0, HOSTILE), "model": HOSTILE, "problem": HOSTILE, "condition": HOSTILE}]
    return job.id


def tell_related(service: FakeService) -> str:
    """Add a rerun of a job, in a matrix of three after the other two; return its id."""

    def cell(index: int) -> MatrixCellView:
        return MatrixCellView(id=MATRIX, name="sweep", index=index, count=3, values={"lr": 0.1 * (index + 1)})

    first = service.add("digits", state="SUCCEEDED", attempt=1)
    service.add("other", state="SUCCEEDED", attempt=1)
    cells = [service.add(f"sweep-{n}", state="SUCCEEDED", attempt=1, matrix=cell(n)) for n in (0, 1)]
    job = service.add("digits", state="RUNNING", attempt=1, matrix=cell(2))
    rows = [
        MatrixJobView(index=n, values=one.matrix.values, job_id=one.id, name=one.name, state=one.state)
        for n, one in enumerate((*cells, job))
        if one.matrix is not None
    ]
    service.matrices[MATRIX] = MatrixView(
        id=MATRIX, name="sweep", user="ada", uid=0, state="RUNNING", submitted_at=1.0, count=3, jobs=tuple(rows)
    )
    plain = service.spec

    async def spec(job_id: JobId) -> SpecView:
        return replace(await plain(job_id), rerun_of=first.id if job_id == job.id else None)

    service.spec = spec  # type: ignore[method-assign]  # the fake has no reruns
    return job.id
