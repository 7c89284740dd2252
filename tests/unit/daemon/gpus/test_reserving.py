"""GPUs that are reserved so that Ray does not hand them out: bad ones without a gang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from orchestrator.core.facts.faults import Xid
from orchestrator.daemon.gpus import GpuReserving, gpu_conditions
from tests.unit.core.builders import running
from tests.unit.daemon.parts import LOG, FakeConnection, FakeRegistry


def gpu(uuid: str) -> Any:
    return SimpleNamespace(uuid=uuid)


class Holds:
    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    async def keep(self, wanted: dict[str, Any]) -> bool:
        changed = wanted.keys() != self.held.keys()
        self.held = {uuid: node_id for uuid, (node_id, _, _) in wanted.items()}
        return changed


def test_bad_gpus_without_a_gang_are_reserved_and_the_loop_sees_it() -> None:
    async def run() -> None:
        ray, nodes, job, refreshed = FakeConnection(), FakeRegistry(), running(), list[int]()
        nodes.reports = {"a": SimpleNamespace(gpus=(gpu("GPU-0"), gpu("GPU-8"), gpu("GPU-9")))}
        nodes.lost_gpus = {"a": (gpu("GPU-7"),)}

        async def refresh() -> None:
            refreshed.append(1)

        reserving = GpuReserving(
            ray,
            nodes,
            Holds(),
            jobs=lambda: [job],  # on GPU-0 and GPU-1
            conditions=lambda: gpu_conditions(
                ["GPU-0", "GPU-7", "GPU-8", "GPU-9"],
                lost={"GPU-7"},
                quarantined={"GPU-0": Xid(number=79), "GPU-9": Xid(number=79)},
                reports={},
            ),
            refresh=refresh,
            log=LOG,
        )
        assert {uuid: count for uuid, (_, _, count) in reserving.wanted().items()} == {"GPU-9": 4, "GPU-7": 4}
        await reserving.reserve()
        await reserving.reserve()
        assert refreshed == [1]
        ray.connected, nodes.lost_gpus = False, {}
        await reserving.reserve()
        assert refreshed == [1]

    asyncio.run(run())
