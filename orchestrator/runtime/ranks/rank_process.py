"""One process of a rank, from its start through the node's fork server to the end of its tree: its lifeline, its keeper, their messages, its exit.

A process tree holds an advisory lock per job and rank on its node (through its keeper), so a second tree cannot start
before the first has ended. Where the keeper was killed, its tree is ended first, and its memory is free
again before the next process starts. A missing fork server is started; a cancelled attempt is not. An attempt's rendezvous store starts in the same way.

When the actor's own process dies, the lifeline closes and the keeper kills everything below it. When a keeper is killed, ``RankProcess`` ends
its tree (``spawn/rank_locks.py``). Must not know attempts other than its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.events import Exit
from orchestrator.private_files import make_private
from orchestrator.runtime.deadline import process_ended
from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.ranks.exit_evidence import (
    StopFacts,
    memory_use,
    order_of,
    port_evidence,
    stop_facts,
    was_killed,
)
from orchestrator.runtime.ranks.output import match_policies
from orchestrator.runtime.spawn.client import (
    ErrorRaised,
    Exited,
    ForkServerClient,
    ForkServerMissingError,
    Gone,
    KeeperLost,
    Started,
)
from orchestrator.runtime.spawn.rank_locks import (
    KEEPER_SECONDS,
    end_locked_remains,
    end_remains,
    end_tree,
    is_current,
    open_lock,
    rank_lock_path,
    try_lock,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.ranks.exit_evidence import ExitEvidence
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output import RankOutput
    from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
    from orchestrator.runtime.ranks.rank_events import EventLog
    from orchestrator.runtime.ranks.terminal import RankTerminal
    from orchestrator.runtime.spawn.client import Event, Lifeline, Spawned

_BACKLOG: Final = 2048


def bind_rendezvous(address: str) -> socket.socket:
    """Bind a listening socket to a free port of ``address``; the kernel chooses the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Rendezvous:
    """The socket of the current attempt, and the lifeline of its server process. Only rank 0 has them."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: Lifeline | None = None

    @property
    def port(self) -> int | None:
        """The port, if this rank serves one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def bind(self, address: str) -> None:
        """Bind the attempt's socket."""
        self._listener = bind_rendezvous(address)

    async def serve(self, starter: RankStarter) -> None:
        """Start the process that serves the socket, once. Ranks that connect before it wait in the socket's backlog."""
        if self._listener is not None and self._store is None:
            store = await starter.store(self._listener)
            self._store = None if store is None else store.lifeline

    def close(self) -> None:
        """End the process that serves the socket, and close the socket."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_LOCK_SECONDS: Final = 60.0
_ROUND_SECONDS: Final = 5.0  # between two checks whether the attempt was cancelled
_FORK_SERVER_SECONDS: Final = 30.0
_PIPE_BYTES: Final = 1024 * 1024


class RankBusyError(Exception):
    """Processes of an earlier attempt of this rank still exist after the deadline; see the node's process list."""


class RankStarter:
    """Starts the processes of one attempt. Each start returns the new process, or None once the attempt was cancelled."""

    def __init__(
        self,
        plan: RankPlan,
        node_dir: Path,
        *,
        start_fork_server: Callable[[RankPlan], Awaitable[None]],
        is_called_off: Callable[[], bool],
    ) -> None:
        self._plan, self._node_dir = plan, node_dir
        self._start_fork_server, self._is_called_off = start_fork_server, is_called_off
        self._client = ForkServerClient(Path(plan.fork_socket))

    async def rank(self, output: RankOutput, terminal: RankTerminal | None = None) -> Spawned | None:
        """Start the rank's process, which writes to ``output``. Raises RankBusyError and ForkServerError.

        An interactive job's rank runs on ``terminal``.
        """
        return await self._with_fork_server(lambda: self._spawn(output, terminal))

    async def store(self, listener: socket.socket) -> Spawned | None:
        """Start the rendezvous store on ``listener``. Raises ForkServerError."""
        return await self._with_fork_server(lambda: self._spawn_store(listener))

    async def command(self, request: SpawnRequest, stdin: int, stdout: int, stderr: int) -> Spawned | None:
        """Start a command beside the rank, with these descriptors. Raises ForkServerError."""
        return await self._with_fork_server(
            lambda: self._client.spawn(request, stdin=stdin, stdout=stdout, stderr=stderr)
        )

    async def _with_fork_server(self, call: Callable[[], Awaitable[Spawned | None]]) -> Spawned | None:
        deadline = time.monotonic() + _FORK_SERVER_SECONDS
        while not self._is_called_off():
            try:
                return await call()
            except ForkServerMissingError:
                if time.monotonic() > deadline:
                    raise
                await self._start_fork_server(self._plan)
        return None

    async def _spawn_store(self, listener: socket.socket) -> Spawned:
        env = {name: self._plan.env[name] for name in ("PATH", "HOME") if name in self._plan.env}
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return await self._client.spawn(
                SpawnRequest(mode="store", cwd="/", env=env, threads=1),
                stdout=null,
                stderr=null,
                listen=listener.fileno(),
            )
        finally:
            os.close(null)

    async def _spawn(self, output: RankOutput, terminal: RankTerminal | None) -> Spawned | None:
        # A lock for each request: when its reply is lost, the process may exist, and its keeper holds the lock until no
        # process of the tree is left.
        lock = await self._lock()
        if lock is None:
            return None
        try:
            if terminal is not None and terminal.interactive:
                return await self._spawn_on(terminal, lock, output)
            return await self._spawn_under(lock, output)
        finally:
            os.close(lock)  # the keeper holds its own copy

    async def _spawn_under(self, lock: int, output: RankOutput) -> Spawned:
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for _, write_end in pipes:
                os.set_blocking(write_end, True)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            spawned = await self._client.spawn(self._plan, stdout=pipes[0][1], stderr=pipes[1][1], lease=lock)
        except BaseException:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        output.listen(*(read_end for read_end, _ in pipes))
        return spawned

    async def _spawn_on(self, terminal: RankTerminal, lock: int, output: RankOutput) -> Spawned:
        theirs = terminal.theirs
        spawned = await self._client.spawn(self._plan, stdin=theirs, stdout=theirs, stderr=theirs, lease=lock)
        terminal.started()
        reader = terminal.reader()
        os.set_blocking(reader, False)
        output.listen(reader)
        return spawned

    async def _lock(self) -> int | None:
        """Take the node's lock for this job and rank: held by the keeper of a live tree, so at most one tree exists.

        None when the attempt was cancelled. Raises RankBusyError.
        """
        path = rank_lock_path(self._node_dir, self._plan.job_id, self._plan.rank)
        make_private(path.parent)
        handle = open_lock(path)
        taken = False
        try:
            taken = await self._take(handle, path)
        finally:
            if not taken:
                os.close(handle)
        return handle if taken else None

    async def _take(self, handle: int, path: Path) -> bool:
        """Whether the lock is held on ``handle`` and the previous tree has ended; False when the attempt was cancelled."""
        began, delay = time.monotonic(), 0.001
        while not self._is_called_off():
            if try_lock(handle, path) and await self._is_clear(handle, path):
                return True
            waited = time.monotonic() - began
            if waited > _LOCK_SECONDS:
                raise RankBusyError(f"processes of an earlier attempt are still there after {waited:.0f} s; see {path}")
            fcntl.flock(handle, fcntl.LOCK_UN)  # another process may then end the rest
            if not is_current(handle, path):
                raise RankBusyError(
                    f"{path} was removed while an attempt waited for it; the next try creates a new one"
                )
            if waited > KEEPER_SECONDS:
                await asyncio.to_thread(end_tree, path, _ROUND_SECONDS, limit=0.0)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.1)
        return False

    async def _is_clear(self, handle: int, path: Path) -> bool:
        """Return whether the previous tree has ended; end what is left of it."""
        if holder.is_clear(handle):
            return True
        return await asyncio.to_thread(end_locked_remains, handle, path, _ROUND_SECONDS)


_REMAINS_SECONDS: Final = 10.0
_REMAINS_AGAIN_SECONDS: Final = 1.0
_MAX_FAULTS: Final = 100


class ExitReporter:
    """Reports the exit of one process. ``error`` is the exception that its script raised, if it was reported."""

    def __init__(
        self,
        log: EventLog,
        output: RankOutput,
        evidence: ExitEvidence,
        checkpoints: RankCheckpoints,
        plan: RankPlan,
    ) -> None:
        self._plan = plan
        self._log = log
        self._output = output
        self._evidence = evidence
        self._checkpoints = checkpoints
        self.error: ErrorRaised | None = None

    async def report(self, event: Exited) -> None:
        """Report the exit."""
        await self._checkpoints.ended(well=event.exit_code == 0)
        try:
            self._output.drain()
        except Exception as error:
            report_fault("the rank's last output was left out", error)
        await self._add(event)

    async def _add(self, event: Exited) -> None:
        failed = event.exit_code != 0
        error = self.error if failed else None
        tail = self._output.tail if failed else ()
        text = "\n".join((*tail, f"{error.type}: {error.message}" if error else ""))
        policy: str = ""
        note: Fact | None = None
        evidence: tuple[Fact, ...] = ()
        try:
            policy, note = await match_policies(self._plan.log_policies, text) if failed else ("", None)
            evidence = self._evidence.facts() if failed else ()
        except Exception as fault:
            report_fault("evidence of the exit's cause was left out", fault)
        stop = await self._stop_facts(event)
        use = memory_use(event.memory, machine=self._evidence.killed_by_kernel(event, evidence)) if failed else None
        end = Exit(
            rank=self._plan.rank,
            at=event.at,
            exit_code=event.exit_code,
            signal=event.signal,
            error_type=error.type if error else "",
            error_message=error.message if error else "",
            error_at=error.at if error else None,
            log_tail=tail,
            evidence=evidence,
            policy=policy,
            policy_note=note,
            missing_file=error.missing_file if error else "",
            stop_seen_at=stop.stop_seen_at,
            stop_scope=stop.stop_scope,
            last_step=stop.last_step,
            total_steps=stop.total_steps,
            memory=use,
            ordered=order_of(event.cause),
        )
        self._log.add(kind="exited", at=event.at, exit=await self._with_port(end))

    async def _with_port(self, end: Exit) -> Exit:
        """Add evidence of what holds the port that the rank could not bind."""
        try:
            taken = await asyncio.to_thread(port_evidence, end, self._plan.env)
        except Exception as fault:
            report_fault("the process that holds the rank's port was left out", fault)
            return end
        return end if taken is None else replace(end, evidence=(*end.evidence, taken))

    async def _stop_facts(self, event: Exited) -> StopFacts:
        """Return whether the rank was asked to stop, and its last steps: those in its output where it reported none."""
        facts = partial(stop_facts, ended_at=event.at, killed=was_killed(event))
        stop = facts(event.ending)
        if event.cause is not None or stop.stop_seen_at is None or stop.last_step is not None:
            return stop
        try:
            return facts(event.ending, await self._output.last_progress())
        except Exception as error:
            report_fault("the step of the rank's last output was left out", error)
            return stop


def report_fault(what: str, error: Exception) -> None:
    """Log the fault in the actor's own log, with its traceback."""
    sys.stderr.write(f"{what}: {''.join(traceback.format_exception(error))}\n")


class RankProcess:
    """One process. ``lock`` is the path of the rank's lock, by which a lost keeper's tree is found.

    ``before_gone`` ends what was started beside the rank, before the rank counts as ended.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        keeper_pid: int,
        lock: Path,
        *,
        log: EventLog,
        output: RankOutput,
        evidence: ExitEvidence,
        exits: ExitReporter,
        before_gone: Callable[[], Awaitable[None]],
    ) -> None:
        self._lifeline = lifeline
        self._keeper = holder.identity_of(keeper_pid)
        self._lock = lock
        self._log = log
        self._output = output
        self._evidence = evidence
        self._exits = exits
        self._before_gone = before_gone
        self._following = asyncio.create_task(self._follow())

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL to the whole tree after the grace."""
        self._lifeline.stop(timedelta(seconds=grace_seconds))

    def hang_up(self) -> None:
        """Send SIGHUP: an interactive shell ignores SIGTERM."""
        self._lifeline.signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to the whole tree, ordered before this returns."""
        self._lifeline.kill()

    async def end(self) -> None:
        """Kill the tree; return when no process of it is left, nor its keeper."""
        self.kill()
        await self._following

    async def _follow(self) -> None:
        """Follow the process until its end, which is reported even if something fails before it."""
        faults = 0
        while True:
            try:
                event = await self._lifeline.next_event()
            except Exception as error:  # an invalid message: the next may be valid
                faults += 1
                report_fault("a message of the keeper was left out", error)
                if faults < _MAX_FAULTS:
                    continue
                self._lifeline.close()  # an order to the keeper to kill everything
                event = None
            if await self._take(event or KeeperLost(at=time.time())):
                break
        self._evidence.close()
        await self._output.close()
        self._lifeline.close()
        keeper = None if self._keeper is None else self._keeper.open()
        if keeper is not None:
            await process_ended(keeper)

    async def _take(self, event: Event) -> bool:
        """Process one event of the keeper; return whether it was the last."""
        try:
            return await self._report(event)
        except Exception as error:
            report_fault("an event of the keeper was left out", error)
            last = isinstance(event, Gone | KeeperLost)
            if last:
                self._log.add(kind="gone", at=time.time())
            return last

    async def _report(self, event: Event) -> bool:
        match event:
            case Started():
                self._evidence.started(event.pid)
                self._log.add(kind="started", at=event.at, pid=event.pid, cold=event.cold)
            case ErrorRaised():
                self._exits.error = event
            case Exited():
                await self._exits.report(event)
            case Gone() | KeeperLost():
                if not self._log.exited:
                    lost = Exited(exit_code=None, signal=signal.SIGKILL, cause=None, record_error=None, at=event.at)
                    await self._exits.report(lost)
                if isinstance(event, KeeperLost):
                    await self._end_remains()
                await self._before_gone()
                self._output.end_lines()  # the actor may be ended as soon as this is reported
                self._log.add(kind="gone", at=max(event.at, time.time()))
                return True
        return False

    async def _end_remains(self) -> None:
        """End the tree of a killed keeper; return when its memory is free."""
        while True:
            if await asyncio.to_thread(end_remains, self._lock, _REMAINS_SECONDS):
                return
            await asyncio.sleep(_REMAINS_AGAIN_SECONDS)  # another process holds the lock and ends it
