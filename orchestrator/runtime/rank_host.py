"""One rank of a gang, seen from beside it: starts its process through the fork server, holds its lifeline, keeps its story.

A plain asyncio object, so that it works in a Ray actor (rank_actor.py) and without Ray alike. It owns the rank's pipes,
log, progress page and, on rank 0, the attempt's rendezvous. It decides nothing: the daemon does. Whatever happens to the
process is a numbered event that can be asked for again, so a restarted daemon misses nothing. When this object's process
dies, the lifeline closes and the keeper kills everything below it.

Fencing: every call names its attempt; an older one is refused. A process tree holds an advisory lock per job and rank on
its node (through its keeper), so a second tree cannot start before the first is gone, whoever asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.checkpoint.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.watcher import FileWatcher
from orchestrator.runtime.evidence import KernelWatch, OomWatch
from orchestrator.runtime.forkclient import (
    ErrorRaised,
    Exited,
    ForkServerClient,
    ForkServerMissingError,
    Gone,
    KeeperLost,
    Lifeline,
    SpawnRequest,
    Started,
)
from orchestrator.runtime.log_policies import match_policies
from orchestrator.runtime.log_progress import LogProgress
from orchestrator.runtime.logs import LogLimits, LogWriter, log_path
from orchestrator.runtime.looking import look_at
from orchestrator.runtime.node_dir import make_private
from orchestrator.runtime.rank_locks import rank_lock_path
from orchestrator.runtime.rank_story import PollCursor, PollReply, RankEvent
from orchestrator.runtime.rendezvous import bind_rendezvous
from orchestrator.runtime.tracing import take_trace
from orchestrator.train.progress import ProgressPage, ProgressSnapshot
from orchestrator.train.trace_request import TraceRefusedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from orchestrator.checkpoint.persister import PersisterStatus
    from orchestrator.checkpoint.watched import WatchSettings
    from orchestrator.core.health import RankLook

PROGRESS_SECONDS: Final = 1.0
_LOCK_SECONDS: Final = 30.0
_FORK_SERVER_SECONDS: Final = 30.0
_READ_BYTES: Final = 256 * 1024
_PIPE_BYTES: Final = 1024 * 1024


class StaleAttemptError(Exception):
    """The call names an attempt that a newer one has replaced; nothing was done. Ask for the current attempt."""


class RankBusyError(Exception):
    """Processes of an earlier attempt of this rank are still there after the deadline; see the node's process list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """Where the ranks leave snapshots in shared memory, and how they are kept on storage."""

    directory: str
    settings: StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Everything that one rank of one attempt needs to start. ``env`` is its complete environment."""

    job_id: str
    attempt: int
    rank: int
    mode: str
    target: str
    args: tuple[str, ...]
    python_options: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    threads: int | None
    cold: bool
    python: str
    fork_socket: str
    log_dir: str
    exit_record: str
    page: str
    previous_step: int
    runtime_env: tuple[str, ...] = ()
    snapshots: SnapshotPlan | None = None
    watch: WatchSettings | None = None
    progress_pattern: str = ""
    log_policies: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    log_limits: LogLimits = field(default_factory=LogLimits)


class RankHost:
    """See the module. ``start_fork_server`` is called when nobody answers on the plan's socket."""

    def __init__(
        self,
        *,
        job_id: str,
        gang: int,
        rank: int,
        node_dir: Path,
        start_fork_server: Callable[[RankPlan], Awaitable[None]],
    ) -> None:
        self.job_id, self.gang, self.rank = job_id, gang, rank
        self._node_dir = node_dir
        self._start_fork_server = start_fork_server
        self.attempt = 0
        self._launched = 0
        self._called_off = 0
        self._serial = asyncio.Lock()
        self._events: list[RankEvent] = []
        self._news = asyncio.Event()
        self._lifeline: Lifeline | None = None
        self._store: Lifeline | None = None
        self._listener: socket.socket | None = None
        self._page: ProgressPage | None = None
        self._progress: ProgressSnapshot | None = None
        self._progress_number = 0
        self._read_at = 0.0
        self._log: LogWriter | None = None
        self._said = LogProgress("", 0, lambda _: None)
        self._pipes: dict[int, str] = {}
        self._error: ErrorRaised | None = None
        self._pid = 0
        self._oom: OomWatch | None = None
        self._kernel: KernelWatch | None = None
        self._policies: tuple[tuple[str, str], ...] = ()
        self._watcher: asyncio.Task[None] | None = None
        self._persister: SnapshotPersister | None = None
        self._files: FileWatcher | None = None
        self._persisted: PersisterStatus | None = None
        self._told: list[PersisterStatus | None] = [None, None]
        self._persisted_number = 0
        self.highest_step = 0

    @property
    def launched(self) -> int:
        """The newest attempt whose process was started, or was called off before it was; 0 before the first."""
        return self._launched

    @property
    def port(self) -> int | None:
        """The rendezvous port that this host serves, if it does."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    async def prepare(self, attempt: int, serve_on: str | None) -> int | None:
        """Make room for ``attempt``: what is left of an older one is killed and gone when this returns.

        With ``serve_on``, an address of this node, the attempt's rendezvous socket is bound there; returns its port.
        """
        async with self._serial:
            self._refuse_older(attempt)
            if attempt > self.attempt:
                await self._begin(attempt)
                if serve_on is not None:
                    self._listener = bind_rendezvous(serve_on)
            return self.port

    async def _begin(self, attempt: int) -> None:
        await self._clear()
        self.attempt = attempt
        self._events = []
        self._progress = None
        if self._page is not None:
            self._page.close()
            self._page = None

    async def launch(self, plan: RankPlan) -> None:
        """Start the rank's process, once per attempt; asking again, or for one that was called off, does nothing."""
        async with self._serial:
            self._refuse_older(plan.attempt)
            if self._launched == plan.attempt:
                return
            client = ForkServerClient(Path(plan.fork_socket))
            if self._listener is not None and self._store is None:
                self._store = await self._with_fork_server(plan, lambda: self._serve_store(client, plan))
            self._open_page(plan)
            self._keep_snapshots(plan)
            self._watch_files(plan)
            Path(plan.exit_record).parent.mkdir(parents=True, exist_ok=True)
            Path(plan.exit_record).unlink(missing_ok=True)
            self._open_log(plan)
            self._policies = plan.log_policies
            self._watch_kernel()
            lifeline = await self._with_fork_server(plan, lambda: self._spawn(client, plan))
            if lifeline is None:
                return
            self._lifeline = lifeline
            self._launched = plan.attempt
            self._watcher = asyncio.create_task(self._watch(lifeline))

    async def poll(self, attempt: int, cursor: PollCursor, seconds: float) -> PollReply:
        """Wait until there is something newer than ``cursor``, or ``seconds``; progress is news at most once a second."""
        deadline = time.monotonic() + seconds
        while True:
            self._refuse_older(attempt)
            # Of an attempt that is not even prepared nothing can be said: what is here belongs to the one before.
            reply = PollReply(cursor=cursor) if attempt > self.attempt else self._reply(cursor)
            left = deadline - time.monotonic()
            if reply.cursor != cursor or left <= 0:
                return reply
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, PROGRESS_SECONDS)):
                    await self._news.wait()

    def _reply(self, cursor: PollCursor) -> PollReply:
        events = tuple(e for e in self._events if e.number > cursor.event)
        self._look(final=bool(events))
        progress = self._progress if self._progress_number > cursor.progress else None
        persisted = self._persisted if self._persisted_number > cursor.persisted else None
        return PollReply(
            cursor=PollCursor(
                event=events[-1].number if events else cursor.event,
                progress=cursor.progress if progress is None else self._progress_number,
                persisted=cursor.persisted if persisted is None else self._persisted_number,
            ),
            events=events,
            progress=progress,
            persisted=persisted,
            log_lost=self._log.lost if self._log else None,
        )

    async def stop(self, attempt: int, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL of the whole tree after the grace, whoever is alive then; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._page is not None:
            self._page.request_stop()
        if self._lifeline is not None:
            self._lifeline.stop(timedelta(seconds=max(grace_seconds, 0.0)))

    async def kill(self, attempt: int) -> None:
        """SIGKILL of the whole tree, now; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._lifeline is not None:
            self._lifeline.kill()

    async def _call_off(self, attempt: int) -> None:
        """Nothing of ``attempt`` starts from now on: one that has not been launched is gone."""
        self._refuse_older(attempt)
        self._called_off = max(self._called_off, attempt)
        async with self._serial:  # a launch under way has either started the process when it ends, or given up
            self._refuse_older(attempt)
            if attempt > self.attempt:
                await self._begin(attempt)
            if self._launched < attempt:
                self._launched = attempt
                self._add(kind="gone", at=time.time())

    async def flush(self, seconds: float) -> PersisterStatus | None:
        """Bring the newest snapshot to storage; what became of it, or None where there are no snapshots."""
        persister, files = self._persister, self._files
        if files is not None:
            await asyncio.to_thread(files.look)
            if files.status.persisted:
                return files.status
        if persister is None:
            return None
        await asyncio.to_thread(persister.flush, seconds)
        return persister.status

    async def trace(self, attempt: int, steps: int, seconds: float) -> bytes:
        """A torch.profiler trace of the next ``steps`` steps, gzipped JSON. Raises TraceRefusedError."""
        self._refuse_older(attempt)
        page = self._page

        def over() -> bool:
            return page is None or page is not self._page or any(event.kind != "started" for event in self._events)

        if page is None or attempt != self.attempt or over():
            raise TraceRefusedError(f"rank {self.rank} does not run: ask again when it does")
        return await take_trace(page, self.rank, steps, seconds, over)

    async def look(self, attempt: int, *, stacks: bool) -> RankLook | None:
        """A look at the rank's processes; None when it has none, or belongs to another attempt."""
        if attempt != self.attempt or not self._events or any(event.kind != "started" for event in self._events):
            return None
        told = self._page.read().writer_pid if self._page is not None else None
        look = await asyncio.to_thread(look_at, self.rank, self._pid, training_pid=told, stacks=stacks)
        return replace(look, printed=self._log.lines if self._log else 0)

    def note(self, attempt: int, lines: Sequence[str]) -> None:
        """Write ``lines`` of orch's own into the rank's log."""
        if attempt == self.attempt and self._log is not None:
            self._log.note(lines, time.time())

    def _keep_snapshots(self, plan: RankPlan) -> None:
        if plan.snapshots is None or self._persister is not None:
            return
        make_private(Path(plan.snapshots.directory))
        self._persister = SnapshotPersister(plan.snapshots.directory, rank=plan.rank, settings=plan.snapshots.settings)
        self._persister.start()

    def _watch_kernel(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
        self._kernel = KernelWatch()

    def _watch_files(self, plan: RankPlan) -> None:
        if plan.watch is None:
            return
        if self._files is None:
            self._files = FileWatcher(plan.watch)
        self._files.start(plan.attempt)

    async def clear(self) -> None:
        """Kill what is there; nothing is left when this returns."""
        async with self._serial:
            await self._clear()

    def _refuse_older(self, attempt: int) -> None:
        if attempt < self.attempt:
            raise StaleAttemptError(
                f"{self.job_id} rank {self.rank}: attempt {attempt} was replaced by {self.attempt}; nothing was done"
            )

    async def _clear(self) -> None:
        if self._lifeline is not None:
            self._lifeline.kill()
        if self._watcher is not None:
            await self._watcher
            self._watcher = None
        self._lifeline = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _with_fork_server(
        self, plan: RankPlan, call: Callable[[], Awaitable[Lifeline | None]]
    ) -> Lifeline | None:
        deadline = time.monotonic() + _FORK_SERVER_SECONDS
        while self._called_off < plan.attempt:
            try:
                return await call()
            except ForkServerMissingError:
                if time.monotonic() > deadline:
                    raise
                await self._start_fork_server(plan)
        return None

    async def _serve_store(self, client: ForkServerClient, plan: RankPlan) -> Lifeline:
        assert self._listener is not None
        env = {name: plan.env[name] for name in ("PATH", "HOME") if name in plan.env}
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            spawned = await client.spawn(
                SpawnRequest(mode="store", cwd="/", env=env, threads=1),
                stdout=null,
                stderr=null,
                listen=self._listener.fileno(),
            )
        finally:
            os.close(null)
        return spawned.lifeline

    async def _spawn(self, client: ForkServerClient, plan: RankPlan) -> Lifeline | None:
        # A lock of its own for each request: when its answer is lost, the process may be there, and holds it until
        # nothing is left of it.
        lock = await self._lock(plan.attempt)
        if lock is None:
            return None
        try:
            return await self._spawn_under(lock, client, plan)
        finally:
            os.close(lock)  # the keeper holds its own copy

    async def _spawn_under(self, lock: int, client: ForkServerClient, plan: RankPlan) -> Lifeline:
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for _, write_end in pipes:
                os.set_blocking(write_end, True)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            spawned = await client.spawn(
                SpawnRequest(
                    mode=plan.mode,  # type: ignore[arg-type]  # checked where the entry point was parsed
                    target=plan.target,
                    args=plan.args,
                    python_options=plan.python_options,
                    cwd=plan.cwd,
                    env=plan.env,
                    threads=plan.threads,
                    cold=plan.cold,
                    exit_record=Path(plan.exit_record),
                    record={"job": plan.job_id, "attempt": plan.attempt, "rank": plan.rank},
                ),
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                lease=lock,
            )
        except BaseException:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        self._error = None
        loop = asyncio.get_running_loop()
        for (read_end, _), stream in zip(pipes, "oe", strict=True):
            self._pipes[read_end] = stream
            loop.add_reader(read_end, self._read_pipe, read_end)
        return spawned.lifeline

    async def _lock(self, attempt: int) -> int | None:
        """The node's lock for this job and rank: held by the keeper of a live tree, so at most one tree exists.

        None when the attempt was called off. Raises RankBusyError.
        """
        path = rank_lock_path(self._node_dir, self.job_id, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_SECONDS
        delay = 0.001
        while self._called_off < attempt:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    raise RankBusyError(f"{path} is still locked by an older process tree") from None
                await asyncio.sleep(delay)
                delay = min(delay * 2, 0.1)
            else:
                return handle
        os.close(handle)
        return None

    def _open_log(self, plan: RankPlan) -> None:
        path = log_path(Path(plan.log_dir), plan.attempt, plan.rank)
        self._said = said = LogProgress(
            plan.progress_pattern, plan.previous_step, lambda line: self.note(plan.attempt, [line])
        )
        self._log = LogWriter(path, secrets=plan.secrets, limits=plan.log_limits, listener=said.feed)

    def _open_page(self, plan: RankPlan) -> None:
        if self._page is not None:
            self._page.close()
        Path(plan.page).parent.mkdir(parents=True, exist_ok=True)
        self._page = ProgressPage.create(plan.page)
        self._progress = None

    def _look(self, *, final: bool) -> None:
        """Number what is new of progress (read at most once a second, unless something happened) and of snapshots."""
        for index, source in enumerate((self._persister, self._files)):
            status = source.status if source else None
            if status is not None and status.persisted and status != self._told[index]:
                self._told[index] = self._persisted = status
                self._persisted_number += 1
                break  # the other one's news is next
        now = time.monotonic()
        if self._page is None or (not final and now - self._read_at < PROGRESS_SECONDS * 0.9):
            return
        if self._oom is not None and not final:
            self._oom.mark()
        if self._kernel is not None and not final:
            self._kernel.mark()
        snapshot = self._said.over(self._page.read())
        if snapshot != self._progress:
            self._progress, self._read_at = snapshot, now
            self._progress_number += 1
            self.highest_step = max(self.highest_step, snapshot.max_step or 0)

    def _read_pipe(self, fd: int) -> bool:
        """Take what there is; False at the end of the file."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if data:
            if self._log is not None:
                self._log.feed(self._pipes[fd], data, time.time())
            return True
        asyncio.get_running_loop().remove_reader(fd)
        del self._pipes[fd]
        os.close(fd)
        return False

    def _drain_pipes(self) -> None:
        """What the process wrote before it died is in the pipes: take all of it."""
        for fd in list(self._pipes):
            while True:
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                if self._log is not None:
                    self._log.feed(self._pipes[fd], data, time.time())

    def _close_pipes(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in list(self._pipes):
            loop.remove_reader(fd)
            os.close(fd)
        self._pipes.clear()

    async def _watch(self, lifeline: Lifeline) -> None:
        exited = False
        async for event in lifeline:
            match event:
                case Started():
                    self._pid, self._oom = event.pid, OomWatch(event.pid)
                    self._add(kind="started", at=event.at, pid=event.pid, cold=event.cold)
                case ErrorRaised():
                    self._error = event
                case Exited():
                    exited = True
                    if self._files is not None:
                        self._files.ended(event.at, well=event.exit_code == 0)
                    self._drain_pipes()
                    await self._add_exit(event.at, event.exit_code, event.signal)
                case Gone() | KeeperLost():
                    self._drain_pipes()
                    if not exited:
                        await self._add_exit(event.at, None, 9)
                    self._add(kind="gone", at=event.at)
        self._close_pipes()
        if self._kernel is not None:
            self._kernel.close()
        await self._said.close()
        if self._log is not None:
            self._log.close(time.time())
            self._log = None
        lifeline.close()

    async def _add_exit(self, at: float, exit_code: int | None, signal: int | None) -> None:
        error = self._error if exit_code != 0 else None
        tail = self._log.tail if self._log and exit_code != 0 else ()
        said = "\n".join((*tail, f"{error.type}: {error.message}" if error else ""))
        failed = exit_code != 0
        policy, note = await match_policies(self._policies, said) if failed else ("", "")
        self._add(
            kind="exited",
            at=at,
            exit_code=exit_code,
            signal=signal,
            error_type=error.type if error else "",
            error_message=error.message if error else "",
            error_at=error.at if error else None,
            log_tail=tail,
            evidence=self._evidence() if failed else (),
            policy=policy,
            policy_note=note,
        )

    def _evidence(self) -> tuple[str, ...]:
        killed = self._oom.killed() if self._oom else ""
        return (*((killed,) if killed else ()), *(self._kernel.lines(self._pid) if self._kernel and self._pid else ()))

    def _add(self, **fields: Any) -> None:
        self._events.append(RankEvent(number=len(self._events) + 1, **fields))
        self._news.set()
