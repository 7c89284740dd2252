"""Inspects a rank for users and for the diagnosis of hangs: processes, stacks, traces, lines for its log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.evidence.process_inspector import look_at
from orchestrator.runtime.ranks.secrets import masked_look
from orchestrator.runtime.ranks.tracing import take_trace
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.runtime.ranks.event_log import EventLog
    from orchestrator.runtime.ranks.fence import AttemptFence
    from orchestrator.runtime.ranks.rank_progress import RankProgress


class RankInspection:
    """Inspects the rank with this number."""

    def __init__(self, rank: int, fence: AttemptFence, log: EventLog, progress: RankProgress) -> None:
        self._rank = rank
        self._fence = fence
        self._log = log
        self._progress = progress

    async def trace(self, attempt: int, steps: int, seconds: float) -> bytes:
        """Return a torch.profiler trace of the next ``steps`` steps, gzipped JSON. Raises TraceRefusedError."""
        self._fence.refuse_older(attempt)
        page = self._progress.page

        def over() -> bool:
            return page is None or page is not self._progress.page or self._log.ended

        if page is None or attempt != self._fence.attempt or over():
            raise TraceRefusedError(f"rank {self._rank} does not run: ask again when it does")
        return await take_trace(page, self._rank, steps, seconds, over)

    async def look(self, attempt: int, *, stacks: bool) -> RankLook | None:
        """Inspect the rank's processes; None when it has none, or belongs to another attempt."""
        if attempt != self._fence.attempt or not self._log.running:
            return None
        training_pid, output = self._progress.writer_pid, self._progress.output
        look = await asyncio.to_thread(look_at, self._rank, self._log.pid, training_pid=training_pid, stacks=stacks)
        return masked_look(replace(look, printed=output.lines if output else 0), self._log.masker)

    def note(self, attempt: int, lines: Sequence[str]) -> None:
        """Write ``lines`` from orch into the rank's log."""
        if attempt == self._fence.attempt and self._progress.output is not None:
            self._progress.output.note(lines)
