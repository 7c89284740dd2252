"""The daemon's use of its exporters' reports: whole windows, and the jobs to record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from orchestrator.core.ids import JobId
from orchestrator.daemon.gpus import GpuWatch, JobBalances
from orchestrator.gpu.exporter import GpuStatus
from orchestrator.gpu.load import GpuLoad
from orchestrator.gpu.sample import GpuProcess
from orchestrator.gpu.sampler import Health
from orchestrator.runtime.exporters.actor import ExporterReport
from orchestrator.spec.paths import Paths
from tests.unit.gpu.support import gpu_info, sample

JOB = JobId("digits-k3f9q2")


class RecordingExporters:
    """Exporters that keep their instructions, as the actors do; `forget` stands for the death of one."""

    def __init__(self, home: Path) -> None:
        node = SimpleNamespace(home_shared=True, home=str(home))
        self.nodes: dict[str, Any] = dict.fromkeys(("GPU-a", "GPU-b", "GPU-c"), node)
        self.recorded: dict[str, dict[str, str]] = {uuid: {} for uuid in self.nodes}
        self.loads: dict[str, dict[float, GpuLoad]] = {}
        """Each GPU's load by the seconds over which it is asked for at most."""
        self.lineages: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.reports: dict[str, ExporterReport] = {}
        self.asked: list[set[str]] = []
        self.hanging: set[str] = set()

    async def ask(self, uuids: Iterable[str], over: Mapping[str, float] | None = None) -> Mapping[str, ExporterReport]:
        self.asked.append(set(uuids))
        found = {uuid: self._report(uuid, (over or {})[uuid]) for uuid in self.asked[-1] - self.hanging}
        self.reports |= found
        return found

    def _report(self, uuid: str, over: float) -> ExporterReport:
        processes = tuple(GpuProcess(pid=line[0], memory_bytes=1) for line in self.lineages.get(uuid, ()))
        return ExporterReport(
            url="http://127.0.0.1:1/metrics",
            pid=1,
            status=GpuStatus(
                info=gpu_info(uuid), health=Health.OK, sample=sample(uuid, processes=processes), error=None
            ),
            recording=frozenset(self.recorded[uuid]),
            load=next((load for most, load in self.loads.get(uuid, {}).items() if over <= most), None),
            lineages=self.lineages.get(uuid, ()),
        )

    async def record(self, uuid: str, job_id: str, directory: str, rate: float) -> None:
        self.recorded[uuid][job_id] = f"{directory} at {rate:g}"

    async def stop_recording(self, uuid: str, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.recorded[uuid].pop(job_id, None)


def job(
    *seats: tuple[str, ...],
    job_id: JobId = JOB,
    pids: tuple[int, ...] = (),
    record: bool = True,
    ago: float | None = 3600.0,
) -> Any:
    """Return a job with a rank on the GPUs of each of `seats`, running for `ago` seconds (None: not yet)."""
    return SimpleNamespace(
        id=job_id,
        gang=1,
        gang_open=True,
        attempt_number=1,
        attempt=SimpleNamespace(running_at=None if ago is None else time.time() - ago),
        pids=pids,
        seats=tuple(
            SimpleNamespace(rank=rank, node_id="n1", gpu_ids=(), gpu_uuids=uuids) for rank, uuids in enumerate(seats)
        ),
        spec=SimpleNamespace(telemetry=SimpleNamespace(record=record, rate=10.0)),
    )


class World:
    """A GPU watch with fakes around it."""

    def __init__(self, home: Path) -> None:
        self.exporters = RecordingExporters(home)
        self.jobs: list[Any] = []
        self.now = 1000.0
        nodes: Any = SimpleNamespace(reports={}, agents={}, lost_gpus={})
        ray: Any = SimpleNamespace(connected=True)
        exporters: Any = self.exporters
        self.balances = JobBalances(clock=lambda: self.now)
        self.watch = GpuWatch(
            ray,
            nodes,
            exporters,
            Paths(home=home, socket=home / "s"),
            lambda: self.jobs,
            self.balances,
            structlog.get_logger(),
        )

    def round(self) -> None:
        asyncio.run(self.watch.round())

    def loads(self, **watts: float) -> None:
        """Set a minute of full load with these watts, by GPU."""
        for uuid, power in watts.items():
            self.exporters.loads[f"GPU-{uuid}"] = {60.0: GpuLoad(utilization=1.0, memory=1e9, power=power)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_job_has_the_balance_of_its_gpus_loads(world: World) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",))]
    world.loads(a=300.0, b=100.0)
    world.round()
    assert world.balances.raw[JOB].worst is not None
    assert world.balances.json_ready[JOB]["quantities"]["power"]["cv"] == pytest.approx(0.5)
    assert world.balances.load_cv(JOB) == pytest.approx(0.5)
    world.jobs = []
    world.round()
    assert (world.balances.raw, world.balances.json_ready, world.balances.load_cv(JOB)) == ({}, {}, None)


def test_a_gpu_is_silent_after_a_minute_without_a_report_and_not_after_one_that_is_missed(world: World) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",))]
    world.loads(a=300.0, b=100.0)
    world.round()
    world.exporters.hanging = {"GPU-b"}
    world.now += 2.0
    world.round()
    assert world.balances.raw[JOB].silent == ()
    world.now += 58.0
    world.round()
    assert world.balances.raw[JOB].silent == ("GPU-b",)
    assert world.balances.load_cv(JOB) is None


@pytest.mark.parametrize("ago", [None, 5.0])
def test_a_job_that_starts_has_no_balance_yet(world: World, ago: float | None) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",), ago=ago)]
    world.loads(a=300.0, b=100.0)
    world.round()
    assert not world.balances.raw
    assert not world.balances.json_ready


def test_the_balance_leaves_out_what_the_gpus_did_before_the_job_ran(world: World) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",), ago=20.0)]
    even, before = (GpuLoad(utilization=1.0, memory=1e9, power=power) for power in (200.0, 300.0))
    world.exporters.loads = {"GPU-a": {21.0: even, 60.0: before}, "GPU-b": {21.0: even, 60.0: even}}
    world.round()
    assert world.balances.json_ready[JOB]["quantities"]["power"]["cv"] == pytest.approx(0.0)


def test_a_restart_of_the_job_ends_its_balance_until_it_runs_again(world: World) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",))]
    world.loads(a=300.0, b=100.0)
    world.round()
    assert JOB in world.balances.json_ready
    world.jobs = [job(("GPU-a",), ("GPU-b",), ago=None)]
    world.round()
    assert JOB not in world.balances.json_ready
    assert JOB not in world.balances.raw


def test_telemetry_is_begun_again_by_an_exporter_that_died(world: World, tmp_path: Path) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",))]
    world.round()
    directory = tmp_path / "jobs" / JOB / "telemetry"
    assert world.exporters.recorded == {
        "GPU-a": {JOB: f"{directory} at 10"},
        "GPU-b": {JOB: f"{directory} at 10"},
        "GPU-c": {},
    }
    world.exporters.recorded["GPU-b"].clear()
    world.round()
    assert world.exporters.recorded["GPU-b"] == {JOB: f"{directory} at 10"}


def test_telemetry_of_a_job_that_ended_while_no_daemon_was_there_is_ended(world: World) -> None:
    world.exporters.recorded["GPU-c"]["gone-123456"] = "somewhere"
    world.round()
    assert world.exporters.recorded["GPU-c"] == {}
    world.round()
    world.round()
    assert world.exporters.asked[-1] == set()  # no job holds a GPU and nothing is recorded: no exporter is called


def test_telemetry_of_a_job_that_ended_before_the_next_round_is_ended(world: World) -> None:
    """Its exporter records and has not reported that yet: otherwise the job's energy would continue to grow."""
    world.round()
    world.jobs = [job(("GPU-a",))]
    world.round()
    assert JOB in world.exporters.recorded["GPU-a"]
    world.jobs = []
    world.round()
    assert world.exporters.recorded["GPU-a"] == {}


def test_a_job_may_go_without_telemetry(world: World) -> None:
    world.jobs = [job(("GPU-a",), record=False)]
    world.round()
    assert world.exporters.recorded["GPU-a"] == {}


def test_the_reports_of_the_last_round_are_kept_for_diagnosis(world: World) -> None:
    world.jobs = [job(("GPU-a",), ("GPU-b",))]
    world.round()
    assert {"GPU-a", "GPU-b"} <= set(world.watch.reports)
