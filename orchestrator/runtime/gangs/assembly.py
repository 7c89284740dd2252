"""Assembles gangs on Ray from their parts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.gangs.actors import RayRankActors
from orchestrator.runtime.gangs.ending import Ender
from orchestrator.runtime.gangs.files.progress_pages import ProgressPages
from orchestrator.runtime.gangs.gangs import Gangs
from orchestrator.runtime.gangs.launching import Launcher
from orchestrator.runtime.gangs.orders import RPC_SECONDS, Orders
from orchestrator.runtime.gangs.rank_rpc import GangCalls
from orchestrator.runtime.gangs.relay import EventRelay
from orchestrator.runtime.gangs.reuse.parked_gangs import ParkedGangs
from orchestrator.runtime.gangs.table import GangTable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.gangs.files.job_files import JobFiles
    from orchestrator.runtime.gangs.launching import LaunchSettings
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.pools import Pool
    from orchestrator.train.script.progress import ProgressSnapshot


def ray_gangs(
    cluster: Cluster,
    settings: LaunchSettings,
    files: JobFiles,
    *,
    secrets_of: Callable[[Job], Mapping[str, str]],
    previous_step: Callable[[JobId], int],
    gpu_evidence: Callable[[Sequence[str]], Awaitable[tuple[Fact, ...]]],
    post: Callable[[Sequence[Event]], None],
    progress: Callable[[JobId, int, int, ProgressSnapshot], None],
    pool: Pool,
    log: FilteringBoundLogger,
) -> tuple[Gangs, GangCalls]:
    """Create the gang runtime for this cluster, and the interface that queries running ranks."""
    ray, nodes, paths = cluster.ray, cluster.nodes, settings.paths

    def reports() -> Mapping[str, NodeReport]:
        return nodes.reports

    call: Callable[[Callable[[], Any]], Awaitable[Any]] = partial(ray.call, seconds=RPC_SECONDS)
    parked = ParkedGangs(cluster.site.gangs_directory)
    table = GangTable(RayRankActors(cluster.site, ray, nodes, parked), call)
    orders = Orders(ray, nodes, table, post=post, log=log)
    relay = EventRelay(
        orders,
        files,
        paths,
        reports=reports,
        gpu_evidence=gpu_evidence,
        check_head=cluster.check_head,
        post=post,
        progress=progress,
        log=log,
        pages=ProgressPages(settings.page_dir if cluster.site.embedded else None, progress, log),
    )
    launcher = Launcher(
        settings,
        table,
        orders,
        relay,
        files,
        reports=reports,
        secrets_of=secrets_of,
        previous_step=previous_step,
        pool=pool,
        post=post,
    )
    ender = Ender(table, orders, relay, nodes, files, until_connected=ray.until_connected, post=post)
    gangs = Gangs(
        table,
        launcher,
        ender,
        files,
        paths,
        silent=lambda: nodes.silent,
        check_head=cluster.check_head,
        post=post,
        log=log,
    )
    return gangs, GangCalls(table)
