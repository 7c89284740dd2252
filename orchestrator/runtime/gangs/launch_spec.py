"""Builds each rank's launch plan from a job's record and its gang's seats. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.checkpoint.repository.persister import StoreSettings
from orchestrator.runtime.nodes.directories import fork_socket_in, fork_socket_name, page_name, snapshot_directory
from orchestrator.runtime.ranks.launch_spec import RankPlan, SnapshotPlan
from orchestrator.runtime.ranks.runtime_env import parts_of
from orchestrator.runtime.spawn.environment import node_environment, rank_environment
from orchestrator.runtime.spawn.rank_locks import tree_mark
from orchestrator.spec.entrypoint import Entrypoint, cold_start_variables, parse_entrypoint, with_checkpoint
from orchestrator.spec.paths import exit_record_name
from orchestrator.train.trainer.config.sources import TRAINER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.checkpoint.external.watched_glob import WatchSettings
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


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A gang's seats on one node, by LOCAL_RANK. ``number`` counts the gang's nodes, as torchrun's GROUP_RANK does."""

    number: int
    seats: tuple[Seat, ...]

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Return all of the job's GPU ids on the node, in the order of LOCAL_RANK; a GPU that ranks share appears once."""
        return tuple(dict.fromkeys(gpu for seat in self.seats for gpu in seat.gpu_ids))


def node_groups(seats: Sequence[Seat]) -> dict[str, NodeGroup]:
    """Return the gang's seats by node id; nodes in the order of their first rank."""
    by_node: dict[str, list[Seat]] = {}
    for seat in seats:
        by_node.setdefault(seat.node_id, []).append(seat)
    return {node_id: NodeGroup(number, tuple(on)) for number, (node_id, on) in enumerate(by_node.items())}


def rank_plans(
    job: Job, seats: Sequence[Seat], master: tuple[str, int], places: Mapping[str, Places]
) -> Iterator[RankPlan]:
    """Yield each rank's plan, rank 0 first. ``master`` is the rendezvous address and port; ``places`` are by node id.

    What ranks have in common is built once for each node: a plan costs the same in a gang of any size.
    """
    groups = node_groups(seats)
    common = _Common(job)
    makers: dict[str, _NodePlans] = {}
    local_ranks = dict.fromkeys(groups, 0)
    for seat in seats:
        node_id = seat.node_id
        if node_id not in makers:  # one at a time: all nodes together would block the event loop
            makers[node_id] = _NodePlans(job, common, groups[node_id], len(groups), len(seats), master, places[node_id])
        yield makers[node_id].plan(seat.rank, local_ranks[node_id])
        local_ranks[seat.node_id] += 1


class _Folders(NamedTuple):
    """Directories of one job: its attempt's exit records, its logs, its checkpoints. Text, as in plans."""

    exits: str
    logs: str
    checkpoints: str


class _Common:
    """Common parts of an attempt's plans on all nodes, each computed once."""

    def __init__(self, job: Job) -> None:
        self.entry = parse_entrypoint(job.spec.entrypoint)
        self.socket_name = fork_socket_name(job.submission.python)
        self._job = job
        self._folders: dict[Paths, _Folders] = {}

    def folders(self, paths: Paths) -> _Folders:
        """Return the job's directories in a home; nodes that share a home have the same."""
        found = self._folders.get(paths)
        if found is None:
            exits = paths.attempt_exits(self._job.id, self._job.attempt_number)
            logs = paths.logs(self._job.id)
            found = self._folders[paths] = _Folders(str(exits), str(logs), checkpoint_dir(self._job, paths))
        return found


class _NodePlans:
    """Builds the plans of an attempt's ranks on one node."""

    def __init__(
        self,
        job: Job,
        common: _Common,
        group: NodeGroup,
        nodes: int,
        world_size: int,
        master: tuple[str, int],
        places: Places,
    ) -> None:
        entry, folders = with_checkpoint(common.entry, places.resume_from), common.folders(places.paths)
        self._job_id, self._attempt, self._places = job.id, job.attempt_number, places
        # Text, not paths: joining paths for a thousand ranks takes longer than all the rest.
        self._pages = str(places.page_dir)
        self._exits = folders.exits
        python = job.submission.python  # resolved for the entry point at submission
        # Ranks on other nodes could not read what rank 0 left in shared memory.
        snapshots = _snapshots(job, places) if nodes == 1 else None
        job_env = {**job.spec.env, **places.secrets}
        self._env = node_environment(
            base={**places.base_env, "PATH": job.submission.path},
            job_env=job_env,
            job_id=job.id,
            attempt=self._attempt,
            world_size=world_size,
            local_world_size=len(group.seats),
            group_rank=group.number,
            group_world_size=nodes,
            master_addr=master[0],
            master_port=master[1],
            restart_count=self._attempt - 1,
            max_restarts=job.spec.retry.max_restarts.infra,
            visible_gpus=() if places.simulated else group.gpu_ids,
            vendor="" if places.simulated else places.vendor,
            checkpoint_dir=folders.checkpoints,
            resume_from=places.resume_from,
            previous_step=places.previous_step,
            working_dir=places.work_dir,
            extra=_own_settings(job, snapshots),
        )
        mode, target, args = _what_to_run(entry, python)
        self._common: dict[str, Any] = {
            "job_id": job.id,
            "attempt": self._attempt,
            "mode": mode,
            "target": target,
            "args": args,
            "python_options": entry.python_options if mode != "command" else (),
            "cwd": places.work_dir,
            "threads": _threads(self._env),
            "cold": bool(cold_start_variables(job_env)),
            "python": python,
            "fork_socket": str(fork_socket_in(places.node_dir, common.socket_name)),
            "log_dir": folders.logs,
            "previous_step": places.previous_step,
            "memory_bytes": job.spec.resources.resources_per_worker.memory_bytes or None,
            "runtime_env": parts_of(job.spec.runtime_env),
            "snapshots": snapshots,
            "progress_pattern": job.spec.health.progress.pattern if job.spec.health.progress else "",
            "log_policies": tuple((p.pattern, p.action) for p in job.spec.retry.log_policies),
            "secrets": tuple(places.secrets.values()),
            "log_limits": places.log_limits,
            "umask": places.umask,
            "idle_seconds": job.spec.interactive.idle_limit.total_seconds() if job.spec.interactive else None,
        }

    def plan(self, rank: int, local_rank: int) -> RankPlan:
        places = self._places
        page = f"{self._pages}/{page_name(self._job_id, rank)}"
        return RankPlan(
            rank=rank,
            env=rank_environment(
                self._env,
                rank=rank,
                local_rank=local_rank,
                progress_path=page,
                process_tree=tree_mark(places.node_dir, self._job_id, rank),
            ),
            exit_record=f"{self._exits}/{exit_record_name(rank)}",
            page=page,
            watch=places.watch if rank == 0 else None,
            **self._common,
        )


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
    return {"ORCH_ELASTIC": f"{job.size.least}-{job.size.most}"} if job.elastic is not None else {}


def _threads(env: Mapping[str, str]) -> int | None:
    threads = env.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else None


def _what_to_run(entry: Entrypoint, python: str) -> tuple[str, str, tuple[str, ...]]:
    if entry.kind != "command":
        return entry.kind, entry.target, entry.args
    program = python if entry.python is not None else entry.argv[0]
    return "command", program, tuple(entry.argv[1:])
