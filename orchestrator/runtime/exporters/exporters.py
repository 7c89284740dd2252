"""Creates, finds and queries the exporter actors of every GPU of every node. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.faults import GpuLost, Xid
from orchestrator.gpu.sampler import Health
from orchestrator.runtime import remote
from orchestrator.runtime.deadline import within
from orchestrator.runtime.nodes.control_plane import end_worker
from orchestrator.runtime.nodes.directories import exporter_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from orchestrator.core.facts.faults import GpuFault
    from orchestrator.gpu.exporter import GpuStatus
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterAccess, ExporterActor, ExporterReport
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport


GONE_SECONDS: Final = 900.0
"""How long Prometheus still sees the exporters of a lost node: its alerts need the failed scrapes."""
REPORT_SECONDS: Final = 3.0
FIRST_REPORT_SECONDS: Final = 30.0
HUNG_SECONDS: Final = 30.0
"""An exporter that has not answered for this long is stopped or hangs, and is replaced; a slow start takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterTarget:
    """The node and the last reported address of a GPU's exporter."""

    url: str
    node: str


@dataclass(slots=True)
class _Silence:
    """Silence of an exporter: its beginning, by the clock, and whether the exporter was replaced because of it."""

    since: float
    replaced: bool = False


class Exporters:
    """Creates and queries exporters. ``reports`` holds the last report of each GPU while its exporter answers."""

    # A GPU that falls off the bus is missing from its node's inventory, and an exporter that hangs from the reports. Alerts
    # need both, so neither removes an exporter or its entry in ``places``.

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        access: ExporterAccess,
        *,
        report_seconds: float = REPORT_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report_seconds, self._hung_seconds, self._clock = report_seconds, hung_seconds, clock
        self._ray = ray
        self._known = nodes
        self._access = access
        self._actors: dict[str, ExporterActor] = {}
        self.reports: dict[str, ExporterReport] = {}
        self.nodes: dict[str, NodeReport] = {}
        self.places: dict[str, ExporterTarget] = {}
        self._gone_since: dict[str, float] = {}
        self._silences: dict[str, _Silence] = {}

    def forget_all(self) -> None:
        """Drop all exporters: Ray's head has died, and every actor with it."""
        self._actors.clear()
        self.reports.clear()
        self.nodes.clear()
        self.places.clear()
        self._gone_since.clear()
        self._silences.clear()

    async def refresh(self) -> None:
        """Create exporters for GPUs that have none; drop those of nodes that have left."""
        wanted = {
            gpu.uuid: (node_id, gpu, report) for node_id, report in self._known.reports.items() for gpu in report.gpus
        }
        self.nodes |= {uuid: report for uuid, (_, _, report) in wanted.items()}
        self._drop_gone()
        for uuid in wanted.keys() - self._actors.keys():
            node_id, gpu, report = wanted[uuid]
            self._actors[uuid] = await self._ray.call(self._ensure, node_id, gpu, report)
            await self._ask(uuid, FIRST_REPORT_SECONDS)

    def _drop_gone(self) -> None:
        now = self._clock()
        for uuid, report in list(self.nodes.items()):
            if report.node_id in self._known.reports:
                self._gone_since.pop(uuid, None)
                continue
            self._actors.pop(uuid, None)
            self.reports.pop(uuid, None)
            if now - self._gone_since.setdefault(uuid, now) > GONE_SECONDS:
                del self.nodes[uuid], self._gone_since[uuid]
                self.places.pop(uuid, None)

    def missing(self) -> list[tuple[str, str]]:
        """Return (node, GPU) of GPUs that a live node no longer lists: they are broken."""
        here = {gpu.uuid for report in self._known.reports.values() for gpu in report.gpus}
        return [
            (report.hostname, uuid)
            for uuid, report in self.nodes.items()
            if uuid not in here and report.node_id in self._known.reports
        ]

    async def ask(
        self, uuids: Iterable[str] | None = None, over: Mapping[str, float] | None = None
    ) -> Mapping[str, ExporterReport]:
        """Query these GPUs' exporters, or all, concurrently and each with a deadline; return the reports.

        ``over`` adds each GPU's load over that many seconds.
        """
        known = list(self._actors if uuids is None else (u for u in uuids if u in self._actors))
        seconds = over or {}
        found = await asyncio.gather(*(self._ask(uuid, self._report_seconds, seconds.get(uuid)) for uuid in known))
        return {uuid: report for uuid, report in zip(known, found, strict=True) if report is not None}

    async def _ask(self, uuid: str, seconds: float, over: float | None = None) -> ExporterReport | None:
        actor = self._actors.get(uuid)
        if actor is None:
            return None
        try:
            report = await within(seconds, actor.report(over))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.reports.pop(uuid, None)
            if is_dead(error):
                self._actors.pop(uuid, None)  # Ray no longer restarts it: the next refresh creates another
            elif isinstance(error, TimeoutError):
                await self._replace_hung(uuid, actor)
            return None
        self._silences.pop(uuid, None)
        if uuid not in self.nodes:
            return None  # forgotten meanwhile
        self.reports[uuid] = report
        self.places[uuid] = ExporterTarget(url=report.url, node=self.nodes[uuid].hostname)
        return report

    async def _replace_hung(self, uuid: str, actor: ExporterActor) -> None:
        """Have Ray kill and restart an exporter that has not answered for long; this also works for a stopped process."""
        now = self._clock()
        if now - self._silences.setdefault(uuid, _Silence(now)).since < self._hung_seconds:
            return
        self._silences[uuid] = _Silence(now, replaced=True)  # the new one gets the same time
        with contextlib.suppress(Exception):  # the next round tries again
            await self._ray.call(end_worker, actor, restart=True)

    def is_starting(self, uuid: str) -> bool:
        """Whether the GPU's exporter has never answered and is still within its start time."""
        silence = self._silences.get(uuid)
        patient = silence is None or (not silence.replaced and self._clock() - silence.since < self._hung_seconds)
        return patient and uuid not in self.places

    async def record(self, uuid: str, job_id: str, directory: str, rate: float) -> None:
        """Append a GPU's samples to a job's telemetry. Idempotent."""
        actor = self._actors.get(uuid)
        if actor is None:
            return
        with contextlib.suppress(Exception):  # repeated while the job holds the GPU
            await within(self._report_seconds, actor.record(job_id, directory, rate))

    async def stop_recording(self, uuid: str, job_ids: Iterable[str]) -> None:
        """End the telemetry of these jobs on a GPU. Idempotent."""
        actor = self._actors.get(uuid)
        if actor is not None:
            with contextlib.suppress(Exception):  # the next report names them again
                await within(self._report_seconds, actor.stop_recording(list(job_ids)))

    def _ensure(self, node_id: str, gpu: NodeGpu, report: NodeReport) -> ExporterActor:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from orchestrator.runtime.exporters.actor import ExporterActor

        simulated = [g for g in report.gpus if g.simulated]
        handle = (
            ray.remote(ExporterActor)
            .options(
                name=exporter_name(gpu.uuid),
                namespace=self._ray.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            .remote(
                gpu_uuid=gpu.uuid,
                node=report.hostname,
                node_dir=report.node_dir,
                simulate=len(simulated),
                simulated_node=report.simulated_node,
                access=self._access,
            )
        )
        return remote.stub(ExporterActor, handle)


def is_dead(error: BaseException) -> bool:
    """Whether the actor has ended for good."""
    from ray.exceptions import ActorDiedError

    return isinstance(error, ActorDiedError)


ASK_SECONDS: Final = 0.5
RECENT_SECONDS: Final = 60.0  # an Xid precedes the program's failure: a collective may wait for long


async def gpu_evidence(exporters: Exporters, uuids: Sequence[str]) -> tuple[GpuFault, ...]:
    """Return what the driver reports of a dead rank's GPUs; empty where nothing is wrong or no exporter answers.

    Exporters receive an Xid at once; one that hangs with its GPU is not waited for.
    """
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reports = await exporters.ask(uuids)
    except TimeoutError:
        reports = {}
    missing = {uuid for _, uuid in exporters.missing()}
    faults: list[GpuFault] = [GpuLost(gpu_uuid=uuid) for uuid in uuids if uuid in missing]
    for uuid in uuids:
        report = reports.get(uuid)
        if report is not None and uuid not in missing:
            faults += evidence_of(uuid, report.status)
    return tuple(faults)


def evidence_of(uuid: str, status: GpuStatus) -> list[GpuFault]:
    """Return what one GPU's status shows of a failure now: the time of its newest sample, by the clock of its node."""
    now = status.sample.timestamp if status.sample else 0.0
    lost: list[GpuFault] = [GpuLost(gpu_uuid=uuid)] if status.health is Health.LOST else []
    recent = (x for x in (status.sample.xids if status.sample else ()) if now - x.last_timestamp <= RECENT_SECONDS)
    return lost + [
        Xid(gpu_uuid=uuid, number=xid.code, at=xid.last_timestamp, seconds_before=now - xid.last_timestamp)
        for xid in recent
    ]
