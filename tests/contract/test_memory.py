"""The contract of runtimes, for the runtime in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.runtime.memory.cluster import MemoryCluster, Script
from orchestrator.runtime.memory.faults import ActorDies, NodeLost, RankDies
from orchestrator.runtime.memory.gangs import MemoryGangs
from tests.contract.runtime_contract import GPUS, Arm, Does, RuntimeContract
from tests.unit.core.builders import T0, node

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

SCRIPTS = {
    Does.WAIT: Script(stop_takes=0.5),
    Does.ENDURE: Script(stop_takes=None),
    Does.SUCCEED: Script(seconds=1.0),
    Does.FAIL: Script(seconds=1.0, exit_code=3),
}
PATIENCE = 1000.0  # seconds of the simulated clock


def script_of(job_id: JobId) -> Script:
    return SCRIPTS[Does(job_id.split("-")[1])]


class MemoryArm(Arm):
    """Runs the in-memory runtime on a simulated clock."""

    def __init__(self) -> None:
        super().__init__()
        nodes = [node("a", gpus=GPUS, cpus=4), node("b", gpus=GPUS, cpus=4)]
        self.cluster = MemoryCluster(nodes, now=T0, script_of=script_of, latency=0.001)
        self.gangs: MemoryGangs = MemoryGangs(self.cluster, post=self.post)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        asyncio.run(test)

    def now(self) -> float:
        return self.cluster.now()

    def node_ids(self) -> list[str]:
        return ["a", "b"]

    async def nodes(self) -> dict[str, Node]:
        return await self.cluster.refresh()

    def entrypoint(self, does: Does) -> str:
        return f"python {does.value}.py"

    def submission(self, name: str) -> dict[str, Any]:
        return {}

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        patient = self.now() + PATIENCE
        while not condition():
            assert self.cluster.step(patient), f"never: {what}; posted: {self.facts}"

    async def restart(self) -> None:
        self.gangs.crash()
        self.gangs = MemoryGangs(self.cluster, post=self.post)

    def starts(self, job: Job) -> int:
        return self.cluster.processes.started[job.id]

    def alive(self, job: Job) -> int:
        return len(self.cluster.processes.of(job.id))

    def kill_rank(self, job: Job, rank: int) -> None:
        RankDies(job=job.id, rank=rank).inject(self.cluster)

    def kill_actor(self, job: Job, rank: int) -> None:
        ActorDies(job=job.id, rank=rank).inject(self.cluster)

    async def lose_node(self, node_id: str) -> None:
        NodeLost(node=node_id).inject(self.cluster)


@pytest.fixture
def arm() -> MemoryArm:
    return MemoryArm()


class TestMemory(RuntimeContract):
    """Runs the whole contract."""
