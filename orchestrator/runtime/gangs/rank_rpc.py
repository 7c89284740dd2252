"""Requests to the ranks of a running gang: traces, process inspections, lines for their logs, sessions beside them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import as_lost
from orchestrator.runtime.gangs.orders import RPC_SECONDS
from orchestrator.runtime.ranks.sessions.messages import Input, Leave, SessionRefusedError
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.table import GangTable
    from orchestrator.runtime.ranks.sessions.messages import SessionMessage, SessionOutput, SessionRequest

LOOK_SECONDS: Final = 15.0
"""A rank counts as out of reach when its actor takes longer to answer."""

SESSION_OPEN_SECONDS: Final = 60.0
"""Includes the start of a missing fork server."""


class GangCalls:
    """Calls the rank actors of the gangs in ``table``."""

    def __init__(self, table: GangTable) -> None:
        self._table = table

    async def trace(self, job: Job, rank: int, steps: int, seconds: float) -> bytes:
        """Return a torch.profiler trace of a rank's next ``steps`` steps. Raises TraceRefusedError, with what to do."""
        actors = self._table.actors_up(job)
        if not actors:
            raise TraceRefusedError(f"the ranks of {job.id} are not up: ask again when it runs")
        call = actors[rank].trace.remote(job.attempt_number, steps, seconds)
        try:
            data: bytes = await within(seconds + RPC_SECONDS, call)
        except TraceRefusedError as error:
            raise TraceRefusedError(str(getattr(error, "cause", error))) from None  # without the actor's traceback
        except Exception as error:
            what = "is out of reach" if as_lost(rank, error) is None else "is gone"
            raise TraceRefusedError(f"rank {rank} of {job.id} {what}; see `orch status`") from error
        return data

    async def look(self, job: Job, *, stacks: bool, ranks: Sequence[int] | None = None) -> dict[int, RankLook]:
        """Inspect each of the job's ranks, or ``ranks``; ranks that have ended or are out of reach are left out."""
        actors = self._table.actors_up(job)
        wanted = [rank for rank in (range(len(actors)) if ranks is None else ranks) if rank < len(actors)]
        calls = [actors[rank].look.remote(job.attempt_number, stacks=stacks) for rank in wanted]
        found = await self._answers(calls)
        return {rank: look for rank, look in zip(wanted, found, strict=True) if look is not None}

    def processes(self, job: Job) -> Mapping[int, ProcessSeen]:
        """Return the last known state of the job's rank processes, by rank, without a call."""
        return self._table.processes(job)

    def storage(self, job: Job) -> Mapping[int, StorageSeen]:
        """Return the last known state of the ranks' checkpoint storage, by rank, without a call."""
        return self._table.storage(job)

    def terminals(self, job: Job) -> Mapping[int, TerminalSeen]:
        """Return the last known state of the ranks' terminals, by rank, without a call."""
        return self._table.terminals(job)

    async def note(self, job: Job, lines: Mapping[int, Sequence[str]]) -> None:
        """Write ``lines`` into the logs of their ranks; return when that is done or has failed."""
        actors = self._table.actors_up(job)
        await self._answers(
            [actors[r].note.remote(job.attempt_number, tuple(texts)) for r, texts in lines.items() if r < len(actors)]
        )

    async def open_session(self, job: Job, rank: int, request: SessionRequest) -> GangSession:
        """Open a command or a connection beside a rank. Raises SessionRefusedError."""
        actors = self._table.actors_up(job)
        if rank >= len(actors):
            raise SessionRefusedError(f"the ranks of {job.id} are not up", "ask again when it runs")
        session = GangSession(actors[rank], f"rank {rank} of {job.id}")
        await session.open(job.attempt_number, request)
        return session

    async def _answers(self, calls: Sequence[object]) -> list[RankLook | None]:
        """Return the answers that arrived in time; None for a call that failed."""

        async def answer(call: object) -> RankLook | None:
            try:
                found: RankLook | None = await within(LOOK_SECONDS, call)  # type: ignore[arg-type]  # Ray's reference is awaitable
            except Exception:  # the actor is dead or out of reach, which the relay handles
                return None
            return found

        return await asyncio.gather(*(answer(call) for call in calls))


class GangSession:
    """A session beside the rank of the rank actor ``actor``; ``who`` names the rank in errors."""

    def __init__(self, actor: Any, who: str) -> None:
        self._actor, self._who = actor, who
        self._number = 0

    async def open(self, attempt: int, request: SessionRequest) -> None:
        """Open the session in the actor, once. Raises SessionRefusedError."""
        self._number = await self._ask(SESSION_OPEN_SECONDS, self._actor.open_session, attempt, request)

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for some for at most ``seconds``. Raises SessionRefusedError."""
        output: SessionOutput = await self._ask(seconds + RPC_SECONDS, self._actor.read_session, self._number, seconds)
        return output

    async def send(self, message: SessionMessage) -> None:
        """Send a client's message; return once it is accepted: input only as fast as the command reads it."""
        seconds = None if isinstance(message, Input) else RPC_SECONDS
        await self._ask(seconds, self._actor.tell_session, self._number, message)

    async def close(self) -> None:
        """End the session; an actor out of reach ends it by itself."""
        with contextlib.suppress(SessionRefusedError):
            await self._ask(LOOK_SECONDS, self._actor.tell_session, self._number, Leave())

    async def _ask(self, seconds: float | None, method: Any, *arguments: object) -> Any:
        try:
            call = method.remote(*arguments)
            return await (call if seconds is None else within(seconds, call))
        except SessionRefusedError as error:
            cause = getattr(error, "cause", error)  # without the actor's traceback
            raise SessionRefusedError(*cause.args) from None
        except Exception as error:
            what = "is out of reach" if as_lost(0, error) is None else "is gone"
            raise SessionRefusedError(f"{self._who} {what}", "see `orch status`") from error
