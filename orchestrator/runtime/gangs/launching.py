"""Starts a gang's ranks: connects to its actors, puts files on their nodes, chooses the checkpoint, sends each rank its plan.

Plans are pure: they follow from a job's record and its gang's seats. A script that saves through ``context()`` finds its checkpoint
itself. orch chooses one (``ORCH_RESUME_FROM``, ``${checkpoint}``) for scripts that save by themselves, and for entry points
that take a path; that reads and verifies files, and blocks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import clock
from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints, ReportedStep, WatchSettings
from orchestrator.checkpoint.repository.persister import StoreSettings
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.core import events as ev
from orchestrator.core.facts import notes
from orchestrator.core.facts.faults import ActorLost, FilesNotSent, NodeLost, RecordRestored, StorageUnseen
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.gangs.errors import GangLostError, NodeFilesError, NodeGoneError
from orchestrator.runtime.gangs.rank_rpc import ask, noted
from orchestrator.runtime.gangs.relay import seats_of
from orchestrator.runtime.nodes.directories import fork_socket_in, fork_socket_name, page_name, snapshot_directory
from orchestrator.runtime.nodes.files import renew
from orchestrator.runtime.ranks.launch_spec import RankPlan, SnapshotPlan
from orchestrator.runtime.ranks.rank_events import rendezvous_of
from orchestrator.runtime.spawn.environment import node_environment, rank_environment
from orchestrator.runtime.spawn.rank_locks import tree_mark
from orchestrator.spec.entrypoint import (
    CHECKPOINT,
    Entrypoint,
    cold_start_variables,
    parse_entrypoint,
    with_checkpoint,
)
from orchestrator.spec.paths import Paths, exit_record_name
from orchestrator.train.trainer.config.config import TRAINER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.checkpoint.external.external_checkpoints import Note
    from orchestrator.checkpoint.storage.directory import CheckpointInfo
    from orchestrator.core.events import RankPlacement
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.runtime.gangs.relay import EventRelay
    from orchestrator.runtime.gangs.table import Gang, GangTable
    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Settings common to all launches of a daemon. ``page_dir`` is where progress pages are; ``umask`` is that of ranks."""

    paths: Paths
    page_dir: Path
    base_env: Mapping[str, str]
    log_limits: LogLimits
    umask: int | None = None


class Launcher:
    """Starts ranks. ``secrets_of`` reads a job's secrets; ``previous_step`` gives the highest step that it reported.

    ``reports`` gives the newest report of each node; ``post`` takes events for the record.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        table: GangTable,
        calls: GangCalls,
        relay: EventRelay,
        files: JobFiles,
        *,
        reports: Callable[[], Mapping[str, NodeReport]],
        secrets_of: Callable[[Job], Mapping[str, str]],
        previous_step: Callable[[JobId], int],
        pool: Pool,
        post: Callable[[Sequence[ev.Event]], None],
    ) -> None:
        self._settings = settings
        self._table = table
        self._calls = calls
        self._relay = relay
        self._files = files
        self._reports = reports
        self._secrets_of = secrets_of
        self._previous_step = previous_step
        self._pool = pool
        self._post = post

    async def ensure(self, job: Job) -> None:
        """Start the job's current attempt; on return it runs or is being started. Raises GangLostError."""
        gang = await self._table.attach(job)
        placed = bool(gang.greetings)
        if not placed:
            gang.greetings = await self._calls.hello(job, gang)
        seats = seats_of(gang.greetings, self._reports())
        if not placed and seats != job.seats:
            self._post([ev.GangPlaced(job_id=job.id, at=clock.now(), gang=job.gang, seats=seats)])
        attempt = job.attempt_number
        if gang.watching == attempt:
            return
        if any(greeting.launched > attempt for greeting in gang.greetings):
            raise GangLostError(RecordRestored(attempt=max(greeting.launched for greeting in gang.greetings)))
        waiting = [rank for rank, greeting in enumerate(gang.greetings) if greeting.launched < attempt]
        if waiting:
            self._refuse_to_repeat(job, waiting)
            if attempt == 1 and len(waiting) == len(gang.greetings):
                await self._renew_files(job)
            await self._launch(job, gang, seats)
        self._relay.watch(job, gang, attempt)

    def _refuse_to_repeat(self, job: Job, ranks: Sequence[int]) -> None:
        """Raise GangLostError when a rank has already run in an actor that has ended: its recorded end is reported instead."""
        try:
            exits = self._settings.paths.attempt_exits(job.id, job.attempt_number)
            ended = {path.name for path in exits.iterdir()}
        except FileNotFoundError:
            return
        except OSError as error:  # the job has closed its own directory: it is not known which ranks have run
            raise GangLostError(self._not_read(job, error)) from error
        for rank in ranks:
            if exit_record_name(rank) in ended:
                raise GangLostError(ActorLost(rank=rank))

    async def _renew_files(self, job: Job) -> None:
        """Lay out the files anew that no rank has used, if the machine was started since: a disk may have lost of them what it had confirmed.

        Raises GangLostError for a damaged archive.
        """
        paths = self._settings.paths
        try:
            await self._pool.run(renew, job.submission.snapshot, paths.blob, paths.work(job.id), paths.laid_out(job.id))
        except (OSError, ValueError) as error:
            raise GangLostError(self._not_read(job, error)) from error

    @staticmethod
    def _not_read(job: Job, error: Exception) -> FilesNotSent:
        return FilesNotSent(rank=0, node=job.nodes[0], said=str(error), host=os.uname().nodename)

    async def _launch(self, job: Job, gang: Gang, seats: tuple[ev.RankPlacement, ...]) -> None:
        await self._bring_files(job)
        attempt = job.attempt_number
        master = await self._prepare(gang, attempt)
        previous = max([self._previous_step(job.id), *(g.highest_step for g in gang.greetings)])
        secrets = self._secrets_of(job)
        paths = self._settings.paths
        resumption = await self._pool.run(newest_checkpoint, job, paths, secrets, previous)
        if events := resumed(job.id, resumption, Masker(secrets.values())):
            self._post(events)
        overrides: dict[str, Any] = {"resume_from": resumption.path, "watch": watch_settings(job, paths)}
        nodes = {seat.node_id for seat in seats}
        by_node = {node_id: replace(self._places(job, node_id, secrets, previous), **overrides) for node_id in nodes}
        plans = rank_plans(job, seats, master, by_node)
        await ask([actor.launch(plan) for actor, plan in zip(gang.actors, plans, strict=True)])

    async def _prepare(self, gang: Gang, attempt: int) -> tuple[str, int]:
        """Return the rendezvous address and port, once no older attempt runs.

        Actors that were created for this attempt need no call.
        """
        if (known := rendezvous_of(gang.greetings, attempt)) is not None:
            return known
        address = gang.greetings[0].address
        calls = [a.prepare(attempt, None if rank else address) for rank, a in enumerate(gang.actors)]
        return address, (await ask(calls))[0]

    async def _bring_files(self, job: Job) -> None:
        """Put a rank's files on its node, if that does not share the home. Raises GangLostError where that fails."""
        apart = self._files.apart(job)
        if not apart:
            return
        try:
            storage = checkpoint_dir(job, self._settings.paths)
            # A URL names the same place on every node.
            if "://" not in storage and (unable_to_read := await self._files.unable_to_read(storage, apart)):
                path = str(job.spec.checkpoint.storage_path)
                raise GangLostError(
                    StorageUnseen(rank=job.nodes.index(unable_to_read[0]), node=unable_to_read[0], storage_path=path)
                )
            await self._files.ship(job)
        except NodeGoneError as error:
            raise GangLostError(NodeLost(node=error.node_id), node_lost=True) from error
        except NodeFilesError as error:
            rank, report = job.nodes.index(error.node_id), self._reports().get(error.node_id)
            host = report.hostname if report else ""
            raise GangLostError(FilesNotSent(rank=rank, node=error.node_id, said=error.reason, host=host)) from error

    def _places(self, job: Job, node_id: str, secrets: Mapping[str, str], previous_step: int) -> Places:
        report, settings = self._reports()[node_id], self._settings
        own = Paths(home=Path(report.home), socket=settings.paths.socket)
        return Places(
            paths=settings.paths if report.home_shared else own,
            work_dir=job.submission.work_dir if report.home_shared else str(own.work(job.id)),
            node_dir=Path(report.node_dir),
            page_dir=settings.page_dir,
            base_env=settings.base_env,
            secrets=secrets,
            log_limits=settings.log_limits,
            previous_step=previous_step,
            simulated=any(g.simulated for g in report.gpus),
            # Ray has GPUs of one vendor on a node.
            vendor=next((g.vendor for g in report.gpus), ""),
            umask=settings.umask,
        )


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
    job: Job, seats: Sequence[RankPlacement], master: tuple[str, int], places: Mapping[str, Places]
) -> Iterator[RankPlan]:
    """Yield each rank's plan, rank 0 first. ``master`` is the rendezvous address and port; ``places`` are by node id.

    What ranks have in common is built once for each node: a plan costs the same in a gang of any size.
    """
    entry = parse_entrypoint(job.spec.entrypoint)
    by_node: dict[str, list[RankPlacement]] = {}  # in the order of their first rank, as torchrun counts GROUP_RANK
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
    seats: Sequence[RankPlacement],
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


def resumed(job_id: JobId, resumption: Resumption, masker: Masker) -> list[ev.Event]:
    """Return the results of the search for the checkpoint to resume from; secrets in texts are masked."""
    now = clock.now()
    events: list[ev.Event] = [
        noted(job_id, notes.CheckpointQuarantined(said=masker.text(message))) for message in resumption.problems
    ]
    events += [
        noted(job_id, notes.CheckpointFileNote(note_code=note.code, said=masker.text(note.message)))
        for note in resumption.notes
    ]
    found = resumption.found
    if found is not None:
        events.append(
            ev.CheckpointSaved(
                job_id=job_id,
                at=found.created_at or now,
                attempt=found.attempt,
                step=found.step,
                path=found.path,
                digest=found.digest,
            )
        )
    return events


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
    reported = ReportedStep(step=reached, least=0, most=reached) if reached else None
    files.scan(attempt=attempt - 1, writer_ended=True, step_at=lambda _: reported)
    good = files.newest_good(attempt=attempt)
    return Resumption(
        path=good or job.submission.resume_from,
        problems=tuple(files.problems),
        notes=tuple(files.notes),
        found=files.newest_info() if good else None,
    )
