"""Answers polls: new events, progress and checkpoints of a rank."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.runtime.ranks.event_log import EventLog
    from orchestrator.runtime.ranks.evidence.exit_evidence import ExitEvidence
    from orchestrator.runtime.ranks.fence import AttemptFence
    from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
    from orchestrator.runtime.ranks.rank_progress import RankProgress
    from orchestrator.runtime.ranks.sessions.rank_terminal import RankTerminal


class RankFeed:
    """Answers polls. Progress is read at most once a second, and sent only with other news where the daemon reads the page."""

    def __init__(
        self,
        fence: AttemptFence,
        log: EventLog,
        progress: RankProgress,
        checkpoints: RankCheckpoints,
        evidence: ExitEvidence,
        terminal: Callable[[], RankTerminal | None] = lambda: None,
    ) -> None:
        self._terminal = terminal
        self._terminal_at = 0.0
        self._fence = fence
        self._log = log
        self._progress = progress
        self._checkpoints = checkpoints
        self._evidence = evidence
        self._processes = evidence.processes

    async def poll(self, attempt: int, cursor: PollCursor, seconds: float) -> PollReply:
        """Wait for something newer than ``cursor``, or for ``seconds``."""
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
        self._look(final=bool(events))
        progress, checkpoints = self._progress, self._checkpoints
        persisted = checkpoints.newest if checkpoints.number > cursor.persisted else None
        processes = self._processes
        seen = processes.newest if processes.number > cursor.processes else None
        terminal = self._terminal()
        there = 0 if terminal is None else terminal.number
        alone = not events and persisted is None and seen is None and there <= cursor.terminal
        on_page = cursor.reads_page and progress.on_page
        snapshot = progress.newest if progress.number > cursor.progress and not (alone and on_page) else None
        return PollReply(
            cursor=PollCursor(
                event=events[-1].number if events else cursor.event,
                progress=cursor.progress if snapshot is None else progress.number,
                persisted=cursor.persisted if persisted is None else checkpoints.number,
                processes=cursor.processes if seen is None else processes.number,
                reads_page=cursor.reads_page,
                terminal=max(there, cursor.terminal),
            ),
            events=events,
            progress=snapshot,
            persisted=persisted,
            log_lost=progress.output.lost if progress.output else None,
            processes=seen,
            storage=None if seen is None else checkpoints.storage(self._log.masker),
            terminal=terminal.newest if terminal is not None and there > cursor.terminal else None,
        )

    def _look(self, *, final: bool) -> None:
        """Read what is new. ``final``, after an event: read progress early, and do not mark the kernel's evidence."""
        self._checkpoints.look(self._log.masker)
        if self._log.running:
            self._processes.look(self._log.pid, self._progress.newest.writer_pid if self._progress.newest else None)
            self._look_at_terminal()
        if self._progress.look(self._log.masker, final=final) and not final:
            self._evidence.mark()

    def _look_at_terminal(self) -> None:
        terminal, now = self._terminal(), time.monotonic()
        if terminal is None or now - self._terminal_at < self._progress.seconds * 0.9:
            return
        self._terminal_at = now
        newest = self._processes.newest
        terminal.look(None if newest is None else newest.cpu_seconds, time.time())
