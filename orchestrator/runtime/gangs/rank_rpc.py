"""Calls to the actors of a gang: orders with a deadline, requests of users, and the end of an actor that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import StoppedUnplaced
from orchestrator.core.facts.notes import ActorEnded
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import GangLostError, as_lost
from orchestrator.runtime.nodes.control_plane import end_worker
from orchestrator.runtime.ranks.session_messages import Input, Leave, SessionRefusedError
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.gangs.table import Gang, GangTable
    from orchestrator.runtime.ranks.rank_actor import RankActor
    from orchestrator.runtime.ranks.rank_events import RankGreeting
    from orchestrator.runtime.ranks.session_messages import SessionMessage, SessionOutput, SessionRequest

T = TypeVar("T")

RPC_SECONDS: Final = 60.0
UNPLACED_SECONDS: Final = 5.0

LOOK_SECONDS: Final = 15.0
"""A rank counts as out of reach when its actor takes longer to answer."""

SESSION_OPEN_SECONDS: Final = 60.0
"""Includes the start of a missing fork server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Durations: how long a poll is held, how long a live actor may take to answer, and the pause after a failure."""

    poll_seconds: float = 30.0
    order_seconds: float = 20.0
    retry_seconds: float = 0.5


def noted(job_id: JobId, note: Fact, *, degraded: bool | None = None) -> ev.JobNoted:
    """Create a note about a gang for the user; ``degraded``: one of its ranks is out of reach."""
    return ev.JobNoted(job_id=job_id, at=clock.now(), note=note, degraded=degraded)


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


class GangCalls:
    """Calls the rank actors of the gangs in ``table``. ``post`` takes events for the record."""

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        table: GangTable,
        *,
        post: Callable[[Sequence[ev.Event]], None],
        log: FilteringBoundLogger,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._ray = ray
        self._nodes = nodes
        self._table = table
        self._post = post
        self._log = log

    # -- orders

    async def hello(self, job: Job, gang: Gang) -> list[RankGreeting]:
        """Return the greetings of all actors."""
        limit = job.spec.health.startup_timeout.total_seconds()
        calls = [a.hello() for a in gang.actors]
        # Existing actors answer at once; new ones may first have to be installed.
        greetings: list[RankGreeting] = await (self.order_all(job, calls) if job.seats else ask(calls, seconds=limit))
        return greetings

    async def attach_placed(self, job: Job) -> Gang:
        """Attach the gang of a job that must end; create none. Raises GangLostError, also after UNPLACED_SECONDS."""
        gang = await self._table.attach(job, create=False)
        if not gang.greetings and not job.seats:
            try:
                gang.greetings = await ask([a.hello() for a in gang.actors], seconds=UNPLACED_SECONDS)
            except TimeoutError as error:
                raise GangLostError(StoppedUnplaced()) from error
        return gang

    async def order_all(self, job: Job, calls: Sequence[Any]) -> list[Any]:
        """Send an order to all ranks' actors; an actor that does not answer is ended, and its rank with it.

        Raises TimeoutError then: the next try finds the actor dead and the gang lost.
        """
        answered: set[int] = set()

        async def answer(rank: int, call: Any) -> Any:
            try:
                result = await call
            except Exception:
                answered.add(rank)
                raise
            answered.add(rank)
            return result

        try:
            return await ask(
                [answer(rank, call) for rank, call in enumerate(calls)], seconds=self._timeouts.order_seconds
            )
        except TimeoutError:
            for rank in set(range(len(calls))) - answered:
                await self.end_actor(job, rank)
            raise

    async def end_actor(self, job: Job, rank: int) -> None:
        """Have Ray kill an actor that does not answer, even a stopped one. Ray decides about a node that does not answer."""
        node_id, pid = self._process_of(job, rank)
        gang = self._table.current(job)
        if not pid or node_id in self._nodes.silent or gang is None:
            return
        try:
            await self._ray.call(end_worker, gang.actors[rank], restart=False)
        except Exception as error:  # the actor or the head has ended: the next try notices
            self._log.warning("gang.actor_not_ended", job=job.id, rank=rank, why=str(error).partition("\n")[0])
            return
        self._log.warning("gang.actor_ended", job=job.id, rank=rank, pid=pid)
        self._post([noted(job.id, ActorEnded(rank=rank), degraded=True)])

    def _process_of(self, job: Job, rank: int) -> tuple[str, int]:
        """Return the node and process number of a rank's actor; 0 before its first answer."""
        gang = self._table.current(job)
        if gang is not None and rank < len(gang.greetings):
            return gang.greetings[rank].node_id, gang.greetings[rank].pid
        return (job.seats[rank].node_id, job.seats[rank].actor_pid) if rank < len(job.seats) else ("", 0)

    # -- the last known state of the current attempt's ranks, by rank, without a call

    def processes(self, job: Job) -> Mapping[int, ProcessSeen]:
        """Return the state of the ranks' processes."""
        gang = self._table.watched(job)
        return {} if gang is None else dict(gang.processes)

    def storage(self, job: Job) -> Mapping[int, StorageSeen]:
        """Return the state of the ranks' checkpoint storage."""
        gang = self._table.watched(job)
        return {} if gang is None else dict(gang.storage)

    def terminals(self, job: Job) -> Mapping[int, TerminalSeen]:
        """Return the state of the ranks' terminals."""
        gang = self._table.watched(job)
        return {} if gang is None else dict(gang.terminals)

    # -- requests

    async def trace(self, job: Job, rank: int, steps: int, seconds: float) -> bytes:
        """Return a torch.profiler trace of a rank's next ``steps`` steps. Raises TraceRefusedError, with what to do."""
        actors = self._actors(job)
        if not actors:
            raise TraceRefusedError(f"the ranks of {job.id} are not up: ask again when it runs")
        try:
            return await within(seconds + RPC_SECONDS, actors[rank].trace(job.attempt_number, steps, seconds))
        except TraceRefusedError:
            raise
        except Exception as error:
            what = "is out of reach" if as_lost(rank, error) is None else "is gone"
            raise TraceRefusedError(f"rank {rank} of {job.id} {what}; see `orch status`") from error

    async def look(self, job: Job, *, stacks: bool, ranks: Sequence[int] | None = None) -> dict[int, RankLook]:
        """Inspect each of the job's ranks, or ``ranks``; ranks that have ended or are out of reach are left out."""
        actors = self._actors(job)
        wanted = [rank for rank in (range(len(actors)) if ranks is None else ranks) if rank < len(actors)]
        answers = await _answers([actors[rank].look(job.attempt_number, stacks=stacks) for rank in wanted])
        return {rank: look for rank, look in zip(wanted, answers, strict=True) if look is not None}

    async def note(self, job: Job, lines: Mapping[int, Sequence[str]]) -> None:
        """Write ``lines`` into the logs of their ranks; return when that is done or has failed."""
        actors = self._actors(job)
        await _answers(
            [actors[r].note(job.attempt_number, tuple(texts)) for r, texts in lines.items() if r < len(actors)]
        )

    async def open_session(self, job: Job, rank: int, request: SessionRequest) -> GangSession:
        """Open a command or a connection beside a rank. Raises SessionRefusedError."""
        actors = self._actors(job)
        if rank >= len(actors):
            raise SessionRefusedError(f"the ranks of {job.id} are not up", "ask again when it runs")
        session = GangSession(actors[rank], f"rank {rank} of {job.id}")
        await session.open(job.attempt_number, request)
        return session

    def _actors(self, job: Job) -> Sequence[RankActor]:
        """Return the actors of the job's current attempt, by rank; none while its ranks are not up."""
        gang = self._table.watched(job)
        return () if gang is None else gang.actors


async def _answers(calls: Sequence[Any]) -> list[Any]:
    """Return the answers that arrive in time; None for a call that fails: its actor is dead or out of reach, which the relay handles."""
    answers = await asyncio.gather(*(within(LOOK_SECONDS, call) for call in calls), return_exceptions=True)
    return [None if isinstance(answer, BaseException) else answer for answer in answers]


class GangSession:
    """A session beside the rank of the rank actor ``actor``; ``title`` names the rank in errors."""

    def __init__(self, actor: RankActor, title: str) -> None:
        self._actor, self._title = actor, title
        self._number = 0

    async def open(self, attempt: int, request: SessionRequest) -> None:
        """Open the session in the actor, once. Raises SessionRefusedError."""
        self._number = await self._ask(SESSION_OPEN_SECONDS, self._actor.open_session(attempt, request))

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for some for at most ``seconds``. Raises SessionRefusedError."""
        return await self._ask(seconds + RPC_SECONDS, self._actor.read_session(self._number, seconds))

    async def send(self, message: SessionMessage) -> None:
        """Send a client's message; return once it is accepted: input only as fast as the command reads it."""
        seconds = None if isinstance(message, Input) else RPC_SECONDS
        await self._ask(seconds, self._actor.send_to_session(self._number, message))

    async def close(self) -> None:
        """End the session; an actor out of reach ends it by itself."""
        with contextlib.suppress(SessionRefusedError):
            await self._ask(LOOK_SECONDS, self._actor.send_to_session(self._number, Leave()))

    async def _ask(self, seconds: float | None, call: Awaitable[T]) -> T:
        try:
            return await (call if seconds is None else within(seconds, call))
        except SessionRefusedError:
            raise
        except Exception as error:
            what = "is out of reach" if as_lost(0, error) is None else "is gone"
            raise SessionRefusedError(f"{self._title} {what}", "see `orch status`") from error
