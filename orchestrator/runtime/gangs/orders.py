"""Calls all of a gang's actors with a deadline, and ends an actor that does not answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.core.facts.gangs import StoppedUnplaced
from orchestrator.core.facts.notes import ActorEnded
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import GangLostError, as_lost
from orchestrator.runtime.gangs.event_mapping import noted
from orchestrator.runtime.gangs.patience import Patience
from orchestrator.runtime.gangs.reuse.served_actor import handle_of
from orchestrator.runtime.nodes.control_plane import end_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.gangs.gang import Gang
    from orchestrator.runtime.gangs.table import GangTable
    from orchestrator.runtime.ranks.actor import RankGreeting

RPC_SECONDS: Final = 60.0
UNPLACED_SECONDS: Final = 5.0


class Agents(Protocol):
    """The agents of nodes."""

    @property
    def silent(self) -> Container[str]:
        """Return the nodes that do not answer though Ray counts them as alive."""
        ...

    def agent_for(self, node_id: str) -> Any | None:
        """Return the agent that answers for a node."""
        ...


async def ask(calls: Sequence[Any], seconds: float = RPC_SECONDS) -> list[Any]:
    """Return the answers of all ranks. Raises GangLostError when an actor is dead."""
    async with asyncio.timeout(seconds):
        results = await asyncio.gather(*calls, return_exceptions=True)
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            lost = as_lost(rank, result)
            if lost is not None:
                raise lost from result
            raise result
    return list(results)


class Orders:
    """Calls rank actors. ``post`` takes events for the record."""

    def __init__(
        self,
        ray: RayConnection,
        nodes: Agents,
        table: GangTable,
        *,
        post: Callable[[Sequence[Event]], None],
        log: FilteringBoundLogger,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._ray = ray
        self._nodes = nodes
        self._table = table
        self._post = post
        self._log = log

    async def hello(self, job: Job, gang: Gang) -> list[RankGreeting]:
        """Return the greetings of all actors."""
        limit = job.spec.health.startup_timeout.total_seconds()
        calls = [a.hello.remote() for a in gang.actors]
        # Existing actors answer at once; new ones may first have to be installed.
        greetings: list[RankGreeting] = await (self.give(job, calls) if job.seats else ask(calls, seconds=limit))
        return greetings

    async def attach_placed(self, job: Job) -> Gang:
        """Attach the gang of a job that must end; create none. Raises GangLostError, also after UNPLACED_SECONDS."""
        gang = await self._table.attach(job, create=False)
        if not gang.greetings and not job.seats:
            try:
                gang.greetings = await ask([a.hello.remote() for a in gang.actors], seconds=UNPLACED_SECONDS)
            except TimeoutError as error:
                raise GangLostError(StoppedUnplaced()) from error
        return gang

    async def give(self, job: Job, calls: Sequence[Any]) -> list[Any]:
        """Send an order to all ranks' actors; an actor that does not answer is ended, and its rank with it.

        Raises TimeoutError then: the next try finds the actor dead and the gang lost.
        """
        answered: set[int] = set()

        async def answer(rank: int, call: Any) -> Any:
            try:
                found = await call
            except Exception:
                answered.add(rank)
                raise
            answered.add(rank)
            return found

        try:
            return await ask(
                [answer(rank, call) for rank, call in enumerate(calls)], seconds=self._patience.order_seconds
            )
        except TimeoutError:
            for rank in set(range(len(calls))) - answered:
                await self.end_actor(job, rank)
            raise

    async def end_actor(self, job: Job, rank: int) -> None:
        """Have Ray kill an actor that does not answer, even a stopped one. Ray decides about a node that does not answer."""
        place, gang = self._place_of(job, rank), self._table.current(job)
        if place is None or place[0] in self._nodes.silent or gang is None:
            return
        try:
            await self._ray.call(end_worker, handle_of(gang.actors[rank]), restart=False)
        except Exception as error:  # the actor or the head has ended: the next try notices
            self._log.warning("gang.actor_not_ended", job=job.id, rank=rank, why=str(error).partition("\n")[0])
            return
        self._log.warning("gang.actor_ended", job=job.id, rank=rank, pid=place[1])
        self._post([noted(job.id, ActorEnded(rank=rank), degraded=True)])

    async def is_stopped(self, job: Job, rank: int) -> bool:
        """Whether the node's agent sees that a rank's actor is stopped; False when the agent does not answer."""
        place = self._place_of(job, rank)
        agent = None if place is None else self._nodes.agent_for(place[0])
        if place is None or agent is None:
            return False
        try:
            return bool(await within(self._patience.order_seconds, agent.is_stopped.remote(place[1])))
        except Exception:  # the agent is dead or out of reach: another is created
            return False

    def _place_of(self, job: Job, rank: int) -> tuple[str, int] | None:
        """Return the node and process number of a rank's actor; None before its first answer."""
        gang = self._table.current(job)
        if gang is not None and rank < len(gang.greetings):
            return gang.greetings[rank].node_id, gang.greetings[rank].pid
        return (job.seats[rank].node_id, job.seats[rank].actor_pid) if rank < len(job.seats) else None
