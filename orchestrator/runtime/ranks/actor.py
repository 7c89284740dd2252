"""The service of a rank's actor for a gang: adds Ray's data (GPU ids, the node) and the lease on the cluster to the supervisor.

The lease: an actor that has not reached Ray's control plane for a while, or learns that its node counts as dead, ends
its rank before a replacement may start, so that a node cut off from the cluster never runs a rank twice. The only node of an
embedded head cannot be cut off: its ranks' locks show whether they have ended, and its actors need no lease.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from orchestrator.runtime.nodes.agent import PRELOAD
from orchestrator.runtime.nodes.control_plane import is_alive
from orchestrator.runtime.ranks.runtime_env import inside
from orchestrator.runtime.ranks.supervisor import RankSupervisor
from orchestrator.runtime.spawn.client import start_fork_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.checkpoint.repository.status import PersisterStatus
    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply
    from orchestrator.runtime.ranks.sessions.messages import SessionMessage, SessionOutput, SessionRequest

LEASE_SECONDS: Final = 10.0
FENCE_SECONDS: Final = LEASE_SECONDS + 4.0  # the lease, plus the longest check and its call
_LEASE_CHECK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGreeting:
    """An actor's node, process id and GPU ids, and the attempts that it is prepared for and has launched."""

    node_id: str
    pid: int
    address: str
    gpu_ids: tuple[str, ...]
    launched: int
    port: int | None
    highest_step: int
    prepared: int = 0


def rendezvous_of(greetings: Sequence[RankGreeting], attempt: int) -> tuple[str, int] | None:
    """Return address and port of the attempt's rendezvous, if all of a gang's actors are prepared for it."""
    first = greetings[0]
    if first.port is None or any(greeting.prepared != attempt for greeting in greetings):
        return None
    return first.address, first.port


class RankService:
    """One rank of a gang, as its actor serves it. Every method is idempotent; calls that name an older attempt are refused.

    ``attempt`` is the one that the actor is created for; it needs no ``prepare``. ``leased``: its node can be cut
    off from the cluster.
    """

    def __init__(self, *, job_id: str, rank: int, node_dir: Path, attempt: int, leased: bool) -> None:
        self._made_for = attempt
        self._leased = leased
        self._rank = rank
        self._supervisor = RankSupervisor(
            job_id=job_id, rank=rank, node_dir=node_dir, start_fork_server=_start_fork_server
        )
        self._lease: asyncio.Task[None] | None = None

    async def hello(self) -> RankGreeting:
        """Return the greeting as soon as the actor exists."""
        import ray

        if self._leased and self._lease is None:
            self._lease = asyncio.create_task(self._keep_lease())
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        if self._supervisor.attempt == 0:
            await self._supervisor.prepare(self._made_for, address if self._rank == 0 else None)
        return RankGreeting(
            node_id=context.get_node_id(),
            pid=os.getpid(),
            address=address,
            gpu_ids=tuple(str(i) for i in context.get_accelerator_ids().get("GPU", [])),
            launched=self._supervisor.launched,
            port=self._supervisor.port,
            highest_step=self._supervisor.highest_step,
            prepared=self._supervisor.attempt,
        )

    async def prepare(self, attempt: int, serve_on: str | None) -> int | None:
        """Prepare for an attempt; return the rendezvous port, if this rank serves it."""
        return await self._supervisor.prepare(attempt, serve_on)

    async def launch(self, plan: RankPlan) -> None:
        """Start the rank's process, once per attempt. This actor writes the job's checkpoints, so it takes the job's umask."""
        if plan.umask is not None:
            os.umask(plan.umask)
        await self._supervisor.launch(inside(plan, os.environ, sys.executable))

    async def poll(self, attempt: int, cursor: PollCursor, seconds: float) -> PollReply:
        """Return events after the cursor; wait for one for at most ``seconds``."""
        return await self._supervisor.feed.poll(attempt, cursor, seconds)

    async def stop(self, attempt: int, grace_seconds: float) -> None:
        """Send SIGTERM now, SIGKILL after the grace."""
        await self._supervisor.stop(attempt, grace_seconds)

    async def kill(self, attempt: int) -> None:
        """Send SIGKILL to the rank's whole tree."""
        await self._supervisor.kill(attempt)

    async def flush(self, seconds: float) -> PersisterStatus | None:
        """Write the newest snapshot to storage."""
        return await self._supervisor.flush(seconds)

    async def trace(self, attempt: int, steps: int, seconds: float) -> bytes:
        """Return a trace of the next ``steps`` steps."""
        return await self._supervisor.inspection.trace(attempt, steps, seconds)

    async def look(self, attempt: int, *, stacks: bool) -> RankLook | None:
        """Inspect the rank's processes; None for another attempt."""
        return await self._supervisor.inspection.look(attempt, stacks=stacks)

    async def note(self, attempt: int, lines: Sequence[str]) -> None:
        """Write lines into the rank's log."""
        self._supervisor.inspection.note(attempt, lines)

    async def open_session(self, attempt: int, request: SessionRequest) -> int:
        """Open a command or a connection beside the rank; return its number."""
        return await self._supervisor.sessions.open(attempt, request)

    async def read_session(self, number: int, seconds: float) -> SessionOutput:
        """Return a session's output; wait for at most ``seconds``."""
        return await self._supervisor.sessions.read(number, seconds)

    async def tell_session(self, number: int, message: SessionMessage) -> None:
        """Send a client's message to a session."""
        await self._supervisor.sessions.send(number, message)

    async def retire(self) -> tuple[str, ...]:
        """Close everything, for good: the job has ended. Return what cannot be closed."""
        return await self._supervisor.retire() + (("a lease",) if self._lease else ())

    async def _keep_lease(self) -> None:
        import ray

        node_id, reached = ray.get_runtime_context().get_node_id(), time.monotonic()
        while True:
            await asyncio.sleep(_LEASE_CHECK_SECONDS)
            try:
                async with asyncio.timeout(_LEASE_CHECK_SECONDS):
                    alive = await asyncio.to_thread(is_alive, node_id)
            except Exception:
                if time.monotonic() - reached > LEASE_SECONDS:
                    _end(self._supervisor)
            else:
                if not alive:
                    _end(self._supervisor)
                reached = time.monotonic()


def _end(supervisor: RankSupervisor) -> NoReturn:
    supervisor.kill_now()  # if only its lifeline closed, a rank that is stopping could continue
    os._exit(1)


async def _start_fork_server(plan: RankPlan) -> None:
    path = Path(plan.fork_socket)
    await asyncio.to_thread(start_fork_server, plan.python, path, path.with_suffix(".log"), PRELOAD)
