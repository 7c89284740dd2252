"""Starts a gang's ranks: connects to its actors, puts files on their nodes, sends each rank its plan."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.facts.gangs import ActorLost, FilesNotSent, NodeLost, RecordRestored, StorageUnseen
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.gangs.errors import GangLostError, NodeFilesError, NodeGoneError
from orchestrator.runtime.gangs.event_mapping import resumed, seats_of
from orchestrator.runtime.gangs.launch_spec import Places, checkpoint_dir, newest_checkpoint, rank_plans, watch_settings
from orchestrator.runtime.gangs.rank_rpc import ask
from orchestrator.runtime.nodes.files import renew
from orchestrator.runtime.ranks.rank_events import rendezvous_of
from orchestrator.spec.paths import Paths, exit_record_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

    async def _launch(self, job: Job, gang: Gang, seats: tuple[ev.Seat, ...]) -> None:
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
        await ask([actor.launch.remote(plan) for actor, plan in zip(gang.actors, plans, strict=True)])

    async def _prepare(self, gang: Gang, attempt: int) -> tuple[str, int]:
        """Return the rendezvous address and port, once no older attempt runs.

        Actors that were created for this attempt need no call.
        """
        if (known := rendezvous_of(gang.greetings, attempt)) is not None:
            return known
        address = gang.greetings[0].address
        calls = [a.prepare.remote(attempt, None if rank else address) for rank, a in enumerate(gang.actors)]
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
