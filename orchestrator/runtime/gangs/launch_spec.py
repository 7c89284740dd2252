"""What an attempt starts with: each rank's launch plan, made from a job's record and its gang's seats, and the checkpoint.

A script that saves through ``context()`` finds its checkpoint itself. orch chooses one (``ORCH_RESUME_FROM``,
``${checkpoint}``) for scripts that save by themselves, and for entry points that take a path; that reads and verifies
files, and blocks. Plans are pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints, WatchSettings
from orchestrator.checkpoint.repository.persister import StoreSettings
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.runtime.nodes.directories import fork_socket_in, fork_socket_name, page_name, snapshot_directory
from orchestrator.runtime.ranks.launch_spec import RankPlan, SnapshotPlan
from orchestrator.runtime.spawn.environment import node_environment, rank_environment
from orchestrator.runtime.spawn.rank_locks import tree_mark
from orchestrator.spec.entrypoint import (
    CHECKPOINT,
    Entrypoint,
    cold_start_variables,
    parse_entrypoint,
    with_checkpoint,
)
from orchestrator.train.trainer.config.config import TRAINER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.checkpoint.external.external_checkpoints import Note
    from orchestrator.checkpoint.storage.directory import CheckpointInfo
    from orchestrator.core.events import Seat
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Directories on one node that a plan names, and the base of the ranks' environment."""

    paths: Paths
    work_dir: str
    node_dir: Path
    page_dir: Path
    base_env: Mapping[str, str] = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    log_limits: LogLimits
    previous_step: int
    simulated: bool
    vendor: str = ""
    resume_from: str | None = None
    watch: WatchSettings | None = None
    umask: int | None = None


def rank_plans(
    job: Job, seats: Sequence[Seat], master: tuple[str, int], places: Mapping[str, Places]
) -> Iterator[RankPlan]:
    """Yield each rank's plan, rank 0 first. ``master`` is the rendezvous address and port; ``places`` are by node id.

    What ranks have in common is built once for each node: a plan costs the same in a gang of any size.
    """
    entry = parse_entrypoint(job.spec.entrypoint)
    by_node: dict[str, list[Seat]] = {}  # in the order of their first rank, as torchrun counts GROUP_RANK
    for seat in seats:
        by_node.setdefault(seat.node_id, []).append(seat)
    local_ranks = dict.fromkeys(by_node, 0)
    common: dict[str, dict[str, Any]] = {}
    for seat in seats:
        node_id, place, local_rank = seat.node_id, places[seat.node_id], local_ranks[seat.node_id]
        if node_id not in common:  # one at a time: all nodes together would block the event loop
            common[node_id] = _common_to_node(
                job, entry, list(by_node), node_id, by_node[node_id], len(seats), master, place
            )
        page = f"{place.page_dir}/{page_name(job.id, seat.rank)}"
        env = rank_environment(
            common[node_id]["env"],
            rank=seat.rank,
            local_rank=local_rank,
            progress_path=page,
            process_tree=tree_mark(place.node_dir, job.id, seat.rank),
        )
        exit_record = str(place.paths.exit_record(job.id, job.attempt_number, seat.rank))
        watch = place.watch if seat.rank == 0 else None
        yield RankPlan(
            **common[node_id] | {"env": env}, rank=seat.rank, page=page, exit_record=exit_record, watch=watch
        )
        local_ranks[node_id] += 1


def _common_to_node(
    job: Job,
    entry: Entrypoint,
    nodes: list[str],
    node_id: str,
    seats: Sequence[Seat],
    world_size: int,
    master: tuple[str, int],
    place: Places,
) -> dict[str, Any]:
    """Return the fields that the plans of an attempt's ranks on one node share; ``env`` lacks each rank's own variables."""
    spec, submission, attempt = job.spec, job.submission, job.attempt_number
    entry = with_checkpoint(entry, place.resume_from)
    # Ranks on other nodes could not read what rank 0 left in shared memory.
    snapshots = _snapshots(job, place) if len(nodes) == 1 else None
    job_env = {**spec.env, **place.secrets}
    # All of the job's GPU ids on the node, in the order of LOCAL_RANK; a GPU that ranks share appears once.
    gpu_ids = tuple(dict.fromkeys(gpu for seat in seats for gpu in seat.gpu_ids))
    env = node_environment(
        base={**place.base_env, "PATH": submission.path},
        job_env=job_env,
        job_id=job.id,
        attempt=attempt,
        world_size=world_size,
        local_world_size=len(seats),
        group_rank=nodes.index(node_id),
        group_world_size=len(nodes),
        master_addr=master[0],
        master_port=master[1],
        restart_count=attempt - 1,
        max_restarts=spec.retry.max_restarts.infra,
        visible_gpus=() if place.simulated else gpu_ids,
        vendor="" if place.simulated else place.vendor,
        checkpoint_dir=checkpoint_dir(job, place.paths),
        resume_from=place.resume_from,
        previous_step=place.previous_step,
        working_dir=place.work_dir,
        extra=_own_settings(job, snapshots),
    )
    mode, target, args = _what_to_run(entry, submission.python)
    threads = env.get("OMP_NUM_THREADS", "")
    return {
        "job_id": job.id,
        "attempt": attempt,
        "mode": mode,
        "target": target,
        "args": args,
        "python_options": entry.python_options if mode != "command" else (),
        "cwd": place.work_dir,
        "env": env,
        "threads": int(threads) if threads.isdigit() and int(threads) > 0 else None,
        "cold": bool(cold_start_variables(job_env)),
        "python": submission.python,  # resolved for the entry point at submission
        "fork_socket": str(fork_socket_in(place.node_dir, fork_socket_name(submission.python))),
        "log_dir": str(place.paths.logs(job.id)),
        "previous_step": place.previous_step,
        "memory_bytes": spec.resources.resources_per_worker.memory_bytes or None,
        "runtime_env": tuple(name for name in ("pip", "py_modules") if getattr(spec.runtime_env, name)),
        "snapshots": snapshots,
        "progress_pattern": spec.health.progress.pattern if spec.health.progress else "",
        "log_policies": tuple((policy.pattern, policy.action) for policy in spec.retry.log_policies),
        "secrets": tuple(place.secrets.values()),
        "log_limits": place.log_limits,
        "umask": place.umask,
        "idle_seconds": spec.interactive.idle_limit.total_seconds() if spec.interactive else None,
    }


def checkpoint_dir(job: Job, paths: Paths) -> str:
    """Return where the job's checkpoints go: below ``checkpoint.storage_path``, by its id, or the job's own directory."""
    configured = job.spec.checkpoint.storage_path
    if configured is None:
        return str(paths.checkpoints(job.id))
    return f"{configured.rstrip('/')}/{job.id}"


def store_environ(job: Job, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the job's own variables that configure access to a storage behind a URL."""
    own = {**job.spec.env, **secrets}
    return {name: value for name, value in own.items() if name.startswith("AWS_")}


def _snapshots(job: Job, places: Places) -> SnapshotPlan:
    """Return the plan of snapshots in the node's shared memory."""
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
    """Return the variables by which ``orchestrator.train`` learns the job's settings."""
    checkpoint = job.spec.checkpoint
    settings = {"ORCH_CHECKPOINT_KEEP": str(checkpoint.keep)}
    if isinstance(checkpoint.interval, int):
        settings["ORCH_CHECKPOINT_INTERVAL"] = str(checkpoint.interval)
    elif isinstance(checkpoint.interval, timedelta):
        settings["ORCH_CHECKPOINT_INTERVAL"] = f"{checkpoint.interval.total_seconds():g}s"
    if snapshots is not None:
        settings["ORCH_SNAPSHOT_DIR"] = snapshots.directory
    if checkpoint.score_attribute is not None:
        settings["ORCH_CHECKPOINT_KEEP_BEST"] = str(checkpoint.keep_best or checkpoint.keep)
        settings["ORCH_CHECKPOINT_SCORE_ATTRIBUTE"] = checkpoint.score_attribute
        settings["ORCH_CHECKPOINT_SCORE_ORDER"] = checkpoint.score_order or "min"
    if job.spec.trainer:
        settings[TRAINER_VARIABLE] = json.dumps(job.spec.trainer)
    if job.elastic is not None:
        settings["ORCH_ELASTIC"] = f"{job.size.least}-{job.size.most}"
    return settings


def _what_to_run(entry: Entrypoint, python: str) -> tuple[str, str, tuple[str, ...]]:
    if entry.kind != "command":
        return entry.kind, entry.target, entry.args
    program = python if entry.python is not None else entry.argv[0]
    return "command", program, tuple(entry.argv[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Path or URL of the checkpoint to resume from (None: none), and a sentence for each that was found damaged.

    ``notes`` describe other changes to the script's own files; ``found`` is the newest valid one of them.
    """

    path: str | None
    problems: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    found: CheckpointInfo | None = None


def watch_settings(job: Job, paths: Paths) -> WatchSettings | None:
    """Return the settings of ``checkpoint.watch``; None where it is not set."""
    checkpoint = job.spec.checkpoint
    if checkpoint.watch is None:
        return None
    return WatchSettings(
        pattern=checkpoint.watch,
        directory=job.submission.work_dir,
        registry=str(paths.job(job.id) / "watched"),
        keep=checkpoint.keep,
    )


def newest_checkpoint(job: Job, paths: Paths, secrets: Mapping[str, str], reached: int = 0) -> Resumption:
    """Return the checkpoint for the job's current attempt: its own newest valid one, else the one it was submitted with.

    ``reached`` is the highest reported step. Raises OSError when the files cannot be reached.
    """
    settings = watch_settings(job, paths)
    if settings is not None:
        return _from_watched(job, ExternalCheckpoints(settings), reached)
    if CHECKPOINT in job.spec.entrypoint and job.attempt_number > 1:
        store = CheckpointRepository(
            checkpoint_dir(job, paths), attempt=job.attempt_number, environ=store_environ(job, secrets)
        )
        good = store.latest_good()
        return Resumption(
            path=good.path if good is not None else job.submission.resume_from, problems=store.quarantined
        )
    return Resumption(path=job.submission.resume_from)


def _from_watched(job: Job, files: ExternalCheckpoints, reached: int) -> Resumption:
    attempt = job.attempt_number
    if attempt == 1:
        files.adopt_none()
        return Resumption(path=job.submission.resume_from)
    files.scan(attempt=attempt - 1, writer_ended=True, step_at=lambda _: reached or None)
    good = files.newest_good(attempt=attempt)
    return Resumption(
        path=good or job.submission.resume_from,
        problems=tuple(files.problems),
        notes=tuple(files.notes),
        found=files.newest_info() if good else None,
    )
