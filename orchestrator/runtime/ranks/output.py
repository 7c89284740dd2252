"""A rank's output: its pipes, the steps found in its lines, and the log policies matched against its end.

Owned by the rank's actor, in its event loop's thread. Only ``close`` waits for a reader or a disk. Patterns are the
user's, and a regular expression can take practically for ever: they are searched in another process, for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.runtime.ranks.logs import DRAWN_SECONDS, LogWriter
from orchestrator.train.script.progress import RECENT_STEPS, STEP_SECONDS_WEIGHT
from orchestrator.train.script.progress_reading import ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.logs import LogLimits

KNOWN_LINE_CHARACTERS: Final = 1000
_NUMBER: Final = r"([0-9][0-9,_]{0,17})"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]{0,20}m")

_TQDM: Final = re.compile(
    rf"^\s{{0,8}}([^|%]{{0,160}}?)[ ]{{0,3}}[0-9]{{1,3}}%\|[^|]{{0,200}}\|[ ]{{0,3}}{_NUMBER}/{_NUMBER} \["
)
"""A bar of tqdm, as of Hugging Face's Trainer, Lightning and YOLO: description, percent, bar, n/total, times."""

_ENDLESS: Final = re.compile(rf"^\s{{0,8}}([^|%0-9]{{0,60}}){_NUMBER}it \[[0-9:?]{{1,9}}[,\]]")
"""A bar of tqdm without a total."""

_RICH: Final = re.compile(rf"^([^━╸╺─|]{{0,160}})[━╸╺─ ]{{2,200}} (?:[0-9]{{1,3}}% )?{_NUMBER}/{_NUMBER}(?: |$)")
"""A bar of Rich, also Lightning's other one; and newer ones of YOLO, with the percents before the bar."""

_KERAS: Final = re.compile(
    rf"^[ ]{{0,10}}{_NUMBER}/{_NUMBER} (?:\[[=>.]{{2,60}}\]|[━╸╺─ ]{{2,60}}) .{{0,40}}(?:ETA|s/step|s/epoch)"
)

_EPOCH: Final = re.compile(
    rf"^(?:train(?:ing)? )?epoch[ :=#]{{0,3}}\[?{_NUMBER}(?: ?/ ?{_NUMBER})?(?![0-9])(?!.*(?:val|eval|test))",
    re.IGNORECASE,
)
_YOLO_EPOCH: Final = re.compile(rf"^{_NUMBER}/{_NUMBER} +[0-9.]{{1,8}}[GM]?B? ")
_EPOCH_LINE: Final = re.compile(rf"Epoch {_NUMBER}/{_NUMBER}:?")
"""Keras prints the epoch on a line of its own, and after it a bar for the epoch."""

_IN_EPOCH: Final = (
    # MMEngine `Epoch(train)  [1][ 50/196]`, torchvision `Epoch: [0][ 50/196]`, timm `Train: 0 [ 50/196 (26%)]`
    re.compile(
        rf"(?<!Train )\b(?:Epoch(?:\(train\))?|Train):?[ ]{{1,3}}\[?{_NUMBER}(?:/{_NUMBER})?\]?[ ]?\[[ ]{{0,8}}{_NUMBER}/[ ]{{0,8}}{_NUMBER}"
    ),
    # `Epoch [1/5], Step [100/600], Loss: 0.3`
    re.compile(
        rf"\bepoch[ :=#]{{0,3}}\[?{_NUMBER}(?:/{_NUMBER})?\]?[^0-9]{{1,12}}\b(?:step|iter|iteration|batch)[ :=#]{{0,3}}\[?{_NUMBER}/{_NUMBER}",
        re.IGNORECASE,
    ),
)

_COUNTED: Final = re.compile(
    rf"\b(?:steps?|iter|iteration|global_step)(?:\(train\))?[ =:#]{{0,3}}\[?[ ]{{0,10}}{_NUMBER}(?:[ ]?(?:/|of)[ ]{{0,10}}{_NUMBER})?(?![0-9.%])",
    re.IGNORECASE,
)
"""`iter 100: loss 2.45, time 30ms` and `step 00010/01000 | loss: 2.4`: a counter, in a line with a loss."""

_UPDATES: Final = re.compile(rf"\bnum_updates\"?[ =:]{{1,3}}\"?{_NUMBER}")
"""fairseq's counter of steps, beside the one that begins anew in each epoch."""

_TOTAL: Final = re.compile(
    rf"\b(?:total (?:optimization |training )?steps|max_iters|max_steps|train_iters)[ =:.]{{1,60}}{_NUMBER}\b",
    re.IGNORECASE,
)
"""The number of steps on a line of its own: nanoGPT's and Megatron's arguments, torchtitan's and Hugging Face's first lines."""

_LOSS: Final = re.compile(r"(?:\b|_)loss", re.IGNORECASE)
_TRAINING: Final = re.compile(
    r"(?:(?:train|training|fitting|fine-?tuning|pre-?training|optimization|progress|(?:global )?steps?|iterations?|iters?|batch|batches)"
    r"(?:[ :.]{0,3}|\b.{1,60}loss.{0,60}))?|loss[ :=].{0,60}",
    re.IGNORECASE,
)
"""Descriptions of bars that count optimizer steps; `Map:` and `Loading weights:` count something else."""
_SIGNS: Final = ("%|", "━", "─", "loss", "Loss", "it [", "Epoch ", "steps", "max_", "_iters")


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step, its total where the line has one, and the kind of line, which is the same for all steps of a job."""

    step: int
    total: int | None
    kind: str


def may_match(line: str) -> bool:
    """Whether a line may report a step: a quick check, false for most lines."""
    return any(sign in line for sign in _SIGNS)


class KnownLines:
    """Finds steps in the lines of common trainers. Keeps what other lines tell: Keras's epoch, and the number of steps."""

    def __init__(self) -> None:
        self._epoch: tuple[int | None, int | None] = (1, 1)  # Keras does not name an only epoch
        self._from_zero = False
        self._total: int | None = None

    def step(self, line: str) -> KnownStep | None:
        """Return the step that a trainer's line reports; None for any other line."""
        line = _COLOUR.sub("", line.rsplit("\r", 1)[-1][:KNOWN_LINE_CHARACTERS]).rstrip()
        if (found := _UPDATES.search(line)) is not None:
            return self._counter(_whole(found[1]), None)
        if (found := _TQDM.match(line) or _RICH.match(line)) is not None and found[1].strip():
            self._from_zero = self._from_zero or "•" in line  # Lightning's own columns
            return self._bar(found[1].strip(), _whole(found[2]), _whole(found[3]))
        if (keras := _KERAS.match(line)) is not None:
            return self._in_epoch(*self._epoch, _whole(keras[1]), _whole(keras[2]))
        if found is not None:
            return self._bar("", _whole(found[2]), _whole(found[3]))
        if (found := _EPOCH_LINE.fullmatch(line)) is not None:
            self._epoch = (_whole(found[1]), _whole(found[2]))
            return None
        if (found := _ENDLESS.match(line)) is not None:
            step = _whole(found[2])
            return KnownStep(step, None, "bar") if step is not None and _TRAINING.fullmatch(found[1].strip()) else None
        return self._printed(line)

    def _printed(self, line: str) -> KnownStep | None:
        if _LOSS.search(line) is None:
            if (total := _TOTAL.search(line)) is not None:
                self._total = _whole(total[1])
            return None
        for pattern in _IN_EPOCH:
            if (found := pattern.search(line)) is not None:
                return self._in_epoch(*map(_whole, found.groups()))
        counted = _COUNTED.search(line)
        return None if counted is None else self._counter(_whole(counted[1]), _whole(counted[2]))

    def _counter(self, step: int | None, total: int | None) -> KnownStep | None:
        if step is None or (total is not None and step > total):
            return None
        if total is None and self._total is not None and step <= self._total:
            total = self._total
        return KnownStep(step, total, "counter")

    def _bar(self, label: str, step: int | None, total: int | None) -> KnownStep | None:
        epoch = _EPOCH.match(label) or _YOLO_EPOCH.match(label)
        if epoch is not None:
            return self._in_epoch(_whole(epoch[1]), _whole(epoch[2]), step, total)
        if step is None or total is None or step > total or not _TRAINING.fullmatch(label):
            return None
        return KnownStep(step, total, f"bar of {total}")

    def _in_epoch(self, epoch: int | None, epochs: int | None, step: int | None, total: int | None) -> KnownStep | None:
        """Return the step over all epochs. They count from 0 where their number is not given, or where there was one `0/9`."""
        if epoch is None or step is None or total is None or step > total:
            return None
        self._from_zero = self._from_zero or epoch == 0 or epochs is None
        done = epoch if self._from_zero else epoch - 1
        if epochs is not None and self._from_zero:
            epochs += 1  # Lightning and YOLOv5 name the last epoch
        return KnownStep(done * total + step, None if epochs is None else epochs * total, f"epochs of {total}")


def _whole(text: str | None) -> int | None:
    digits = (text or "").replace(",", "").replace("_", "")
    return int(digits) if digits.isdecimal() and len(digits) <= 15 else None


_READ_BYTES: Final = 256 * 1024
BATCH_SECONDS: Final = 0.25
DEADLINE_SECONDS: Final = 2.0
MAX_LINES: Final = 1000
LINE_CHARACTERS: Final = 1000
_STEP_SEARCH: Final = """
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
        batch_seconds: float = BATCH_SECONDS,
        search_program: str = _STEP_SEARCH,
    ) -> None:
        self._search_program = search_program
        self._batch_seconds = batch_seconds
        self._closing = asyncio.Event()
        self._deadline_seconds = deadline_seconds
        self._pattern = pattern
        self._previous = previous_step
        self._warn = warn
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._found: ProgressSnapshot | None = None
        self._clock = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._given_up = False
        self._known = KnownLines()
        self._kind = ""

    def feed(self, line: str) -> None:
        """Add a printed line. Called in the event loop's thread."""
        if self._given_up or (not self._pattern and not may_match(line)):
            return
        self._lines.append(line[:LINE_CHARACTERS])
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
        """End the search after the lines added so far, without a pause: the rank's next attempt waits for this."""
        self._closing.set()
        if self._task is not None:
            await self._task
        self._given_up = True
        await self._end()

    async def _pause(self) -> None:
        """Let lines gather, so that they are searched together."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._batch_seconds):
                await self._closing.wait()

    async def _search(self) -> None:
        while self._lines and not self._given_up:
            batch = list(self._lines)
            self._lines.clear()
            if not self._pattern:
                self._recognise(batch)
                await self._pause()
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
                await self._pause()

    def _recognise(self, batch: list[str]) -> None:
        """Take the newest known line; skip a bar or counter of another kind than the first: it belongs to an evaluation."""
        newest: KnownStep | None = None
        for line in batch:
            found = self._known.step(line)
            if found is not None and found.kind == (self._kind or found.kind):
                self._kind, newest = found.kind, found
        if newest is not None:
            self._take(newest.step, newest.total)

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


SEARCH_SECONDS: Final = 2.0
"""Processor time of the whole search."""
PATIENCE_SECONDS: Final = 30.0
"""Longest time that the end of a rank waits for the search, where the machine gives the search no processor time."""
POLICY_CHARACTERS: Final = 64 * 1024
_POLICY_SEARCH: Final = """
import json, re, signal, sys
seconds, patterns, text = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # nothing catches its signal: a search does not come back to Python
for number, pattern in enumerate(patterns):
    print("at", number, flush=True)
    if re.search(pattern, text):
        print("found", number, flush=True)
        break
"""


async def match_policies(
    policies: Sequence[tuple[str, str]],
    text: str,
    *,
    seconds: float = SEARCH_SECONDS,
    patience: float = PATIENCE_SECONDS,
) -> tuple[str, PoliciesLeftOut | None]:
    """Return the action of the first of ``policies`` (pattern, action) that matches the end of ``text``; empty when none does.

    A search that takes more than ``seconds`` of processor time, or whose process does not end within ``patience``, is ended. After
    that or an error the action is empty and the second part gives the reason.
    """
    if not policies:
        return "", None
    question = json.dumps([seconds, [pattern for pattern, _ in policies], text[-POLICY_CHARACTERS:]])
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _POLICY_SEARCH),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:  # no process can be started: the rank's end is reported anyway
        return "", PoliciesLeftOut(said=error.strerror or "")
    assert process.stdin is not None
    assert process.stdout is not None
    last = ["", "0"]
    try:
        async with asyncio.timeout(patience):
            process.stdin.write(question.encode())
            process.stdin.close()
            async for line in process.stdout:
                last = line.decode().split()
            code = await process.wait()
    except TimeoutError:
        return "", PoliciesLeftOut(seconds=patience)
    except (OSError, ConnectionError):
        return "", PoliciesLeftOut()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == -signal.SIGVTALRM and last[0] != "found":
        return "", PoliciesLeftOut(pattern=policies[int(last[1])][0], seconds=seconds)
    return (policies[int(last[1])][1], None) if last[0] == "found" else ("", None)


class RankOutput:
    """Writes a rank's output to its log, and finds steps in it.

    ``masker`` keeps secrets out of the log; ``progress_pattern`` is the job's `health.progress`, or empty.
    """

    def __init__(
        self,
        path: Path,
        *,
        masker: Masker,
        limits: LogLimits,
        progress_pattern: str,
        previous_step: int,
        drawn_seconds: float = DRAWN_SECONDS,
    ) -> None:
        self._progress = LogProgress(progress_pattern, previous_step, lambda line: self.note([line]))
        self._drawn_seconds = drawn_seconds
        self._log: LogWriter | None = LogWriter(
            path, masker=masker, limits=limits, listener=self._progress.feed, drawn_seconds=drawn_seconds
        )
        self._pipes: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._shown: Callable[[bytes], None] | None = None

    @property
    def lost(self) -> str | None:
        """Return why lines are missing from the log, if any are; None once it is closed."""
        return self._log.lost if self._log else None

    @property
    def lines(self) -> int:
        """Return how many lines were printed; 0 once the log is closed."""
        return self._log.lines if self._log else 0

    @property
    def tail(self) -> tuple[str, ...]:
        """Return the last lines."""
        return self._log.tail if self._log else ()

    def note(self, lines: Sequence[str]) -> None:
        """Write ``lines`` from orch into the log."""
        if self._log is not None:
            self._log.note(lines, time.time())

    def over(self, snapshot: ProgressSnapshot) -> ProgressSnapshot:
        """Return the progress, with steps found in the output where the script reports none."""
        return self._progress.over(snapshot)

    async def last_progress(self) -> ProgressSnapshot:
        """Return the last printed step, once all lines have been searched; search no later lines. A guess is left out."""
        await self._progress.close()
        return ProgressSnapshot() if self._progress.guessed else self._progress.over(ProgressSnapshot())

    def show(self, shown: Callable[[bytes], None]) -> None:
        """Call ``shown`` with all that is read from now on."""
        self._shown = shown

    def listen(self, stdout: int, stderr: int | None = None) -> None:
        """Read from these non-blocking pipes until their ends; a terminal has one for both streams."""
        loop = asyncio.get_running_loop()
        for read_end, stream in ((stdout, "o"), *(() if stderr is None else ((stderr, "e"),))):
            self._pipes[read_end] = stream
            loop.add_reader(read_end, self._read, read_end)

    def drain(self) -> None:
        """Read all that a process wrote to the pipes before it died."""
        for pipe in list(self._pipes):
            while self._take(pipe):
                pass

    def end_lines(self) -> None:
        """Write all that the rank has printed, also an unfinished last line: no process of it is left."""
        self.drain()
        if self._log is not None:
            self._log.end_lines(time.time())

    async def close(self) -> None:
        """Close the pipes, then the log, once its lines have been searched."""
        for pipe in list(self._pipes):
            self._forget(pipe)
        if self._timer is not None:
            self._timer.cancel()
        await self._progress.close()
        if self._log is not None:
            self._log.close(time.time())
            self._log = None

    def _read(self, pipe: int) -> None:
        if self._take(pipe) is None:
            self._forget(pipe)

    def _take(self, pipe: int) -> bool | None:
        """Return whether there was something; None at the end of the file."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose programs have ended
            return None
        if data and self._log is not None:
            self._log.feed(self._pipes[pipe], data, time.time())
            self._wait_for_unfinished()
        if data and self._shown is not None:
            self._shown(data)
        return True if data else None

    def _wait_for_unfinished(self) -> None:
        if self._timer is None and self._log is not None and self._log.is_unfinished:
            self._timer = asyncio.get_running_loop().call_later(self._drawn_seconds, self._write_unfinished)

    def _write_unfinished(self) -> None:
        self._timer = None
        if self._log is not None:
            self._log.write_unfinished(time.time())
            self._wait_for_unfinished()

    def _forget(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        del self._pipes[pipe]
        os.close(pipe)
