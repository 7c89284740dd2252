"""One rank of a gang, seen from beside it: starts its process through the fork server, holds its lifeline, keeps its story.

A plain asyncio object, so that it works in a Ray actor (rank_actor.py) and without Ray alike. It owns the rank's pipes,
log, progress page and, on rank 0, the attempt's rendezvous. It decides nothing: the daemon does. Whatever happens to the
process is a numbered event that can be asked for again, so a restarted daemon misses nothing. When this object's process
dies, the lifeline closes and the keeper kills everything below it. A keeper that is killed or stopped keeps nothing from
ending: this object ends what it kept (``rank_remains``).

Fencing: every call names its attempt; an older one is refused. A process tree holds an advisory lock per job and rank on
its node (through its keeper), so a second tree cannot start before the first is gone, whoever asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.checkpoint.external.watcher import FileWatcher
from orchestrator.checkpoint.repository.persister import SnapshotPersister
from orchestrator.private_files import make_private
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.endings import StopFacts, stop_facts
from orchestrator.runtime.ranks.keeper_watch import KeeperWatch
from orchestrator.runtime.ranks.kernel_evidence import KernelWatch, MachineWatch, OomWatch, memory_use
from orchestrator.runtime.ranks.log_policies import match_policies
from orchestrator.runtime.ranks.logs import log_path
from orchestrator.runtime.ranks.output import RankOutput
from orchestrator.runtime.ranks.process_inspector import look_at
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent
from orchestrator.runtime.ranks.record_room import make_room
from orchestrator.runtime.ranks.rendezvous import bind_rendezvous
from orchestrator.runtime.ranks.secrets import masked_event, masked_look, masked_progress, masked_status
from orchestrator.runtime.ranks.start import RankStarter
from orchestrator.runtime.ranks.tracing import take_trace
from orchestrator.runtime.spawn.client import (
    ErrorRaised,
    Exited,
    Gone,
    KeeperLost,
    Lifeline,
    Started,
)
from orchestrator.runtime.spawn.rank_locks import rank_lock_path
from orchestrator.runtime.spawn.rank_remains import end_remains
from orchestrator.train.script.progress_reading import PageReader
from orchestrator.train.script.trace_request import TraceRefusedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.spawn.client import Event
    from orchestrator.train.script.progress_facts import ProgressSnapshot

PROGRESS_SECONDS: Final = 1.0
LAST_LOOK_SECONDS: Final = 10.0
_OLD_STORE_SECONDS: Final = 1.0
TOLD_WITH_END_SECONDS: Final = 0.05
_REMAINS_SECONDS: Final = 10.0
_MOST_FAULTS: Final = 100
_SIGKILL: Final = 9


class StaleAttemptError(Exception):
    """The call names an attempt that a newer one has replaced; nothing was done. Ask for the current attempt."""


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
        progress_seconds: float = PROGRESS_SECONDS,
        told_with_end_seconds: float = TOLD_WITH_END_SECONDS,
    ) -> None:
        self._progress_seconds, self._told_with_end_seconds = progress_seconds, told_with_end_seconds
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
        self._page: PageReader | None = None
        self._progress: ProgressSnapshot | None = None
        self._progress_number = 0
        self._read_at = 0.0
        self._output: RankOutput | None = None
        self._masker = Masker(())
        self._error: ErrorRaised | None = None
        self._pid = 0
        self._keeper: KeeperWatch | None = None
        self._oom: OomWatch | None = None
        self._machine = MachineWatch()
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
        if self._store is not None:
            # Its end takes a core some ten milliseconds. The new attempt needs them more, and has a store of its own.
            asyncio.get_running_loop().call_later(_OLD_STORE_SECONDS, self._store.close)
            self._store = None
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
            starter = RankStarter(
                plan,
                self._node_dir,
                start_fork_server=self._start_fork_server,
                is_called_off=lambda: self._called_off >= plan.attempt,
            )
            if self._launched < plan.attempt:
                await self._launch_rank(plan, starter)
            # Ranks that are there before the store wait in its socket's backlog.
            if self._listener is not None and self._store is None and self._lifeline is not None:
                store = await starter.store(self._listener)
                self._store = None if store is None else store.lifeline

    async def _launch_rank(self, plan: RankPlan, starter: RankStarter) -> None:
        self._open_page(plan)
        self._keep_snapshots(plan)
        self._watch_files(plan)
        make_room(Path(plan.exit_record))
        self._masker = Masker(plan.secrets)
        output = self._output = RankOutput(
            log_path(Path(plan.log_dir), plan.attempt, plan.rank),
            masker=self._masker,
            limits=plan.log_limits,
            progress_pattern=plan.progress_pattern,
            previous_step=plan.previous_step,
        )
        self._policies = plan.log_policies
        self._watch_kernel()
        spawned = await starter.rank(output)
        if spawned is None:
            return
        self._error = None
        self._lifeline = lifeline = spawned.lifeline
        self._keeper = KeeperWatch(spawned.keeper_pid)
        self._launched = plan.attempt
        self._watcher = asyncio.create_task(self._watch(lifeline, output, self._keeper))

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
                async with asyncio.timeout(min(left, self._progress_seconds)):
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
            log_lost=self._output.lost if self._output else None,
        )

    async def stop(self, attempt: int, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL of the whole tree after the grace, whoever is alive then; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._page is not None:
            self._page.request_stop()
        if self._lifeline is not None:
            self._lifeline.stop(timedelta(seconds=max(grace_seconds, 0.0)))
        if self._keeper is not None:
            self._keeper.expect_end(max(grace_seconds, 0.0))

    async def kill(self, attempt: int) -> None:
        """SIGKILL of the whole tree, now; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._lifeline is not None:
            self._lifeline.kill()
        if self._keeper is not None:
            self._keeper.expect_end(0.0)

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

    def kill_now(self) -> None:
        """SIGKILL of the whole tree, ordered before this returns, for a caller that is about to end its process."""
        if self._lifeline is not None:
            self._lifeline.kill()

    async def flush(self, seconds: float) -> PersisterStatus | None:
        """Bring the newest snapshot to storage; what became of it, or None where there are no snapshots."""
        persister, files = self._persister, self._files
        if files is not None:
            await asyncio.to_thread(files.look)
            if files.status.persisted:
                return masked_status(files.status, self._masker)
        if persister is None:
            return None
        await asyncio.to_thread(persister.flush, seconds)
        return masked_status(persister.status, self._masker)

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
        return masked_look(replace(look, printed=self._output.lines if self._output else 0), self._masker)

    def note(self, attempt: int, lines: Sequence[str]) -> None:
        """Write ``lines`` of orch's own into the rank's log."""
        if attempt == self.attempt and self._output is not None:
            self._output.note(lines)

    def _keep_snapshots(self, plan: RankPlan) -> None:
        if self._persister is not None:
            self._persister.hold_lease(plan.attempt)
        if plan.snapshots is None or self._persister is not None:
            return
        make_private(Path(plan.snapshots.directory))
        self._persister = SnapshotPersister(plan.snapshots.directory, rank=plan.rank, settings=plan.snapshots.settings)
        self._persister.hold_lease(plan.attempt)
        self._persister.start()

    def _watch_kernel(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
        self._kernel = KernelWatch()

    def _watch_files(self, plan: RankPlan) -> None:
        if plan.watch is None:
            return
        if self._files is None:
            self._files = FileWatcher(plan.watch, reported=self._reported)
        self._files.start(plan.attempt)

    def _reported(self) -> tuple[float, int] | None:
        """The newest step that the rank has reported, and when. Called by the thread that watches its files."""
        page, output = self._page, self._output
        if page is None:
            return None
        progress = page.read()
        if output is not None:
            progress = output.over(progress)
        if progress.max_step is None or progress.last_step_at is None:
            return None
        return progress.last_step_at, progress.max_step

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
        if self._keeper is not None:
            self._keeper.expect_end(0.0)
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

    def _open_page(self, plan: RankPlan) -> None:
        if self._page is not None:
            self._page.close()
        make_private(Path(plan.page).parent)
        self._page = PageReader.create(plan.page)
        self._progress = None

    def _look(self, *, final: bool) -> None:
        """Number what is new of progress (read at most once a second, unless something happened) and of snapshots."""
        for index, source in enumerate((self._persister, self._files)):
            status = source.status if source else None
            if status is not None and status.persisted and status != self._told[index]:
                self._told[index] = status
                self._persisted = masked_status(status, self._masker)
                self._persisted_number += 1
                break  # the other one's news is next
        now = time.monotonic()
        if self._page is None or (not final and now - self._read_at < self._progress_seconds * 0.9):
            return
        if self._oom is not None and not final:
            self._oom.mark()
        if self._kernel is not None and not final:
            self._kernel.mark()
        if not final:
            self._machine.mark()
        snapshot = masked_progress(self._page.read(), self._masker)
        if self._output is not None:
            snapshot = self._output.over(snapshot)
        if snapshot != self._progress:
            self._progress, self._read_at = snapshot, now
            self._progress_number += 1
            self.highest_step = max(self.highest_step, snapshot.max_step or 0)

    async def _watch(self, lifeline: Lifeline, output: RankOutput, keeper: KeeperWatch) -> None:
        """Follow the rank to its end, which is told whatever goes wrong on the way."""
        faults = 0
        while True:
            try:
                event = await lifeline.next_event()
            except Exception as error:  # a message that is not one: the next may be
                faults += 1
                _report_fault("a message of the keeper was left out", error)
                if faults < _MOST_FAULTS:
                    continue
                lifeline.close()  # an order to the keeper to kill everything
                event = KeeperLost(at=time.time())
            if event is None:
                event = KeeperLost(at=time.time())
            try:
                if await self._follow(event, output, keeper):
                    break
            except Exception as error:
                _report_fault("an event of the keeper was left out", error)
                if isinstance(event, Gone | KeeperLost):
                    self._add(kind="gone", at=time.time())
                    break
        keeper.close()
        if self._kernel is not None:
            self._kernel.close()
        await output.close()
        lifeline.close()

    async def _last_look(self, files: FileWatcher) -> None:
        """Let what the rank has saved count before its end does: whether there was progress decides about the next attempt."""
        with contextlib.suppress(TimeoutError):  # the look goes on; what it finds is told later
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                await asyncio.shield(asyncio.to_thread(files.look))

    async def _follow(self, event: Event, output: RankOutput, keeper: KeeperWatch) -> bool:
        """Tell one event of the keeper; whether it was the last."""
        match event:
            case Started():
                self._pid, self._oom = event.pid, OomWatch(event.pid)
                keeper.watch(event.pid)
                self._add(kind="started", at=event.at, pid=event.pid, cold=event.cold)
            case ErrorRaised():
                self._error = event
            case Exited():
                await self._tell_exit(event, output)
            case Gone() | KeeperLost():
                if all(told.kind != "exited" for told in self._events):
                    lost = Exited(exit_code=None, signal=_SIGKILL, cause=None, record_error=None, at=event.at)
                    await self._tell_exit(lost, output)
                if isinstance(event, KeeperLost):
                    await self._end_remains(keeper)
                self._add(kind="gone", at=max(event.at, time.time()))
                return True
        return False

    async def _end_remains(self, keeper: KeeperWatch) -> None:
        """What a keeper that was killed kept is gone, and its memory free, when this returns."""
        path = rank_lock_path(self._node_dir, self.job_id, self.rank)
        keeper.close()
        while True:
            if await asyncio.to_thread(end_remains, path, _REMAINS_SECONDS):
                return
            await asyncio.sleep(PROGRESS_SECONDS)  # another process looks after it, and holds the lock

    async def _tell_exit(self, event: Exited, output: RankOutput) -> None:
        """The exit with what is known of its cause; without what could not be found out."""
        if self._files is not None:
            self._files.ended(event.at, well=event.exit_code == 0)
            await self._last_look(self._files)
        try:
            output.drain()
        except Exception as error:
            _report_fault("the rank's last output was left out", error)
        await self._add_exit(event, output)

    async def _add_exit(self, event: Exited, output: RankOutput) -> None:
        failed = event.exit_code != 0
        error = self._error if failed else None
        tail = output.tail if failed else ()
        said = "\n".join((*tail, f"{error.type}: {error.message}" if error else ""))
        policy, note = "", ""
        evidence: tuple[str, ...] = ()
        try:
            policy, note = await match_policies(self._policies, said) if failed else ("", "")
            evidence = self._evidence() if failed else ()
        except Exception as fault:
            _report_fault("what is known of the exit's cause was left out", fault)
        stop = await self._stop_facts(event, output)
        self._add(
            kind="exited",
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
            memory=memory_use(event.memory, machine=self._killed_by_kernel(event, evidence)) if failed else None,
        )

    async def _stop_facts(self, event: Exited, output: RankOutput) -> StopFacts:
        """Whether the rank was asked to stop, and how far it was; by its output where it reported nothing."""
        stop = stop_facts(event.ending)
        if event.cause is not None or stop.stop_seen_at is None or stop.last_step is not None:
            return stop
        try:
            return stop_facts(event.ending, await output.last_progress())
        except Exception as error:
            _report_fault("the step of the rank's last output was left out", error)
            return stop

    def _killed_by_kernel(self, event: Exited, evidence: tuple[str, ...]) -> bool:
        """Whether the kernel has killed a process of the rank because the machine had no memory left.

        Its log names the process, where it can be read; else the machine's count has risen in the last moments.
        """
        if event.cause is not None:
            return False
        if event.signal == _SIGKILL and self._kernel is not None and self._kernel.readable:
            return bool(evidence)
        return self._machine.killed()

    def _evidence(self) -> tuple[str, ...]:
        killed = self._oom.killed() if self._oom else ""
        return (*((killed,) if killed else ()), *(self._kernel.lines(self._pid) if self._kernel and self._pid else ()))

    def _add(self, **fields: Any) -> None:
        event = masked_event(RankEvent(number=len(self._events) + 1, **fields), self._masker)
        self._events.append(event)
        if event.kind == "exited" and self._called_off >= self.attempt:
            # Ordered, so no surprise: told with the end of its tree, which nearly always follows at once.
            asyncio.get_running_loop().call_later(self._told_with_end_seconds, self._news.set)
        else:
            self._news.set()


def _report_fault(what: str, error: Exception) -> None:
    """Into the actor's own log, with where it happened."""
    sys.stderr.write(f"{what}: {''.join(traceback.format_exception(error))}\n")
