"""Creates the daemon of a home; the only module that chooses implementations.

Nothing here decides anything else, and no part imports this module.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orchestrator.daemon.assembly import Ground, Hooks, Parts, Runtime, assemble
from orchestrator.daemon.changes import Changes
from orchestrator.daemon.daemon import Background
from orchestrator.daemon.health import Endpoints
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.daemon.metrics import Metering
from orchestrator.daemon.stopping import StopRequest
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.exporters.actor import ExporterAccess
from orchestrator.runtime.exporters.exporters import Exporters, gpu_evidence
from orchestrator.runtime.gangs.gangs import ray_gangs
from orchestrator.runtime.gangs.job_files import JobFiles
from orchestrator.runtime.gangs.launching import LaunchSettings
from orchestrator.runtime.nodes.directories import page_directory, placement_group_name
from orchestrator.runtime.pools import Pools
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.runtime.spawn.environment import inheritable_environment
from orchestrator.store.sqlite import SqliteStore
from orchestrator.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.launch import ServeOptions
    from orchestrator.spec.settings import Settings


def build(settings: Settings, options: ServeOptions, environ: Mapping[str, str], umask: int) -> Parts:
    """Return a daemon of this home on Ray that has only opened the store. Ranks get ``umask``. Raises StoreError."""
    ground = _ground(settings)
    return assemble(ground, lambda hooks: _runtime(ground, options, hooks, environ, umask))


def _inherited(environ: Mapping[str, str], passed: Sequence[str], log: FilteringBoundLogger) -> dict[str, str]:
    """Return the variables that jobs inherit from the daemon's environment; log the names of the others."""
    found = inheritable_environment(environ, passed)
    if left_out := sorted(environ.keys() - found.keys()):
        log.info("environment.left_out", names=left_out, hint="ORCH_PASS_ENV names variables that jobs get, too")
    return found


def _ground(settings: Settings) -> Ground:
    log, stop, now, pools = get_logger("orch.daemon"), StopRequest(), time.time(), Pools()
    return Ground(
        settings=settings,
        log=log,
        store=SqliteStore.open(
            settings.paths.store, reserve=settings.paths.reserve, reserve_bytes=settings.reserve_bytes
        ),
        metering=Metering(settings, now),
        background=Background(stop.now, log),
        endpoints=Endpoints(home=str(settings.home), started_at=now),
        stop=stop,
        changes=Changes(int(now * 1000)),
        pools=pools,
        under_way=SubmissionsUnderWay(settings.paths, pools.submissions),
    )


def _runtime(ground: Ground, options: ServeOptions, hooks: Hooks, environ: Mapping[str, str], umask: int) -> Runtime:
    settings = ground.settings
    cluster = Cluster(
        settings.paths,
        ClusterOptions(address=options.ray_address or None, simulate_gpus=options.simulate_gpus),
        on_lost=hooks.head_lost,
        own_groups=lambda: {placement_group_name(j.id, j.gang) for j in hooks.decided() if j.gang_open},
    )
    access = ExporterAccess(
        address=settings.exporter_address,
        ports=settings.exporter_ports,
        token=options.read_token(),
        processes=settings.exporter_processes,
    )
    exporters = Exporters(cluster.ray, cluster.nodes, access)
    limits = LogLimits(max_bytes=settings.log_max_bytes, keep_files=settings.log_keep_files)
    pool = ground.pools.outputs
    files = JobFiles(cluster.nodes, settings.paths, limits, outputs_max_bytes=settings.outputs_max_bytes, pool=pool)
    launches = LaunchSettings(
        paths=settings.paths,
        page_dir=page_directory(cluster.site.namespace),
        base_env=_inherited(environ, settings.pass_env, ground.log),
        log_limits=limits,
        umask=umask,
    )
    gangs, calls = ray_gangs(
        cluster,
        launches,
        files,
        secrets_of=lambda job: read_secrets(settings.paths, job.id),
        previous_step=ground.book.previous_step,
        gpu_evidence=lambda uuids: gpu_evidence(exporters, uuids),
        post=hooks.post,
        progress=hooks.reported,
        pool=ground.pools.starts,
        log=ground.log,
    )
    return Runtime(cluster=cluster, exporters=exporters, files=files, gangs=gangs, calls=calls)
