"""The contract of runtimes, for the runtime on Ray: two raylets on this machine, real processes. One Ray for the session."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator.core.cluster import Node
from orchestrator.core.job.record import Job
from orchestrator.private_files import remove_private
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.gangs.gangs import Gangs, ray_gangs
from orchestrator.runtime.gangs.job_files import JobFiles
from orchestrator.runtime.gangs.launching import LaunchSettings
from orchestrator.runtime.nodes.directories import page_directory, placement_group_name
from orchestrator.runtime.pools import Pool
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.spec.paths import Paths
from tests.contract.runtime_contract import GPUS, Arm, Does, RuntimeContract
from tests.support.cluster import RayCluster
from tests.support.stack import PATIENCE_SECONDS, process_gone

SCRIPTS = {
    Does.WAIT: "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nstarted()\nwhile True: time.sleep(0.1)\n",
    Does.ENDURE: "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstarted()\nwhile True: time.sleep(0.1)\n",
    Does.SUCCEED: "started()\n",
    Does.FAIL: "started()\nsys.exit(3)\n",
}
PREAMBLE = """import os, signal, sys, time
def started():
    with open(os.path.join(os.path.dirname(__file__), os.environ["ORCH_JOB_ID"] + ".starts"), "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


class Raylets:
    """The session's Ray, and the daemon's connection to it."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="orch-c-"))
        self.paths = Paths(home=self.home, socket=self.home / "s")
        self.raylets = RayCluster(workers=2, cpus=4, gpus=GPUS)
        self.runner = asyncio.Runner()
        self.records: Callable[[], Any] = dict
        self._environ = dict(os.environ)
        os.environ.update(self.raylets.environ)
        self.cluster = Cluster(
            self.paths,
            ClusterOptions(address=self.raylets.address, simulate_gpus=GPUS),
            on_lost=lambda: None,
            own_groups=lambda: {placement_group_name(j.id, j.gang) for j in self.records().values() if j.gang_open},
        )
        self.paths.jobs.mkdir()
        for does, text in SCRIPTS.items():
            self.script(does).write_text(PREAMBLE + text)

    def script(self, does: Does) -> Path:
        return self.home / f"{does.value}.py"

    async def ready(self) -> None:
        """Wait until both nodes exist and are schedulable."""
        self.raylets.keep(2)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            nodes = await self.cluster.refresh()
            if all(node.id in nodes and nodes[node.id].schedulable for node in self.raylets.workers):
                return
            assert time.monotonic() < deadline, nodes
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self.runner.run(self.cluster.stop(stop_head=True))
        self.runner.close()
        os.environ.clear()
        os.environ.update(self._environ)
        self.raylets.close()
        shutil.rmtree(self.home, ignore_errors=True)
        remove_private(self.cluster.site.node_dir("any").parent)  # a node that was killed removes nothing
        remove_private(page_directory(self.cluster.site.namespace))


class RayArm(Arm):
    """Runs the runtime on Ray, in real time."""

    def __init__(self, raylets: Raylets) -> None:
        super().__init__()
        self._raylets = raylets
        raylets.records = lambda: self.records
        self.gangs: Gangs = self._make()

    def _make(self) -> Gangs:
        raylets, limits = self._raylets, LogLimits()
        files = JobFiles(raylets.cluster.nodes, raylets.paths, limits, outputs_max_bytes=2**20, pool=Pool("outputs", 1))
        settings = LaunchSettings(
            paths=raylets.paths,
            page_dir=page_directory(raylets.cluster.site.namespace),
            base_env={name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ORCH_"))},
            log_limits=limits,
        )
        gangs, _ = ray_gangs(
            raylets.cluster,
            settings,
            files,
            secrets_of=lambda _: {},
            previous_step=lambda _: 0,
            gpu_evidence=_no_evidence,
            post=self.post,
            progress=lambda *_: None,
            pool=Pool("starts", 1),
            log=structlog.get_logger(),
        )
        return gangs

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            await self._raylets.ready()
            try:
                await test
            finally:
                for job in [j for j in self.records.values() if j.gang_open]:
                    await self.released(job)
                await self.gangs.close()

        self._raylets.runner.run(whole())

    def now(self) -> float:
        return time.time()

    def node_ids(self) -> list[str]:
        return [node.id for node in self._raylets.raylets.workers]

    async def nodes(self) -> dict[str, Node]:
        return await self._raylets.cluster.refresh()

    def entrypoint(self, does: Does) -> str:
        return f"python {self._raylets.script(does)}"

    def submission(self, name: str) -> dict[str, Any]:
        work = self._raylets.home / "jobs" / name / "work"
        work.mkdir(parents=True)
        return {"work_dir": str(work), "python": sys.executable, "path": os.environ["PATH"], "snapshot": ""}

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; posted: {self.facts}"
            await asyncio.sleep(0.02)

    async def restart(self) -> None:
        await self.gangs.close()
        self.gangs = self._make()

    def _pids(self, job: Job) -> list[int]:
        told = self._raylets.home / f"{job.id}.starts"
        return [int(line) for line in told.read_text().split()] if told.exists() else []

    def starts(self, job: Job) -> int:
        return len(self._pids(job))

    def alive(self, job: Job) -> int:
        return sum(not process_gone(pid) for pid in self._pids(job))

    def kill_rank(self, job: Job, rank: int) -> None:
        os.kill(self.record(job).pids[rank], signal.SIGKILL)

    def kill_actor(self, job: Job, rank: int) -> None:
        os.kill(self.record(job).seats[rank].actor_pid, signal.SIGKILL)

    async def lose_node(self, node_id: str) -> None:
        await asyncio.to_thread(self._raylets.raylets.node(node_id).kill)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (await self.nodes())[node_id].alive:
            assert time.monotonic() < deadline, "Ray does not declare the node dead"
            await asyncio.sleep(0.1)


async def _no_evidence(_: Any) -> tuple[Any, ...]:
    return ()


@pytest.fixture(scope="session")
def raylets() -> Iterator[Raylets]:
    made = Raylets()
    try:
        made.runner.run(made.cluster.start())
        yield made
    finally:
        made.close()


@pytest.fixture
def arm(raylets: Raylets) -> RayArm:
    return RayArm(raylets)


class TestRay(RuntimeContract):
    """Runs the whole contract."""
