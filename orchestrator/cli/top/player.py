"""Plays a recording as a source of frames, with a position, a speed and a pause.

The position is computed from the clock on each access; nothing runs in the background.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from orchestrator.cli.render.gpus import balance_line
from orchestrator.cli.top.frames import HISTORY, Frame
from orchestrator.core.thresholds import BALANCE_SECONDS
from orchestrator.gpu.load import GpuLoad, balance, mean_load
from orchestrator.gpu.recording.reading import RecordedSample
from orchestrator.gpu.row import GpuRow
from orchestrator.gpu.sampler import Health
from orchestrator.units import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.gpu.recording.reading import Recording

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1000.0)
SILENT_SECONDS: Final = 5.0
SILENT_PERIODS: Final = 10.0
MAX_BALANCED: Final = 240
"""Most samples of each GPU in the balance of one frame."""


class _Track:
    """One GPU's samples, by time."""

    def __init__(self, key: str, samples: Sequence[RecordedSample]) -> None:
        self.key = key
        self.samples = samples
        self.times = [sample.elapsed_seconds for sample in samples]
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        self.silent = max(SILENT_SECONDS, SILENT_PERIODS * (statistics.median(gaps) if gaps else 0.0))

    def until(self, position: float) -> int:
        """Return the number of samples up to this position."""
        return bisect_right(self.times, position)


class Player:
    """Plays a recording with at least one sample, from `start` seconds on. `clock` is monotonic."""

    def __init__(
        self,
        recording: Recording,
        *,
        start: float = 0.0,
        speed: float = 1.0,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recording = recording
        self._name = name or recording.source.name
        self._clock = clock
        groups: dict[tuple[int, str], list[RecordedSample]] = {}
        for sample in recording.samples:
            groups.setdefault((sample.gpu_index, sample.gpu_uuid or ""), []).append(sample)
        self._tracks = [_Track(uuid or f"GPU {index}", groups[index, uuid]) for index, uuid in sorted(groups)]
        self._times = sorted({time for track in self._tracks for time in track.times})
        self._begun = recording.samples[0].timestamp - recording.samples[0].elapsed_seconds
        self.end = self._times[-1]
        self.speed = speed
        self.playing = True
        self._from = min(max(0.0, start), self.end)
        self._since = clock()
        self._made: tuple[tuple[float, bool, float], Frame] | None = None

    @property
    def position(self) -> float:
        """Seconds since the recording's first sample; stays at the end."""
        if not self.playing:
            return self._from
        return min(self.end, self._from + (self._clock() - self._since) * self.speed)

    def seek(self, position: float) -> None:
        """Go to this position, within the bounds of the recording."""
        self._from = min(max(0.0, position), self.end)
        self._since = self._clock()

    def skip(self, seconds: float) -> None:
        """Go forward, or back for negative ``seconds``."""
        self.seek(self.position + seconds)

    def toggle(self) -> None:
        """Pause or play; at the end, play from the beginning."""
        again = self.playing is False and self._from >= self.end
        self.seek(0.0 if again else self.position)
        self.playing = not self.playing

    def step(self, direction: int) -> None:
        """Pause at the next sample, or (direction -1) at the previous one."""
        here = self.position
        self.playing = False
        if direction > 0:
            after = bisect_right(self._times, here)
            self.seek(self._times[min(after, len(self._times) - 1)])
        else:
            before = bisect_right(self._times, here) - 1
            if self._times[before] >= here:
                before -= 1
            self.seek(self._times[max(0, before)])

    def faster(self, direction: int) -> None:
        """Take the next higher or (direction -1) lower speed."""
        self.seek(self.position)
        others = [one for one in SPEEDS if (one > self.speed if direction > 0 else one < self.speed)]
        if others:
            self.speed = min(others) if direction > 0 else max(others)

    @property
    def frame(self) -> Frame:
        """Frame at the present position: the same object as long as nothing changes."""
        position = self.position
        shown = bisect_right(self._times, position) - 1
        key = (self._times[shown], self.playing and position < self.end, self.speed)
        if self._made is None or self._made[0] != key:
            self._made = (key, self._frame(position))
        return self._made[1]

    def _frame(self, position: float) -> Frame:
        rows, notes = [], []
        history: dict[str, tuple[float | None, ...]] = {}
        watts: dict[str, tuple[float | None, ...]] = {}
        for track in self._tracks:
            count = track.until(position)
            newest = track.samples[count - 1] if count else None
            past = track.samples[max(0, count - HISTORY) : count]
            history[track.key] = tuple(sample.utilization for sample in past)
            watts[track.key] = tuple(sample.power_watts for sample in past)
            rows.append(_row(track, newest, position))
        training = next((t.samples[n - 1].training for t in self._tracks if (n := t.until(position))), {})
        if training:
            notes.append("training: " + ", ".join(f"{key} {value}" for key, value in training.items()))
        if self._recording.repaired:
            notes.append("the end of the file is cut off and left out")
        if self._recording.dropped:
            notes.append(f"{self._recording.dropped} entries of the file cannot be read and are left out")
        return Frame(
            at=self._begun + position,
            rows=tuple(rows),
            history=history,
            power_history=watts,
            problems=tuple(notes),
            title=self.title(position),
            origin=self._balance(position),
        )

    def title(self, position: float) -> str:
        """Return name, state or speed, and position in one line."""
        state = "paused" if not self.playing else "end" if position >= self.end else f"{self.speed:g}x"
        return f"{self._name}  {state}  {elapsed(position, tenths=True)} of {elapsed(self.end, tenths=True)}"

    def _balance(self, position: float) -> str:
        """Return the balance of all recorded GPUs over the last minute, as for a job that holds them."""
        loads: dict[str, GpuLoad | None] = {}
        for track in self._tracks:
            first = bisect_right(track.times, position - BALANCE_SECONDS)
            until = track.until(position)
            samples = track.samples[first : until : max(1, math.ceil((until - first) / MAX_BALANCED))]
            loads[track.key] = mean_load([_load(sample) for sample in samples])
        text, _ = balance_line(balance(loads).to_json())
        return f"balance {text}" if text else "recording"


def _load(sample: RecordedSample) -> GpuLoad:
    used = None if sample.memory_used_bytes is None else float(sample.memory_used_bytes)
    return GpuLoad(utilization=sample.utilization, memory=used, power=sample.power_watts)


def _row(track: _Track, sample: RecordedSample | None, position: float) -> GpuRow:
    identity = sample or track.samples[0]
    silent = sample is not None and position - sample.elapsed_seconds > track.silent
    known = sample if sample is not None and not silent else None
    values = known or RecordedSample(timestamp=0.0, elapsed_seconds=0.0, gpu_index=identity.gpu_index)
    clocks = dict(values.clocks)
    return GpuRow(
        gpu_uuid=track.key,
        node="",
        index=identity.gpu_index,
        vendor=identity.vendor or "",
        model=identity.gpu_name or "",
        health=Health.STALE if silent else Health.OK if sample is not None else Health.STARTING,
        problem=None if not silent or sample is None else f"no sample for {position - sample.elapsed_seconds:.0f} s",
        sampled_at=None if known is None else known.timestamp,
        utilization_ratio=values.utilization,
        memory_used_bytes=values.memory_used_bytes,
        memory_total_bytes=identity.memory_total_bytes,
        power_watts=values.power_watts,
        power_limit_watts=values.power_limit_watts,
        energy_joules=values.energy_joules,
        temperature_celsius=values.temperature_celsius,
        fan_ratio=values.fan,
        sm_clock_hertz=clocks.get("sm", clocks.get("graphics")),
        memory_clock_hertz=clocks.get("memory"),
        throttle=values.throttle,
    )
