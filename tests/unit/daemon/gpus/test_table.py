"""The display of a GPU without an exporter's report: an exporter that starts is no failure, one that hangs is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from orchestrator.daemon.gpus import GpuTable
from orchestrator.gpu.sampler import Health


@pytest.mark.parametrize(
    ("starting", "health", "condition"), [(True, Health.STARTING, "ok"), (False, Health.FAILING, "failing")]
)
def test_a_gpu_whose_exporter_says_nothing(*, starting: bool, health: Health, condition: str) -> None:
    async def ask() -> dict[str, object]:
        return {}

    gpu = SimpleNamespace(uuid="GPU-a", index=0, model="H100", simulated=False)
    nodes = SimpleNamespace(reports={"n1": SimpleNamespace(gpus=(gpu,), hostname="box")}, lost_gpus={})
    exporters = SimpleNamespace(ask=ask, is_starting=lambda _: starting)
    (row,) = asyncio.run(GpuTable(nodes, exporters, lambda: ()).rows({}))  # type: ignore[arg-type]
    assert (row.health, row.condition) == (health, condition)
    assert (row.problem is None) is starting


def test_exporters_are_asked_again_only_for_readers_that_want_newer_values() -> None:
    asked: list[float] = []
    now = 100.0

    async def ask() -> dict[str, object]:
        asked.append(now)
        return {}

    nodes = SimpleNamespace(reports={}, lost_gpus={})
    exporters = SimpleNamespace(ask=ask, reports={}, is_starting=lambda _: True)
    table = GpuTable(nodes, exporters, lambda: (), clock=lambda: now)  # type: ignore[arg-type]
    asyncio.run(table.rows({}, 10.0))
    asyncio.run(table.rows({}, 10.0))
    assert asked == [100.0]
    asyncio.run(table.rows({}))
    assert asked == [100.0, 100.0]
    now = 111.0
    asyncio.run(table.rows({}, 10.0))
    assert asked == [100.0, 100.0, 111.0]
