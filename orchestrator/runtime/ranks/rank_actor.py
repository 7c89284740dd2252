"""The Ray actor of a rank: starts its process through the fork server, ends it, keeps its events, answers the daemon.

It decides nothing: the daemon does. The daemon calls it through ``answer``, with bytes (``runtime/remote.py``). Every event of the process is numbered and can be requested again (``poll``), so a
restarted daemon misses nothing. Every method is idempotent.

Fencing: every call names its attempt; an older one is refused. A process tree holds an advisory lock per job and rank on
its node (through its keeper), so a second tree cannot start before the first has ended.

The lease: an actor that has not reached Ray's control plane for a while, or learns that its node counts as dead, ends
its rank before a replacement may start, so that a node cut off from the cluster never runs a rank twice. The only node of an
embedded head cannot be cut off: its ranks' locks show whether they have ended, and its actors need no lease.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core.diagnosis.health import RankLook
from orchestrator.runtime import remote
from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.nodes.agent import PRELOAD
from orchestrator.runtime.nodes.control_plane import is_alive
from orchestrator.runtime.ranks.exit_evidence import ExitEvidence
from orchestrator.runtime.ranks.exit_record_space import preallocate
from orchestrator.runtime.ranks.launch_spec import RankPlan, inside
from orchestrator.runtime.ranks.logs import log_path
from orchestrator.runtime.ranks.output import RankOutput
from orchestrator.runtime.ranks.process_inspector import look_at
from orchestrator.runtime.ranks.progress import PROGRESS_SECONDS, RankProgress, take_trace
from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
from orchestrator.runtime.ranks.rank_events import (
    LEASE_SECONDS,
    AttemptFence,
    EventLog,
    PollCursor,
    PollReply,
    RankGreeting,
    StaleAttemptError,
    masked_look,
)
from orchestrator.runtime.ranks.rank_process import ExitReporter, RankProcess, RankStarter, Rendezvous
from orchestrator.runtime.ranks.session_messages import (
    SessionMessage,
    SessionOutput,
    SessionRefusedError,
    SessionRequest,
)
from orchestrator.runtime.ranks.sessions import RankSessions, with_terminal
from orchestrator.runtime.spawn.client import start_fork_server
from orchestrator.runtime.spawn.rank_locks import rank_lock_path
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


FAILURES: Final = (StaleAttemptError, SessionRefusedError, TraceRefusedError)
"""The errors of its methods that the daemon handles."""
_LEASE_CHECK_SECONDS: Final = 2.0


async def _start_fork_server(plan: RankPlan) -> None:
    path = Path(plan.fork_socket)
    await asyncio.to_thread(start_fork_server, plan.python, path, path.with_suffix(".log"), PRELOAD)


class RankActor:
    """The actor of one rank of one gang, from the gang's placement to its release. It also works without Ray.

    ``attempt`` is the one that the actor is created for; it needs no ``prepare``. ``leased``: its node can be cut off
    from the cluster. ``start_fork_server`` is called when no fork server answers on the plan's
    socket.
    """

    def __init__(
        self,
        *,
        job_id: str,
        rank: int,
        node_dir: str,
        attempt: int,
        leased: bool,
        start_fork_server: Callable[[RankPlan], Awaitable[None]] = _start_fork_server,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._rank, self._node_dir = rank, Path(node_dir)
        self._created_for = attempt
        self._leased = leased
        self._lease: asyncio.Task[None] | None = None
        self._start_fork_server = start_fork_server
        self._serial = asyncio.Lock()
        self._fence = AttemptFence(job_id, rank)
        self._log = EventLog()
        self._rendezvous = Rendezvous()
        self._progress = RankProgress(seconds=progress_seconds)
        self._checkpoints = RankCheckpoints(self._progress.newest_step)
        self._evidence = ExitEvidence()
        self._process: RankProcess | None = None
        self._sessions = RankSessions(self._fence, self._log)
        self._terminal_looked_at = 0.0

    async def answer(self, method: str, message: bytes) -> bytes:
        """Call a method for the daemon."""
        return await remote.answer(self, method, message, FAILURES)

    # -- an attempt

    @remote.called
    async def hello(self) -> RankGreeting:
        """Return the greeting as soon as the actor exists."""
        import ray

        linux.adjust_oom_score(0)  # Ray's own setting, on a cluster that is not orch's, would make it the first victim
        if self._leased and self._lease is None:
            self._lease = asyncio.create_task(self._keep_lease())
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        if self._fence.attempt == 0:
            await self.prepare(self._created_for, address if self._rank == 0 else None)
        return RankGreeting(
            node_id=context.get_node_id(),
            pid=os.getpid(),
            address=address,
            gpu_ids=tuple(str(i) for i in context.get_accelerator_ids().get("GPU", [])),
            launched=self._fence.launched,
            port=self._rendezvous.port,
            highest_step=self._progress.highest_step,
            prepared=self._fence.attempt,
        )

    @remote.called
    async def prepare(self, attempt: int, serve_on: str | None) -> int | None:
        """Prepare for ``attempt``: kill what is left of an older one; none of its processes is left on return.

        With ``serve_on``, an address of this node, the attempt's rendezvous socket is bound there; returns its port.
        """
        async with self._serial:
            self._fence.refuse_older(attempt)
            if attempt > self._fence.attempt:
                await self._begin(attempt)
                if serve_on is not None:
                    self._rendezvous.bind(serve_on)
            return self._rendezvous.port

    async def _begin(self, attempt: int) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None
        self._rendezvous.close()
        self._fence.attempt = attempt
        self._log.begin()
        self._progress.close()

    @remote.called
    async def launch(self, plan: RankPlan) -> None:
        """Start the rank's process, once per attempt; do nothing for a repeated call or a cancelled attempt."""
        plan = inside(plan, os.environ, sys.executable)
        async with self._serial:
            self._fence.refuse_older(plan.attempt)
            if self._fence.launched < plan.attempt:
                await self._launch(plan)
            if self._process is not None:
                await self._rendezvous.serve(self._starter(plan))

    async def _launch(self, plan: RankPlan) -> None:
        if plan.umask is not None:
            os.umask(plan.umask)  # this actor writes the job's checkpoints
        self._progress.open(plan.page)
        self._checkpoints.begin(plan)
        preallocate(Path(plan.exit_record))
        masker = self._log.masker = Masker(plan.secrets)
        output = self._progress.output = RankOutput(
            log_path(Path(plan.log_dir), plan.attempt, plan.rank),
            masker=masker,
            limits=plan.log_limits,
            progress_pattern=plan.progress_pattern,
            previous_step=plan.previous_step,
        )
        self._evidence.begin()
        plan, terminal = with_terminal(plan, output)
        starter = self._starter(plan)
        self._sessions.begin(plan, starter, terminal)
        spawned = await starter.rank(output, terminal)
        if spawned is None:
            return
        self._fence.launched = plan.attempt
        self._process = RankProcess(
            spawned.lifeline,
            spawned.keeper_pid,
            rank_lock_path(self._node_dir, plan.job_id, plan.rank),
            log=self._log,
            output=output,
            evidence=self._evidence,
            exits=ExitReporter(self._log, output, self._evidence, self._checkpoints, plan),
            before_gone=self._sessions.rank_ended,
        )

    def _starter(self, plan: RankPlan) -> RankStarter:
        return RankStarter(
            plan,
            self._node_dir,
            start_fork_server=self._start_fork_server,
            is_called_off=lambda: self._fence.called_off >= plan.attempt,
        )

    @remote.called
    async def stop(self, attempt: int, grace_seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL to the whole tree after the grace; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._process is not None:
            self._process.stop(max(grace_seconds, 0.0))
            if self._sessions.interactive:
                self._process.hang_up()
        self._progress.request_stop()  # last: the keeper must know of the order before the rank can end because of it

    @remote.called
    async def kill(self, attempt: int) -> None:
        """Send SIGKILL to the whole tree now; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._process is not None:
            self._process.kill()

    async def _call_off(self, attempt: int) -> None:
        """Prevent ``attempt`` from starting; if it was not launched, it counts as ended."""
        self._fence.refuse_older(attempt)
        self._fence.called_off = max(self._fence.called_off, attempt)
        async with self._serial:  # a launch in progress either starts the process or fails first
            self._fence.refuse_older(attempt)
            if attempt > self._fence.attempt:
                await self._begin(attempt)
            if self._fence.launched < attempt:
                self._fence.launched = attempt
                self._log.add(kind="gone", at=time.time())

    async def _keep_lease(self) -> None:
        import ray

        node_id, reached = ray.get_runtime_context().get_node_id(), time.monotonic()
        while True:
            await asyncio.sleep(_LEASE_CHECK_SECONDS)
            try:
                async with asyncio.timeout(_LEASE_CHECK_SECONDS):
                    alive = await asyncio.to_thread(is_alive, node_id)
            except Exception:
                alive = time.monotonic() - reached <= LEASE_SECONDS
            else:
                reached = time.monotonic()
            if not alive:
                if self._process is not None:
                    self._process.kill()  # if only its lifeline closed, a rank that is stopping could continue
                os._exit(1)

    # -- reports

    @remote.called
    async def poll(self, attempt: int, cursor: PollCursor, seconds: float) -> PollReply:
        """Return what is newer than ``cursor``; wait for something for at most ``seconds``. Progress is read once a second."""
        deadline = time.monotonic() + seconds
        while True:
            self._fence.refuse_older(attempt)
            # For an attempt that is not prepared there are no facts: those here belong to the previous attempt.
            reply = PollReply(cursor=cursor) if attempt > self._fence.attempt else self._reply(cursor)
            left = deadline - time.monotonic()
            if reply.cursor != cursor or left <= 0:
                return replace(reply, sent_at=time.time())
            await self._log.wait(min(left, self._progress.seconds))

    def _reply(self, cursor: PollCursor) -> PollReply:
        events = self._log.after(cursor.event)
        self._read_news(final=bool(events))
        progress, checkpoints, processes = self._progress, self._checkpoints, self._evidence.processes
        terminal = self._sessions.terminal
        sampled = processes.newest if processes.number > cursor.processes else None
        return PollReply(
            cursor=PollCursor(
                event=events[-1].number if events else cursor.event,
                progress=max(progress.number, cursor.progress),
                persisted=max(checkpoints.number, cursor.persisted),
                processes=cursor.processes if sampled is None else processes.number,
                terminal=max(0 if terminal is None else terminal.number, cursor.terminal),
            ),
            events=events,
            progress=progress.newest if progress.number > cursor.progress else None,
            persisted=checkpoints.newest if checkpoints.number > cursor.persisted else None,
            log_lost=progress.output.lost if progress.output else None,
            processes=sampled,
            storage=None if sampled is None else checkpoints.storage(self._log.masker),
            terminal=terminal.newest if terminal is not None and terminal.number > cursor.terminal else None,
        )

    def _read_news(self, *, final: bool) -> None:
        """Read what is new. ``final``, after an event: read progress early, and do not mark the kernel's evidence."""
        self._checkpoints.look(self._log.masker)
        newest = self._progress.newest
        if self._log.running:
            self._evidence.processes.look(self._log.pid, newest.writer_pid if newest else None)
            self._look_at_terminal()
        if self._progress.look(self._log.masker, final=final) and not final:
            self._evidence.mark()

    def _look_at_terminal(self) -> None:
        terminal, now = self._sessions.terminal, time.monotonic()
        if terminal is not None and now - self._terminal_looked_at >= self._progress.seconds * 0.9:
            self._terminal_looked_at = now
            sampled = self._evidence.processes.newest
            terminal.look(None if sampled is None else sampled.cpu_seconds, time.time())

    # -- requests

    @remote.called
    async def flush(self, seconds: float) -> PersisterStatus | None:
        """Write the newest snapshot to storage; return the result, or None where there are no snapshots."""
        return await self._checkpoints.flush(seconds, self._log.masker)

    @remote.called
    async def trace(self, attempt: int, steps: int, seconds: float) -> bytes:
        """Return a torch.profiler trace of the next ``steps`` steps, gzipped JSON. Raises TraceRefusedError."""
        self._fence.refuse_older(attempt)
        page = self._progress.page

        def over() -> bool:
            return page is None or page is not self._progress.page or self._log.ended

        if page is None or attempt != self._fence.attempt or over():
            raise TraceRefusedError(f"rank {self._rank} does not run: ask again when it does")
        return await take_trace(page, self._rank, steps, seconds, over)

    @remote.called
    async def look(self, attempt: int, *, stacks: bool) -> RankLook | None:
        """Inspect the rank's processes; None when it has none, or belongs to another attempt."""
        if attempt != self._fence.attempt or not self._log.running:
            return None
        training_pid, output = self._progress.writer_pid, self._progress.output
        look = await asyncio.to_thread(look_at, self._rank, self._log.pid, training_pid=training_pid, stacks=stacks)
        return masked_look(replace(look, printed=output.lines if output else 0), self._log.masker)

    @remote.called
    async def note(self, attempt: int, lines: Sequence[str]) -> None:
        """Write ``lines`` from orch into the rank's log."""
        if attempt == self._fence.attempt and self._progress.output is not None:
            self._progress.output.note(lines)

    @remote.called
    async def open_session(self, attempt: int, request: SessionRequest) -> int:
        """Open a command or a connection beside the rank; return its number. Raises SessionRefusedError."""
        return await self._sessions.open(attempt, request)

    @remote.called
    async def read_session(self, number: int, seconds: float) -> SessionOutput:
        """Return a session's output; wait for at most ``seconds``."""
        return await self._sessions.read(number, seconds)

    @remote.called
    async def send_to_session(self, number: int, message: SessionMessage) -> None:
        """Send a client's message to a session."""
        await self._sessions.send(number, message)
