"""`orch estimate`: time left with intervals, memory of GPUs, and the accuracy of earlier estimates."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.usage_views import EstimateQualityView, EstimateShareView
from orchestrator.api.views import ProgressView, RankView
from orchestrator.gpu.row import GpuRow
from orchestrator.gpu.sampler import Health
from tests.unit.api.test_matrix_routes import grid, put

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService, ServedFake
    from tests.unit.cli.conftest import Orch

PROGRESS = ProgressView(
    step=400, total_steps=1000, fraction=0.4, steps_per_second=2.0, eta_seconds=300.0, eta_low_seconds=280.0,
    eta_high_seconds=330.0,
)  # fmt: skip
QUALITY = EstimateQualityView(
    confidence=0.95, jobs=9, checked=40, within=38, median_error=0.021,
    shares=(EstimateShareView(share=0.5, checked=9, within=9, median_error=0.02),),
)  # fmt: skip


def gpu(uuid: str, used: int) -> dict[str, Any]:
    row = GpuRow(
        gpu_uuid=uuid,
        node="a",
        index=0,
        vendor="nvidia",
        model="NVIDIA A10G",
        simulated=False,
        health=Health.OK,
        memory_used_bytes=used,
    )
    return row.to_json()


def train(served: ServedFake, name: str = "digits", **fields: Any) -> Any:
    def add(service: FakeService) -> Any:
        ranks = tuple(RankView(rank=rank, node="a", gpu_uuids=(f"GPU-{rank}",)) for rank in (0, 1))
        service.gpu_rows = [gpu("GPU-0", 2**30), gpu("GPU-1", 3 * 2**30)]
        return service.add(name, **{"state": "RUNNING", "gpus": ranks, "progress": PROGRESS, **fields})

    return served.do(add)


def test_a_job_has_its_time_left_interval_memory_and_the_record_so_far(orch: Orch, served: ServedFake) -> None:
    job = train(served)
    served.do(lambda service: setattr(service, "quality", QUALITY))
    lines = orch("estimate", "digits").out.splitlines()
    row = next(line for line in lines if line.startswith(job.id))
    for told in ("400/1000", "500ms", "5m", "4m40s to 5m30s", "1.0 GiB, 3.0 GiB"):
        assert told in row
    assert lines[-1] == (
        "so far 38 of 40 intervals of 95 % held the time that was left (95 %; 9 jobs); off by 2.1 % (median)"
    )
    told = orch("estimate", job.id, "--json").json
    assert told["jobs"][0]["eta_low_seconds"] == 280.0
    assert [one["memory_used_bytes"] for one in told["jobs"][0]["gpus"]] == [2**30, 3 * 2**30]
    assert told["total"] == {"seconds": 300.0, "low": 280.0, "high": 330.0}
    assert told["quality"]["shares"][0]["within"] == 9


def test_all_jobs_are_shown_with_the_last_end_of_those_that_run(orch: Orch, served: ServedFake) -> None:
    assert orch("estimate").out.startswith("no jobs")
    train(served)
    train(served, "longer", progress=replace(PROGRESS, eta_seconds=3600.0, eta_low_seconds=None, eta_high_seconds=None))
    train(served, "later", state="PENDING", progress=None)
    out = orch("estimate").out
    assert "about 1h until the last that runs has ended; 1 not running" in out
    assert "too early" in out
    assert "does not run" in out
    assert "no estimate has been checked yet" in out


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"progress": None}, "has reported no step; health.progress"),
        ({"progress": ProgressView(step=4, steps_per_second=1.0)}, "report(total_steps=...)"),
        ({"progress": ProgressView(step=4, total_steps=9)}, "makes no step"),
        ({"progress": ProgressView(step=4, total_steps=9, steps_per_second=1.0)}, "too early to tell"),
        ({"state": "SUCCEEDED"}, "has ended"),
    ],
)
def test_why_there_is_no_estimate_is_told(orch: Orch, served: ServedFake, fields: dict[str, Any], why: str) -> None:
    train(served, **fields)
    assert why in orch("estimate", "digits", "--json").json["jobs"][0]["why"]


def test_a_matrix_is_estimated_as_a_whole(orch: Orch, served: ServedFake) -> None:
    first, second = train(served), train(served, state="PENDING", progress=None)
    view = grid(0, eta_seconds=900.0, eta_low_seconds=800.0, eta_high_seconds=1200.0)
    rows = tuple(
        replace(row, job_id=job.id, state=job.state) for row, job in zip(view.jobs, (first, second), strict=True)
    )
    served.do(put(replace(view, jobs=rows)))
    out = orch("estimate", view.id).out
    assert "about 15m until all have ended (13m20s to 20m); 1 not running" in out
    served.do(put(replace(view, jobs=tuple(replace(row, state="SUCCEEDED") for row in rows))))
    assert orch("estimate", view.id).out.startswith("no job is left to run")


def test_an_unknown_name_is_an_error(orch: Orch, served: ServedFake) -> None:
    done = orch("estimate", "nothing")
    assert done.code == 3
    assert "nothing" in done.err


DOCUMENT = (Path(__file__).parents[4] / "docs" / "estimates.md").read_text(encoding="utf-8")


def test_the_commands_of_the_document_do_what_they_say(orch: Orch, served: ServedFake) -> None:
    train(served)
    served.do(put(replace(grid(0), id="sweep-abc234", name="sweep", jobs=())))
    lines = re.findall(r"^    orch (.+)$", DOCUMENT, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        done = orch(*shlex.split(line))
        assert done.code == 0, (line, done.err)
