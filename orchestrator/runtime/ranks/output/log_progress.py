"""Reads steps from a rank's output (`health.progress`), for scripts that report nothing.

The pattern is the user's, and a regular expression can take for ever. Lines are therefore searched in batches in
another process, which is killed if a batch takes too long: the job then counts as one without reports. Without a
pattern, the lines of common trainers are looked for (known_lines.py), which is a guess, and marked as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.ranks.output.known_lines import known_step, may_match
from orchestrator.train.script.progress import RECENT_STEPS, STEP_SECONDS_WEIGHT, ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SECONDS: Final = 0.25
DEADLINE_SECONDS: Final = 2.0
MOST_LINES: Final = 1000
MOST_CHARACTERS: Final = 1000
_SEARCH: Final = """
import json, re, sys
pattern = re.compile(sys.argv[1])
def number(text):
    text = (text or "").replace(",", "").replace("_", "").strip()
    return int(text) if text.isdecimal() and len(text) <= 18 else None
for batch in sys.stdin:
    found = None
    for line in reversed(json.loads(batch)):
        match = pattern.search(line)
        if match and number(match[1]) is not None:
            found = [number(match[1]), number(match[2]) if pattern.groups > 1 else None]
            break
    print(json.dumps(found), flush=True)
"""


class LogProgress:
    """Searches lines for steps: ``feed`` takes lines, ``over`` adds steps to a progress, ``warn`` reports a failed search."""

    def __init__(
        self,
        pattern: str,
        previous_step: int,
        warn: Callable[[str], None],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        search_program: str = _SEARCH,
    ) -> None:
        self._search_program = search_program
        self._deadline_seconds = deadline_seconds
        self._pattern = pattern
        self._previous = previous_step
        self._warn = warn
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._found: ProgressSnapshot | None = None
        self._clock = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._given_up = False
        self._kind = ""

    def feed(self, line: str) -> None:
        """Add a printed line. Called in the event loop's thread."""
        if self._given_up or (not self._pattern and not may_match(line)):
            return
        self._lines.append(line[:MOST_CHARACTERS])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._search())

    @property
    def guessed(self) -> bool:
        """Whether the steps found are guesses, because there is no pattern."""
        return not self._pattern

    def over(self, snapshot: ProgressSnapshot) -> ProgressSnapshot:
        """Return the progress, with the steps found in the output where the script has reported none."""
        found = self._found
        if found is None or snapshot.step is not None:
            return snapshot
        return replace(
            found,
            writer_pid=snapshot.writer_pid,
            checkpoint=snapshot.checkpoint,
            stop_requested=snapshot.stop_requested,
            stop_seen=snapshot.stop_seen,
        )

    async def close(self) -> None:
        """End the search after the lines added so far."""
        if self._task is not None:
            await self._task
        self._given_up = True
        await self._end()

    async def _search(self) -> None:
        while self._lines and not self._given_up:
            batch = list(self._lines)
            self._lines.clear()
            if not self._pattern:
                self._recognise(batch)
                await asyncio.sleep(BATCH_SECONDS)
                continue
            try:
                async with asyncio.timeout(self._deadline_seconds):
                    found = await self._ask(batch)
            except TimeoutError:
                await self._give_up(
                    f"took longer than {self._deadline_seconds:g} s for {len(batch)} lines: simplify it"
                )
            except (OSError, ValueError) as error:
                await self._give_up(f"could not be searched for: {error}")
            else:
                if found is not None:
                    self._take(*found)
                await asyncio.sleep(BATCH_SECONDS)

    def _recognise(self, batch: list[str]) -> None:
        """Take the newest known line; skip a bar or counter of another kind than the first: it belongs to an evaluation."""
        for line in reversed(batch):
            found = known_step(line)
            if found is None or found.kind != (self._kind or found.kind):
                continue
            self._kind = found.kind
            self._take(found.step, found.total)
            return

    async def _ask(self, batch: list[str]) -> tuple[int, int | None] | None:
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", self._search_program, self._pattern),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(batch).encode() + b"\n")
        await process.stdin.drain()
        answer = json.loads(await process.stdout.readline())
        return None if answer is None else (int(answer[0]), answer[1])

    def _take(self, step: int, total: int | None) -> None:
        now, clock, before = time.time(), time.monotonic(), self._found or ProgressSnapshot()
        highest = -1 if before.max_step is None else before.max_step
        seconds = before.step_seconds
        if step > highest >= 0:
            newest = (clock - self._clock) / (step - highest)
            self._recent.append(newest)
            seconds = newest if seconds is None else seconds + STEP_SECONDS_WEIGHT * (newest - seconds)
        advanced = step > highest
        # An attempt's first step becomes part of its history, so a guess does not count.
        new = before.new_step is None and step > self._previous and not self.guessed
        self._clock = clock
        self._found = replace(
            before,
            step=step,
            max_step=max(step, highest),
            total_steps=total if total is not None else before.total_steps,
            first_step_at=before.first_step_at or now,
            new_step=step if new else before.new_step,
            new_step_at=now if new else before.new_step_at,
            last_step_at=now if advanced else before.last_step_at,
            last_report_at=now,
            # Diagnosis uses only what was reported; a guess is shown, with its pace.
            steps_reported=0 if self.guessed else before.steps_reported + advanced,
            step_seconds=seconds,
            recent_step_seconds=() if self.guessed else tuple(self._recent),
            guessed=self.guessed,
        )

    async def _give_up(self, why: str) -> None:
        self._given_up = True
        self._lines.clear()
        await self._end()
        self._warn(f"[orch] health.progress: the pattern {self._pattern!r} {why}; steps are not read any more")

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
