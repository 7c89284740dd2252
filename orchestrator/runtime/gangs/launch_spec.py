"""From a job's record and its gang's seats to what each rank is told. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from orchestrator.checkpoint.repository.persister import StoreSettings
from orchestrator.runtime.forkserver.holder import MARK
from orchestrator.runtime.nodes.directories import fork_socket, page_name, snapshot_directory
from orchestrator.runtime.ranks.launch_spec import RankPlan, SnapshotPlan
from orchestrator.runtime.ranks.runtime_env import parts_of
from orchestrator.runtime.spawn.environment import rank_environment
from orchestrator.runtime.spawn.rank_locks import tree_mark
from orchestrator.spec.entrypoint import Entrypoint, cold_start_variables, parse_entrypoint, with_checkpoint
from orchestrator.train.trainer.config.sources import TRAINER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from orchestrator.checkpoint.external.external_checkpoints import WatchSettings
    from orchestrator.core.events import Seat
    from orchestrator.core.job import Job
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

__all__ = ["Places", "local_ranks", "rank_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Directories that a plan names on one node, and what the ranks' environment starts from."""

    paths: Paths
    work_dir: str
    node_dir: Path
    page_dir: Path
    base_env: Mapping[str, str] = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    log_limits: LogLimits
    previous_step: int
    simulated: bool
    resume_from: str | None = None
    watch: WatchSettings | None = None
    umask: int | None = None


def local_ranks(seats: Sequence[Seat]) -> list[tuple[int, int, int, int]]:
    """For each rank: local rank, local world size, group rank, group world size; nodes count as torchrun's groups."""
    nodes = list(dict.fromkeys(seat.node_id for seat in seats))
    result = []
    for seat in seats:
        mates = [s.rank for s in seats if s.node_id == seat.node_id]
        result.append((mates.index(seat.rank), len(mates), nodes.index(seat.node_id), len(nodes)))
    return result


def visible_gpus(seats: Sequence[Seat], node_id: str) -> tuple[str, ...]:
    """All of the job's GPU ids on a node, in the order of LOCAL_RANK; a GPU that ranks share is named once."""
    return tuple(dict.fromkeys(gpu for seat in seats if seat.node_id == node_id for gpu in seat.gpu_ids))


def rank_plan(job: Job, seats: Sequence[Seat], rank: int, master: tuple[str, int], places: Places) -> RankPlan:
    """What one rank is told. ``master`` is the rendezvous address and port."""
    local_rank, local_size, group_rank, group_size = local_ranks(seats)[rank]
    entry = with_checkpoint(parse_entrypoint(job.spec.entrypoint), places.resume_from)
    attempt = job.attempt_number
    page = places.page_dir / page_name(job.id, rank)
    python = _interpreter(job, entry)
    snapshots = _snapshots(job, seats, places)
    job_env = {**job.spec.env, **places.secrets}
    env = rank_environment(
        base={**places.base_env, "PATH": job.path},
        job_env=job_env,
        job_id=job.id,
        attempt=attempt,
        rank=rank,
        world_size=len(seats),
        local_rank=local_rank,
        local_world_size=local_size,
        group_rank=group_rank,
        group_world_size=group_size,
        master_addr=master[0],
        master_port=master[1],
        restart_count=attempt - 1,
        max_restarts=job.spec.retry.max_restarts.infra,
        visible_gpus=() if places.simulated else visible_gpus(seats, seats[rank].node_id),
        checkpoint_dir=checkpoint_dir(job, places.paths),
        resume_from=places.resume_from,
        progress_path=str(page),
        previous_step=places.previous_step,
        working_dir=places.work_dir,
        extra=_own_settings(job, snapshots) | {MARK: tree_mark(places.node_dir, job.id, rank)},
    )
    mode, target, args = _what_to_run(entry, python)
    return RankPlan(
        job_id=job.id,
        attempt=attempt,
        rank=rank,
        mode=mode,
        target=target,
        args=args,
        python_options=entry.python_options if mode != "command" else (),
        cwd=places.work_dir,
        env=env,
        threads=_threads(env),
        cold=bool(cold_start_variables(job_env)),
        python=python,
        fork_socket=str(fork_socket(places.node_dir, python)),
        log_dir=str(places.paths.logs(job.id)),
        exit_record=str(places.paths.exit_record(job.id, attempt, rank)),
        page=str(page),
        previous_step=places.previous_step,
        memory_bytes=job.spec.resources.resources_per_worker.memory_bytes or None,
        runtime_env=parts_of(job.spec.runtime_env),
        snapshots=snapshots,
        watch=places.watch if rank == 0 else None,
        progress_pattern=job.spec.health.progress.pattern if job.spec.health.progress else "",
        log_policies=tuple((p.pattern, p.action) for p in job.spec.retry.log_policies),
        secrets=tuple(places.secrets.values()),
        log_limits=places.log_limits,
        umask=places.umask,
    )


def checkpoint_dir(job: Job, paths: Paths) -> str:
    """Where the job's checkpoints go: below ``checkpoint.storage_path``, by its id, or the job's own directory."""
    configured = job.spec.checkpoint.storage_path
    if configured is None:
        return str(paths.checkpoints(job.id))
    return f"{configured.rstrip('/')}/{job.id}"


def store_environ(job: Job, secrets: Mapping[str, str]) -> dict[str, str]:
    """The job's own variables that say how to reach a storage behind a URL."""
    own = {**job.spec.env, **secrets}
    return {name: value for name, value in own.items() if name.startswith("AWS_")}


def _snapshots(job: Job, seats: Sequence[Seat], places: Places) -> SnapshotPlan | None:
    """Snapshots in shared memory, for a gang on one node: ranks elsewhere could not read what rank 0 left."""
    if len({seat.node_id for seat in seats}) > 1:
        return None
    checkpoint = job.spec.checkpoint
    return SnapshotPlan(
        directory=str(snapshot_directory(places.page_dir, job.id)),
        settings=StoreSettings(
            root=checkpoint_dir(job, places.paths),
            keep=checkpoint.keep,
            keep_best=checkpoint.keep_best,
            score_attribute=checkpoint.score_attribute,
            score_order=checkpoint.score_order or "min",
            environ=store_environ(job, places.secrets),
        ),
    )


def _own_settings(job: Job, snapshots: SnapshotPlan | None) -> dict[str, str]:
    return _checkpoint_settings(job, snapshots) | _trainer_settings(job) | _elastic_settings(job)


def _checkpoint_settings(job: Job, snapshots: SnapshotPlan | None) -> dict[str, str]:
    checkpoint = job.spec.checkpoint
    settings = {"ORCH_CHECKPOINT_KEEP": str(checkpoint.keep)}
    match checkpoint.interval:
        case int(steps):
            settings["ORCH_CHECKPOINT_INTERVAL"] = str(steps)
        case timedelta() as time:
            settings["ORCH_CHECKPOINT_INTERVAL"] = f"{time.total_seconds():g}s"
        case _:
            pass
    if snapshots is not None:
        settings["ORCH_SNAPSHOT_DIR"] = snapshots.directory
    if checkpoint.score_attribute is not None:
        settings["ORCH_CHECKPOINT_KEEP_BEST"] = str(checkpoint.keep_best or checkpoint.keep)
        settings["ORCH_CHECKPOINT_SCORE_ATTRIBUTE"] = checkpoint.score_attribute
        settings["ORCH_CHECKPOINT_SCORE_ORDER"] = checkpoint.score_order or "min"
    return settings


def _trainer_settings(job: Job) -> dict[str, str]:
    trainer = job.spec.trainer
    return {TRAINER_VARIABLE: json.dumps(trainer)} if trainer else {}


def _elastic_settings(job: Job) -> dict[str, str]:
    return {"ORCH_ELASTIC": f"{job.least_workers}-{job.most_workers}"} if job.is_elastic else {}


def _threads(env: Mapping[str, str]) -> int | None:
    threads = env.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else None


def _interpreter(job: Job, entry: Entrypoint) -> str:
    """The absolute interpreter: ``python`` is what it meant to the submitter."""
    return entry.python if entry.python is not None and entry.python.startswith("/") else job.python


def _what_to_run(entry: Entrypoint, python: str) -> tuple[str, str, tuple[str, ...]]:
    if entry.kind != "command":
        return entry.kind, entry.target, entry.args
    program = python if entry.python is not None else entry.argv[0]
    return "command", program, tuple(entry.argv[1:])
