"""Records GPUs into files, at 0.01 to 1000 hertz.

Each GPU has a sampling thread on common deadlines; they pass readings to one writer thread, which combines the readings
of a tick, formats them a few at a time (formatting a second's worth at once would delay the samplers), and writes them
to the files once a second. A GPU that hangs leaves its cells empty; the rows of the others are written on time. A full
disk stops the writing, not the sampling, and is reported at the end.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.gpu.recording import rows
from orchestrator.gpu.recording.files import JsonArrayFile, LineFile
from orchestrator.gpu.sampler import Reading, Sampler, SamplerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from orchestrator.gpu.sample import GpuInfo, GpuReader, Sample
    from orchestrator.gpu.sampler import Reading


FORMAT_ROWS: Final = 5
"""About this many rows are formatted at a time: waking up costs, and formatting many at once delays the samplers."""
FORMAT_SECONDS: Final = (0.02, 0.25)
"""The shortest and the longest pause between two times of formatting."""
TRAINING_VARIABLE: Final = "ORCH_TRAINING_METADATA"
"""Names the file of a recorded command's labels: a JSON object of epoch, batch and phase, replaced by a rename."""
LEAD_SECONDS: Final = 0.1


def no_training() -> Mapping[str, Any]:
    """Return no labels: the default for a run without them."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Options of a recording: into `directory`, at `rate` hertz, as CSV with these columns, or as JSON.

    `training` returns the run's labels (epoch, batch, phase) and must be fast; `started` (local time) is in the files'
    names. Waiting rows are written every `flush_seconds`; a row waits `grace_seconds` for a late GPU before it is
    written without it. `gpu` is the index of the GPU in the single-GPU file, by default the first one's; `stats_file`
    is that file's name, in `directory`.
    """

    directory: Path = field(default_factory=Path)
    name: str = "run"
    rate: float = 1.0
    csv: bool = False
    columns: tuple[str, ...] = rows.BASE_COLUMNS
    training: Callable[[], Mapping[str, Any]] = no_training
    started: dt.datetime = field(default_factory=dt.datetime.now)  # local time, as in the names
    flush_seconds: float = 1.0
    grace_seconds: float = 0.5
    gpu: int | None = None
    stats_file: str | None = None

    def validate(self) -> None:
        """Raise ValueError for options that cannot be recorded, with the reason."""
        if self.csv and (self.gpu is not None or self.stats_file is not None):
            raise ValueError("a GPU and a file name are chosen for the JSON file; a CSV file has every GPU.")
        name = self.stats_file
        if name is not None and (not name.endswith(".json") or len(name) > 200 or any(bad in name for bad in "/\0")):
            raise ValueError(
                f"the file name {name[:200]!r} cannot be used; give one like gpu_stats.json, without a directory."
            )
        if not 0.01 <= self.rate <= 1000.0:
            raise ValueError(f"a rate of {self.rate:g} Hz cannot be recorded; give 0.01 to 1000.")
        unknown = [column for column in self.columns if column not in rows.COLUMNS]
        if unknown:
            known = ", ".join(rows.COLUMNS)
            raise ValueError(f"unknown column {', '.join(unknown)}; there are: {known}.")
        if not self.name or any(letter in self.name for letter in "/\0"):
            raise ValueError(f"the name {self.name!r} cannot be part of a file's name.")


class Recorder:
    """Records these GPUs from `start` to `stop`."""

    def __init__(self, readers: Sequence[GpuReader], options: RecordOptions) -> None:
        """Prepare the recording. Raises ValueError for invalid options and without any GPU."""
        options.validate()
        if not readers:
            raise ValueError("there is no GPU to record. `orch gpus` lists them; --simulate-gpus N simulates some.")
        self._options = options
        self._infos = tuple(reader.info for reader in readers)
        _place_of(options.gpu, self._infos)
        self._queues: dict[str, deque[Reading]] = {info.uuid: deque() for info in self._infos}
        self._samplers = tuple(
            Sampler(reader, rate=options.rate, on_reading=self._queues[reader.info.uuid].append) for reader in readers
        )
        self._group = SamplerGroup(self._samplers)
        self.stats = RecordStats(self._infos, options.rate)
        self.problem: str | None = None
        """The reason why rows were lost; None while none were."""
        self._sinks: list[_Sink] = []
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._run, name="orch-recorder", daemon=True)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are written, once started."""
        return tuple(sink.path for sink in self._sinks)

    def start(self) -> None:
        """Create the files and begin. Raises OSError when a file cannot be created."""
        self._options.directory.mkdir(parents=True, exist_ok=True)
        self._sinks = _open_sinks(self._options, self._infos)
        self._assembly = _Assembly(self._infos, self._queues)
        self._group.start(LEAD_SECONDS)
        self._writer.start()

    def stop(self) -> RecordStats:
        """End the recording, write the rest, close the files."""
        self._group.stop()
        self._stop.set()
        self._writer.join()
        self.stats.missed = sum(sampler.missed for sampler in self._samplers)
        return self.stats

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _run(self) -> None:
        flushed = time.monotonic()
        least, most = FORMAT_SECONDS
        pause = min(most, max(least, FORMAT_ROWS / self._options.rate))
        while not self._stop.wait(pause):
            self._take(time.monotonic() - self._options.grace_seconds)
            if time.monotonic() - flushed >= self._options.flush_seconds:
                self._flush()
                flushed = time.monotonic()
        self._take(float("inf"))
        self._flush()
        for sink in self._sinks:
            sink.close()

    def _take(self, overdue: float) -> None:
        """Format every tick that is complete, or was due before `overdue` (monotonic seconds)."""
        training = self._options.training()
        for tick, readings in self._assembly.rows(overdue):
            for reading in readings.values():
                self.stats.add(reading)
            first = min(reading.sample.timestamp for reading in readings.values())
            elapsed = tick / self._options.rate
            for sink in self._sinks:
                sink.add(first, elapsed, self._assembly.views, training)

    def _flush(self) -> None:
        for sink in self._sinks:
            try:
                sink.flush()
            except OSError as error:
                self.problem = f"{sink.path}: {error.strerror}; rows were lost. Free some space and record again."


class _Assembly:
    """Combines the readings of one tick."""

    def __init__(self, infos: Sequence[GpuInfo], queues: Mapping[str, deque[Reading]]) -> None:
        self.views = tuple(rows.View(info) for info in infos)
        self._queues = queues
        self._written = -1

    def rows(self, overdue: float) -> Iterator[tuple[int, dict[str, Reading]]]:
        """Yield (tick, readings by UUID) of every tick that all GPUs have passed or that is overdue; `views` then show it."""
        while any(self._queues.values()):
            heads = [queue[0] for queue in self._queues.values() if queue]
            tick = min(head.tick for head in heads)
            waiting = len(heads) < len(self._queues)
            if waiting and min(head.sample.monotonic for head in heads) > overdue:
                return
            readings = {
                uuid: queue.popleft() for uuid, queue in self._queues.items() if queue and queue[0].tick == tick
            }
            if tick <= self._written:
                continue  # a GPU that hung returned with a tick whose row is already written
            self._written = tick
            for view in self.views:
                view.update(readings.get(view.info.uuid))
            yield tick, readings


Formatter = Callable[[float, float, Sequence[rows.View], Mapping[str, Any]], str | None]
"""Builds a row's text from its time (Unix), seconds since the start, the GPUs and the run's labels; None for no row."""


class _Sink:
    """A file with rows that are not written yet."""

    def __init__(self, file: LineFile | JsonArrayFile, formatter: Formatter) -> None:
        self.path = file.path
        self._file = file
        self._format = formatter
        self._pending: list[str] = []

    def add(self, timestamp: float, elapsed: float, views: Sequence[rows.View], training: Mapping[str, Any]) -> None:
        """Format the row of one tick."""
        text = self._format(timestamp, elapsed, views, training)
        if text is not None:
            self._pending.append(text)

    def flush(self) -> None:
        """Write the rows to the file. On a full disk raises OSError, and drops those rows."""
        pending, self._pending = self._pending, []
        self._file.append(pending)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _place_of(gpu: int | None, infos: Sequence[GpuInfo]) -> int:
    """Return the position of the single-GPU file's GPU among the recorded ones. Raises ValueError for another GPU."""
    indices = [info.index for info in infos]
    if gpu is None:
        return 0
    if gpu not in indices:
        raise ValueError(f"there is no GPU {gpu} to record; there are: {', '.join(map(str, sorted(indices)))}.")
    return indices.index(gpu)


def _single_formatter(place: int) -> Formatter:
    """Return the formatter of the single-GPU form for the GPU at `place`, as gputop's own file has the selected one."""

    def row(timestamp: float, elapsed: float, views: Sequence[rows.View], training: Mapping[str, Any]) -> str | None:
        view = views[place]
        return None if view.power is None else json.dumps(rows.single_entry(timestamp, elapsed, view, training))

    return _from_a_whole_row(row, lambda views: views[place : place + 1])


def _from_a_whole_row(formatter: Formatter, shown: Callable[[Sequence[rows.View]], Sequence[rows.View]]) -> Formatter:
    """Return a formatter whose rows begin when every shown GPU has a utilization (a rate of two readings), or after 2 s."""
    begun = False

    def row(timestamp: float, elapsed: float, views: Sequence[rows.View], training: Mapping[str, Any]) -> str | None:
        nonlocal begun
        if not begun and elapsed < rows.CARRY_SECONDS:
            loads = [view.load for view in shown(views)]
            if any(load is None or load.utilization is None for load in loads):
                return None
        begun = True
        return formatter(timestamp, elapsed, views, training)

    return row


def _multi_row(timestamp: float, elapsed: float, views: Sequence[rows.View], training: Mapping[str, Any]) -> str:
    return json.dumps(rows.multi_entry(timestamp, elapsed, views, training))


def _csv_formatter(columns: Sequence[str]) -> Formatter:
    cells = tuple(rows.COLUMNS[column] for column in columns)

    def row(timestamp: float, elapsed: float, views: Sequence[rows.View], training: Mapping[str, Any]) -> str:
        del training  # the power log has no place for it
        return rows.csv_row(timestamp, elapsed, views, cells)

    return row


def _open_sinks(options: RecordOptions, infos: Sequence[GpuInfo]) -> list[_Sink]:
    stamp = options.started.strftime("%Y%m%d_%H%M%S")
    if options.csv:
        file = LineFile(options.directory / f"gpu_metrics_{stamp}.csv", rows.csv_header(infos, options.columns))
        return [_Sink(file, _csv_formatter(options.columns))]
    base = (options.stats_file or f"gpu_stats_{options.name}_{stamp}.json").removesuffix(".json")
    single = _single_formatter(_place_of(options.gpu, infos))
    sinks = [_Sink(JsonArrayFile(options.directory / f"{base}.json"), single)]
    if len(infos) > 1:
        multi = _from_a_whole_row(_multi_row, lambda views: views)
        sinks.append(_Sink(JsonArrayFile(options.directory / f"{base}_multi_gpu.json"), multi))
    return sinks


class TrainingFile:
    """Labels of a run, from a small JSON file that the run replaces; see `TRAINING_VARIABLE`."""

    def __init__(self, path: Path) -> None:
        """Follow the file at `path`, which need not exist."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._latest: Mapping[str, Any] = {}

    def __call__(self) -> Mapping[str, Any]:
        """Return the last reported epoch, batch and phase; empty without a valid report."""
        try:
            status = self._path.stat()
        except OSError:
            return self._latest
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                document = json.loads(self._path.read_bytes())
            except (OSError, ValueError):
                return self._latest
            self._latest = document if isinstance(document, dict) else {}
        return self._latest


_FINEST_SECONDS: Final = 1e-6
_STEP: Final = math.log(1.05)
_GAP_SECONDS: Final = 5.0
"""Power is not integrated across a longer gap, in which its values are unknown."""


class Quantiles:
    """Quantiles of times (seconds), to 5 %."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        """Add a time; one below a microsecond counts as zero."""
        bucket = 0 if seconds < _FINEST_SECONDS else 1 + int(math.log(seconds / _FINEST_SECONDS) / _STEP)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.maximum = max(self.maximum, seconds)

    def quantile(self, share: float) -> float:
        """Return the time that `share` of the times do not exceed; 0 when there are none."""
        left = share * self.count
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                upper = 0.0 if bucket == 0 else _FINEST_SECONDS * math.exp(bucket * _STEP)
                return min(upper, self.maximum)
        return self.maximum


@dataclass(slots=True)
class GpuStats:
    """Statistics of one GPU."""

    info: GpuInfo
    samples: int = 0
    fresh: int = 0
    first: float | None = None
    last: float | None = None
    integral_joules: float = 0.0
    _previous: tuple[float, float] | None = None
    _counter: list[tuple[float, float]] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples += 1
        self.fresh += sample.fresh
        self.first = sample.monotonic if self.first is None else self.first
        self.last = sample.monotonic
        self._integrate(sample)

    def _integrate(self, sample: Sample) -> None:
        if sample.power_watts is not None:
            now = (sample.monotonic, sample.power_watts)
            if self._previous is not None and now[0] - self._previous[0] <= _GAP_SECONDS:
                self.integral_joules += (now[0] - self._previous[0]) * (now[1] + self._previous[1]) / 2
            self._previous = now
        if sample.energy_joules is not None:
            pair = (sample.energy_joules, self.integral_joules)
            self._counter = [self._counter[0] if self._counter else pair, pair]

    @property
    def counter_joules(self) -> float | None:
        """Energy by the hardware's counter, between its first and its last reading."""
        return self._counter[1][0] - self._counter[0][0] if self._counter else None

    @property
    def integral_joules_beside_counter(self) -> float | None:
        """Return the integral of power between the same two moments, to compare with the counter."""
        return self._counter[1][1] - self._counter[0][1] if self._counter else None

    @property
    def seconds(self) -> float:
        """Seconds from the first sample to the last."""
        return 0.0 if self.first is None or self.last is None else self.last - self.first

    @property
    def rate(self) -> float:
        """Samples a second; 0 for fewer than two."""
        return (self.samples - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def fresh_rate(self) -> float:
        """Return new values of the power sensor per second."""
        # The first sample is new by definition, and begins the span that the others fill.
        return max(0, self.fresh - 1) / self.seconds if self.seconds > 0 else 0.0


class RecordStats:
    """Statistics of a recording over all its GPUs."""

    def __init__(self, infos: tuple[GpuInfo, ...], wanted_rate: float) -> None:
        """Start the statistics of these GPUs, which are sampled at `wanted_rate` hertz."""
        self.wanted_rate = wanted_rate
        self.gpus = {info.uuid: GpuStats(info) for info in infos}
        self.lateness = Quantiles()
        self.missed = 0

    def add(self, reading: Reading) -> None:
        """Add a reading."""
        self.lateness.add(max(0.0, reading.lateness))
        self.gpus[reading.sample.gpu_uuid].add(reading.sample)

    def as_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values; times in seconds, rates in hertz, energy in joules."""
        return {
            "wanted_rate_hz": self.wanted_rate,
            "missed_ticks": self.missed,
            "jitter_seconds": {
                "p50": self.lateness.quantile(0.5),
                "p99": self.lateness.quantile(0.99),
                "max": self.lateness.maximum,
            },
            "gpus": [
                {
                    "gpu_uuid": gpu.info.uuid,
                    "gpu_index": gpu.info.index,
                    "samples": gpu.samples,
                    "achieved_rate_hz": gpu.rate,
                    "distinct_value_rate_hz": gpu.fresh_rate,
                    "energy_counter_joules": gpu.counter_joules,
                    "energy_integral_joules": gpu.integral_joules_beside_counter,
                }
                for gpu in self.gpus.values()
            ],
        }

    def text(self) -> str:
        """Return the statistics as text."""
        jitter = self.lateness
        lines = [
            (
                f"requested {self.wanted_rate:g} Hz; jitter p50 {jitter.quantile(0.5) * 1e3:.2f} ms,"
                f" p99 {jitter.quantile(0.99) * 1e3:.2f} ms, max {jitter.maximum * 1e3:.2f} ms;"
                f" {self.missed} ticks missed"
            )
        ]
        for gpu in self.gpus.values():
            line = f"GPU {gpu.info.index}: {gpu.rate:.2f} samples/s, {gpu.fresh_rate:.2f} new power values/s"
            counted, integral = gpu.counter_joules, gpu.integral_joules_beside_counter
            if counted is not None and integral is not None:
                line += f", energy {counted:.1f} J by the counter, {integral:.1f} J by integrating power"
            elif gpu.integral_joules > 0:
                line += f", energy {gpu.integral_joules:.1f} J by integrating power (no counter)"
            lines.append(line)
        return "\n".join(lines)
