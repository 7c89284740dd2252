"""The exporter actors of every GPU of every node: made, found again after a restart, asked. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.deadline import within
from orchestrator.runtime.names import exporter_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.registry import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterAccess, ExporterReport
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport

GONE_SECONDS: Final = 900.0
"""How long the exporters of a node that is gone are still named to Prometheus: its alerts have to see them fail."""
REPORT_SECONDS: Final = 3.0
FIRST_REPORT_SECONDS: Final = 30.0
HUNG_SECONDS: Final = 30.0
"""An exporter that has not answered for so long is replaced: it was stopped, or hangs. One that is slow to start is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterTarget:
    """Where a GPU's exporter serves, as it said last, and on which node."""

    url: str
    node: str


@dataclass(slots=True)
class _Silence:
    """Since when an exporter has not answered, by the clock, and whether it was replaced for that."""

    since: float
    replaced: bool = False


class Exporters:
    """Makes the exporters and asks them. ``reports`` holds the last answer for each GPU; one that does not answer is not in it."""

    # A GPU that falls off the bus is missing from its node's inventory too, and an exporter that hangs from the reports.
    # Both are what alerts are for, so neither ends an exporter, nor its place in ``places``.

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
        self._actors: dict[str, Any] = {}
        self.reports: dict[str, ExporterReport] = {}
        self.nodes: dict[str, NodeReport] = {}
        self.places: dict[str, ExporterTarget] = {}
        self._gone_since: dict[str, float] = {}
        self._silences: dict[str, _Silence] = {}

    def forget_all(self) -> None:
        """Ray's head is gone, and every actor with it."""
        self._actors.clear()
        self.reports.clear()
        self.nodes.clear()
        self.places.clear()
        self._gone_since.clear()
        self._silences.clear()

    async def refresh(self) -> None:
        """Make exporters for GPUs that have none; drop those of nodes that are gone."""
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
        """(node, GPU) of those that have fallen out of the inventory of a node that is there: they are broken."""
        here = {gpu.uuid for report in self._known.reports.values() for gpu in report.gpus}
        return [
            (report.hostname, uuid)
            for uuid, report in self.nodes.items()
            if uuid not in here and report.node_id in self._known.reports
        ]

    async def ask(
        self, uuids: Iterable[str] | None = None, since: Mapping[str, float] | None = None
    ) -> Mapping[str, ExporterReport]:
        """The newest reports of these GPUs, or of all; side by side, each with a deadline.

        With ``since`` they also tell what each GPU did after that Unix time, or as far back as they know.
        """
        known = list(self._actors if uuids is None else (u for u in uuids if u in self._actors))
        after = {uuid: None if since is None else since.get(uuid, 0.0) for uuid in known}
        found = await asyncio.gather(*(self._ask(uuid, self._report_seconds, after[uuid]) for uuid in known))
        return {uuid: report for uuid, report in zip(known, found, strict=True) if report is not None}

    async def _ask(self, uuid: str, seconds: float, since: float | None = None) -> ExporterReport | None:
        actor = self._actors.get(uuid)
        if actor is None:
            return None
        try:
            report: ExporterReport = await within(seconds, actor.report.remote(since))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.reports.pop(uuid, None)
            if is_dead(error):
                self._actors.pop(uuid, None)  # beyond Ray's own restarts: the next refresh makes another
            elif isinstance(error, TimeoutError):
                await self._replace_hung(uuid, actor)
            return None
        self._silences.pop(uuid, None)
        if uuid not in self.nodes:
            return None  # forgotten meanwhile
        self.reports[uuid] = report
        self.places[uuid] = ExporterTarget(url=report.url, node=self.nodes[uuid].hostname)
        return report

    async def _replace_hung(self, uuid: str, actor: Any) -> None:
        """Have Ray end an exporter that has been silent for long, and start it again: Ray does so even where it is stopped."""
        now = self._clock()
        if now - self._silences.setdefault(uuid, _Silence(now)).since < self._hung_seconds:
            return
        self._silences[uuid] = _Silence(now, replaced=True)  # the new one gets as long
        with contextlib.suppress(Exception):  # it is tried again
            await self._ray.call(_restart, actor)

    def is_starting(self, uuid: str) -> bool:
        """Whether the GPU's exporter has never answered, and has not had the time to."""
        silence = self._silences.get(uuid)
        patient = silence is None or (not silence.replaced and self._clock() - silence.since < self._hung_seconds)
        return patient and uuid not in self.places

    async def record(self, uuid: str, job_id: str, directory: str, rate: float) -> None:
        """Have a GPU's samples appended to a job's telemetry; asking again changes nothing."""
        actor = self._actors.get(uuid)
        if actor is None:
            return
        with contextlib.suppress(Exception):  # recording is asked for again as long as the job holds the GPU
            await within(self._report_seconds, actor.record.remote(job_id, directory, rate))

    async def stop_recording(self, uuid: str, job_ids: Iterable[str]) -> None:
        """End the telemetry of these jobs on a GPU; asking again changes nothing."""
        actor = self._actors.get(uuid)
        if actor is not None:
            with contextlib.suppress(Exception):  # the next report names them again
                await within(self._report_seconds, actor.stop_recording.remote(list(job_ids)))

    def _ensure(self, node_id: str, gpu: NodeGpu, report: NodeReport) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from orchestrator.runtime.exporters.actor import ExporterActor

        simulated = [g for g in report.gpus if g.simulated]
        return (
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


def _restart(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=False)


def is_dead(error: BaseException) -> bool:
    """The actor is gone for good."""
    from ray.exceptions import ActorDiedError

    return isinstance(error, ActorDiedError)
