"""Ends a gang's ranks, and the gang itself: no process of it is left when its release is reported."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.facts.notes import OutputsIncomplete
from orchestrator.runtime.deadline import OvertakenError, unless, within
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.rank_rpc import RPC_SECONDS
from orchestrator.runtime.gangs.relay import saved

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.runtime.gangs.relay import EventRelay
    from orchestrator.runtime.gangs.table import GangTable

GONE_SECONDS: Final = 60.0
FLUSH_SECONDS: Final = 30.0
COLLECT_SECONDS: Final = 600.0
"""How long logs and outputs are copied before a job ends. Its GPUs are free for others meanwhile."""

CONFIRM_SECONDS: Final = 2.0
"""How long to wait for the keepers of a gang that ended well to confirm its end: until then it may still print."""


class Ender:
    """Ends gangs. ``until_connected`` returns once Ray accepts calls; ``post`` takes events for the record."""

    def __init__(
        self,
        table: GangTable,
        calls: GangCalls,
        relay: EventRelay,
        nodes: NodeRegistry,
        files: JobFiles,
        *,
        until_connected: Callable[[], Awaitable[None]],
        post: Callable[[Sequence[ev.Event]], None],
        collect_seconds: float = COLLECT_SECONDS,
    ) -> None:
        self._table = table
        self._calls = calls
        self._relay = relay
        self._nodes = nodes
        self._files = files
        self._until_connected = until_connected
        self._post = post
        self._collect_seconds = collect_seconds
        self._collecting: dict[JobId, asyncio.Event] = {}

    async def stop(self, job: Job, deadline: float) -> None:
        """Send SIGTERM to every rank, and SIGKILL at the deadline. Raises GangLostError."""
        gang = await self._calls.attach_placed(job)
        self._relay.watch(job, gang, job.attempt_number)
        grace = max(0.0, deadline - clock.now())
        await self._calls.order_all(job, [a.stop(job.attempt_number, grace) for a in gang.actors])

    async def kill(self, job: Job) -> None:
        """Send SIGKILL to every rank. Raises GangLostError."""
        gang = await self._calls.attach_placed(job)
        self._relay.watch(job, gang, job.attempt_number)
        await self._calls.order_all(job, [a.kill(job.attempt_number) for a in gang.actors])

    async def release(self, job: Job) -> None:
        """Release the gang: on return no process of it is left, and others may have its resources."""
        await self._flush(job)
        gang = self._table.known(job.id)
        if gang is not None and gang.watchers and job.succeeded:
            await asyncio.wait(gang.watchers, timeout=CONFIRM_SECONDS)
        confirmed = gang is not None and len(gang.gone) == job.num_workers
        self._table.drop(job.id)
        await self._until_connected()
        await self._table.remove(job)
        if not confirmed:
            await self._confirm_gone(job)
        files = bool(job.spec.outputs or self._files.apart(job))
        self._post([ev.GangReleased(job_id=job.id, at=clock.now(), gang=job.gang, files=files)])

    async def collect(self, job: Job) -> None:
        """Copy home what the released gang left on its nodes; a note says what is missing."""
        if problem := await self._collect(job):
            self._post([ev.JobNoted(job_id=job.id, at=clock.now(), note=OutputsIncomplete(said=problem))])
        self._post([ev.FilesCollected(job_id=job.id, at=clock.now(), gang=job.gang)])

    async def end(self, job: Job) -> None:
        """End the gang, and return once no process of it is left; nothing of it is kept."""
        self._table.drop(job.id)
        await self._until_connected()
        await self._table.remove(job)
        await self._confirm_gone(job)

    async def _collect(self, job: Job) -> str:
        """Copy home what the gang left, for a limited time. Returns notes for the user; whatever goes wrong is one."""
        given_up = self._collecting.setdefault(job.id, asyncio.Event())
        where = f"what is not copied stays in {job.submission.work_dir or 'the working copy'} on its node"
        try:
            return await within(self._collect_seconds, unless(given_up, self._files.finish(job)))
        except OvertakenError:
            return f"copying logs and outputs was ended by orch cancel; {where}"
        except TimeoutError:
            return f"copying logs and outputs took more than {self._collect_seconds / 60:.0f} minutes; {where}"
        except Exception as error:
            return f"logs and outputs could not be copied ({type(error).__name__}: {error}); {where}"
        finally:
            self._collecting.pop(job.id, None)

    def end_collection(self, job_id: JobId) -> bool:
        """Stop copying what a gang left, so that the job ends now; False where nothing is being copied."""
        given_up = self._collecting.get(job_id)
        if given_up is not None:
            given_up.set()
        return given_up is not None

    async def _flush(self, job: Job) -> None:
        """Write the newest snapshot to storage before the actors that do so end."""
        if job.gang_lost or not job.seats:
            return
        try:
            gang = await self._table.attach(job)
            async with asyncio.timeout(FLUSH_SECONDS + RPC_SECONDS):
                statuses = await asyncio.gather(*(a.flush(FLUSH_SECONDS) for a in gang.actors), return_exceptions=True)
        except (GangLostError, TimeoutError):
            return
        for status in statuses:
            if not isinstance(status, BaseException) and (facts := saved(job.id, status)):
                self._post(facts)

    async def confirm_gone(self, gangs: Mapping[tuple[str, int], int]) -> None:
        """Wait until no process of these removed gangs is left on a node that answers, for GONE_SECONDS at most.

        ``gangs`` has the number of ranks by job and gang.
        """
        deadline = time.monotonic() + GONE_SECONDS
        calls = [
            agent.ranks_gone(job_id, range(ranks), deadline - time.monotonic())
            for agent in self._nodes.agents.values()
            for (job_id, _), ranks in gangs.items()
        ]
        await asyncio.gather(*(within(RPC_SECONDS, call) for call in calls), return_exceptions=True)

    async def _confirm_gone(self, job: Job) -> None:
        """Have each node's agent confirm that its ranks ended; a dead node's ranks end when their lease expires."""
        deadline = time.monotonic() + GONE_SECONDS
        by_node: dict[str, list[int]] = {}
        for rank, node_id in enumerate(job.nodes):
            by_node.setdefault(node_id, []).append(rank)
        for node_id, ranks in by_node.items():
            agent = self._nodes.agent_for(node_id)
            if agent is None:
                await self._nodes.until_fenced(node_id)
                continue
            left = await within(RPC_SECONDS, agent.ranks_gone(job.id, ranks, deadline - time.monotonic()))
            if left:
                raise TimeoutError(f"processes of ranks {left} of {job.id} are still on node {node_id}")
