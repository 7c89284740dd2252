"""Reads a run from a path (a job's directory, its telemetry, a recording of orch or gputop) into columns of numbers by GPU and the training's reports.

Base units; an unmeasured value is NaN, never 0. Times are Unix time, in rising order. Telemetry is read in columns: a day of eight GPUs is
690,000 rows, too many for an object each. The job can write to its directory: every value is validated, sizes are limited, rows that were
truncated by a crash are skipped.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.gpu.recording.job_record import COLUMNS, read_identity
from orchestrator.gpu.recording.reading import RecordingError, read_recording
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from orchestrator.gpu.recording.job_record import GpuIdentity
    from orchestrator.gpu.recording.reading import RecordedSample

Floats = NDArray[np.float64]


class Quantity(enum.StrEnum):
    """A measured quantity of a GPU over time."""

    UTILIZATION = "utilization"
    MEMORY = "memory"
    POWER = "power"
    TEMPERATURE = "temperature"
    CLOCK = "clock"
    FAN = "fan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The display of a quantity: its name, its unit, and the factor from base units to that unit."""

    name: str
    unit: str
    factor: float


SHOWN: Final = {
    Quantity.UTILIZATION: Shown(name="utilization", unit="%", factor=100.0),
    Quantity.MEMORY: Shown(name="memory", unit="MiB", factor=1.0 / 2**20),
    Quantity.POWER: Shown(name="power", unit="W", factor=1.0),
    Quantity.TEMPERATURE: Shown(name="temperature", unit="°C", factor=1.0),
    Quantity.CLOCK: Shown(name="SM clock", unit="MHz", factor=1e-6),
    Quantity.FAN: Shown(name="fan", unit="%", factor=100.0),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuSeries:
    """One GPU: ``values`` and ``energy_joules`` (the hardware's counter) have one entry for each of ``times``.

    ``label`` distinguishes it from the run's other GPUs: GPU 3, with a prefix of its UUID where two nodes have a GPU 3.
    """

    label: str
    index: int
    model: str = ""
    uuid: str = ""
    vendor: str = ""
    times: Floats
    values: Mapping[Quantity, Floats]
    energy_joules: Floats
    memory_total_bytes: float | None = None
    power_limit_watts: float | None = None
    temperature_limit_celsius: float | None = None
    throttled: int = 0

    def shown(self, quantity: Quantity) -> Floats:
        """Return the values of a quantity in its display unit; all NaN where it was not measured."""
        found = self.values.get(quantity)
        return np.full(len(self.times), np.nan) if found is None else found * SHOWN[quantity].factor

    def has(self, quantity: Quantity) -> bool:
        """Whether the quantity has any value."""
        found = self.values.get(quantity)
        return found is not None and bool(np.isfinite(found).any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """The training's reports, one entry for each of ``times``: totals so far, the mean step time, its metrics."""

    times: Floats
    attempts: Floats
    steps: Floats
    samples: Floats
    tokens: Floats
    step_seconds: Floats
    epochs: Floats
    phases: tuple[str, ...]
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    total_steps: int | None = None

    def best(self, *names: str) -> tuple[str, float] | None:
        """Return the name and the largest value of the first of these metrics that was reported."""
        for name in names:
            values = self.metrics.get(name)
            if values is not None and np.isfinite(values).any():
                return name, float(np.nanmax(values))
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A job or a recording: its GPUs and its progress.

    ``dropped`` counts invalid entries; ``repaired`` says that a truncated end of a file was left out.
    """

    name: str
    sources: tuple[Path, ...]
    gpus: tuple[GpuSeries, ...]
    progress: Progress | None = None
    dropped: int = 0
    repaired: bool = False

    @property
    def start(self) -> float | None:
        """Unix time of the first sample of any GPU, or of the first report where no GPU was sampled."""
        return min((float(times[0]) for times in self._times()), default=None)

    @property
    def end(self) -> float | None:
        """Unix time of the last sample or report."""
        return max((float(times[-1]) for times in self._times()), default=None)

    @property
    def seconds(self) -> float:
        """Return the time from the first sample to the last: by their times, not by their number."""
        return 0.0 if self.start is None or self.end is None else self.end - self.start

    def _times(self) -> list[Floats]:
        sampled = [gpu.times for gpu in self.gpus if len(gpu.times)]
        if not sampled and self.progress is not None and len(self.progress.times):
            return [self.progress.times]
        return sampled

    @property
    def samples(self) -> int:
        """Number of readings of all GPUs."""
        return sum(len(gpu.times) for gpu in self.gpus)


BLOCK_ROWS: Final = 50_000
_NUMBERS: Final = (0, 1, 2, 3, 4, 5, 6)
_AFTER_THROTTLE: Final = len(COLUMNS) - COLUMNS.index("throttle")
"""Number of splits from a row's end after which the throttle reasons are in the second place."""
_COMMAS: Final = len(COLUMNS) - 1
_HEADER: Final = f"{COLUMNS[0]},"
_COLUMN_OF: Final = {
    Quantity.UTILIZATION: COLUMNS.index("utilization"),
    Quantity.MEMORY: COLUMNS.index("memory_used_bytes"),
    Quantity.POWER: COLUMNS.index("power_watts"),
    Quantity.TEMPERATURE: COLUMNS.index("temperature_celsius"),
    Quantity.CLOCK: COLUMNS.index("sm_clock_hertz"),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """The numbers of complete rows, how many were throttled, and how many rows were incomplete."""

    numbers: Floats
    throttled: int
    dropped: int


def read_telemetry(directory: Path) -> tuple[tuple[GpuSeries, ...], int]:
    """Return the GPUs of a job's telemetry, and the number of incomplete rows. Raises OSError for an unreadable file."""
    found = []
    dropped = 0
    for path in sorted(directory.glob("telemetry-*.csv")):
        rows = _read(path)
        dropped += rows.dropped
        if len(rows.numbers):
            found.append((read_identity(path), rows))
    indices = [identity.index for identity, _ in found]
    gpus = [
        _job_series(identity, rows, shared=indices.count(identity.index) > 1)
        for identity, rows in sorted(found, key=lambda one: (one[0].index, one[0].uuid))
    ]
    return tuple(gpus), dropped


def _read(path: Path) -> _Rows:
    blocks: list[Floats] = []
    throttled = dropped = 0
    with _open(path) as file:
        while lines := list(islice(file, BLOCK_ROWS)):
            stop_if_abandoned()
            whole = [line for line in lines if is_sample(line)]
            headers = sum(line.startswith(_HEADER) or line.isspace() for line in lines)
            numbers = sample_numbers(whole)
            usable = np.isfinite(numbers[:, 0])
            blocks.append(numbers[usable])
            dropped += len(lines) - headers - int(usable.sum())
            throttled += sum(bool(line.rsplit(",", _AFTER_THROTTLE)[1]) for line in whole)
    numbers = np.concatenate(blocks) if blocks else np.empty((0, len(_NUMBERS)))
    return _Rows(numbers[np.argsort(numbers[:, 0], kind="stable")], throttled, dropped)


def is_sample(line: str) -> bool:
    """Whether a line of telemetry is a complete row."""
    return line.count(",") == _COMMAS and not line.startswith(_HEADER)


def sample_numbers(lines: Sequence[str]) -> Floats:
    """Return the first seven of ``COLUMNS`` of complete rows; NaN for an invalid number."""
    if not lines:
        return np.empty((0, len(_NUMBERS)))
    table = _parsed(lines)
    if table is None:  # empty cells: a GPU lacks the quantity
        table = _parsed([line.replace(",,", ",nan,").replace(",,", ",nan,") for line in lines])
    if table is None:
        rows = [line.split(",", len(_NUMBERS)) for line in lines]
        table = np.array([[_cell(cell) for cell in row[: len(_NUMBERS)]] for row in rows])
    table[~np.isfinite(table)] = np.nan
    return table


def _parsed(lines: Sequence[str]) -> Floats | None:
    """Return the numeric columns; None where a cell is no number."""
    try:
        return np.loadtxt(lines, delimiter=",", usecols=_NUMBERS, comments=None, ndmin=2)
    except ValueError:
        return None


def _cell(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _open(path: Path) -> TextIO:
    """Open a text file of a job, which can put a FIFO or a link in its place."""
    return os.fdopen(open_plain(path), encoding="utf-8", errors="replace", newline="\n")


def _job_series(gpu: GpuIdentity, rows: _Rows, *, shared: bool) -> GpuSeries:
    return GpuSeries(
        label=gpu_label(gpu.index, gpu.uuid, shared=shared),
        index=gpu.index,
        model=gpu.model,
        uuid=gpu.uuid,
        vendor=gpu.vendor,
        times=rows.numbers[:, 0],
        values={quantity: rows.numbers[:, column] for quantity, column in _COLUMN_OF.items()},
        energy_joules=rows.numbers[:, COLUMNS.index("energy_joules")],
        memory_total_bytes=gpu.memory_total_bytes,
        throttled=rows.throttled,
    )


def gpu_label(index: int, uuid: str, *, shared: bool) -> str:
    """Return a GPU's label; ``shared``: another of the run's GPUs has its index."""
    return f"GPU {index} ({uuid.removeprefix('GPU-')[:13]})" if shared and uuid else f"GPU {index}"


MAX_METRICS: Final = 256
MAX_LINE_CHARACTERS: Final = 64 * 1024
MAX_LINES: Final = 2_000_000
_MOST: Final = 2.0**53


def read_progress(path: Path) -> Progress | None:
    """Return the progress in ``metrics.jsonl`` at ``path`` (and the older ``.1`` beside it); None where there is none."""
    rows: list[Mapping[str, Any]] = []
    for file in (path.with_name(f"{path.name}.1"), path):
        try:
            rows += _rows(file)
        except OSError:
            continue
    return progress_of(rows)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    with _open(path) as file:
        while len(rows) < MAX_LINES and (line := file.readline(MAX_LINE_CHARACTERS)):
            if (row := report_of(line)) is not None:
                rows.append(row)
    return rows


def report_of(line: str | bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl``, its values unchecked; None for a line that orch does not write."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def progress_of(rows: Iterable[Mapping[str, Any]]) -> Progress | None:
    """Return progress from rows with ``at``, ``step`` and other keys of ``metrics.jsonl``; None when no row is valid."""
    usable = [
        row
        for row in rows
        if not math.isnan(valid_number(row.get("at"))) and not math.isnan(valid_number(row.get("step")))
    ]
    if not usable:
        return None
    usable.sort(key=lambda row: valid_number(row["at"]))
    totals = [total for row in usable if (total := row.get("total_steps")) and not math.isnan(valid_number(total))]
    return Progress(
        times=_column(usable, "at"),
        attempts=_column(usable, "attempt"),
        steps=_column(usable, "step"),
        samples=_column(usable, "samples"),
        tokens=_column(usable, "tokens"),
        step_seconds=_column(usable, "step_seconds"),
        epochs=_column(usable, "epoch"),
        phases=tuple(phase if isinstance(phase := row.get("phase"), str) else "" for row in usable),
        metrics=_metrics([row.get("metrics") for row in usable]),
        total_steps=int(totals[-1]) if totals else None,
    )


def valid_number(value: object, least: float = 0.0) -> float:
    """Return a finite number from ``least`` on; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if least <= value <= _MOST else math.nan


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    return np.array([valid_number(row.get(key)) for row in rows])


def _metrics(reported: Sequence[object]) -> dict[str, Floats]:
    columns: dict[str, Floats] = {}
    for place, metrics in enumerate(reported):
        if not isinstance(metrics, dict):
            continue
        for name, value in metrics.items():
            if name not in columns:
                if len(columns) >= MAX_METRICS:
                    continue
                columns[name] = np.full(len(reported), np.nan)
            columns[name][place] = valid_number(value, least=-_MOST)
    return columns


MULTI = "_multi_gpu"


class SourceError(Exception):
    """There is nothing to analyse at a path; the message says what was expected."""


def read_run(path: Path, *, name: str | None = None) -> Run:
    """Return the run at ``path``. Raises SourceError, with the path and what to give instead."""
    try:
        return _read_directory(path, name) if path.is_dir() else _read_file(path, name)
    except RecordingError as error:
        raise SourceError(str(error)) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_directory(path: Path, name: str | None) -> Run:
    """Read a job's directory, also by the folder ``telemetry`` in it."""
    job = path.parent if path.name == "telemetry" else path
    gpus, dropped = read_telemetry(job / "telemetry")
    progress = read_progress(job / "metrics.jsonl")
    if not gpus and progress is None:
        raise SourceError(
            f"{path} holds neither telemetry nor metrics.jsonl. Give a job, its directory, or a recording's file."
        )
    return Run(name=name or job.name, sources=(job,), gpus=gpus, progress=progress, dropped=dropped)


def _read_file(path: Path, name: str | None) -> Run:
    """Read a recording; of the two files for several GPUs, the one with all of them."""
    everything = path.with_name(f"{path.stem}{MULTI}{path.suffix}")
    chosen = everything if not path.stem.endswith(MULTI) and everything.is_file() else path
    recording = read_recording(chosen)
    groups: dict[int, list[RecordedSample]] = defaultdict(list)
    for sample in recording.samples:
        groups[sample.gpu_index].append(sample)
    if not groups:
        raise SourceError(f"{chosen} holds no readings.")
    return Run(
        name=name or chosen.stem.removesuffix(MULTI),
        sources=(chosen,),
        gpus=tuple(_recorded_series(groups[index]) for index in sorted(groups)),
        progress=_training(recording.samples),
        dropped=recording.dropped,
        repaired=recording.repaired,
    )


def _recorded_series(samples: Sequence[RecordedSample]) -> GpuSeries:
    last = samples[-1]

    def column(value: Callable[[RecordedSample], float | None]) -> Floats:
        return np.array([np.nan if (found := value(sample)) is None else found for sample in samples], dtype=np.float64)

    totals, limits = column(lambda s: s.memory_total_bytes), column(lambda s: s.power_limit_watts)
    return GpuSeries(
        label=gpu_label(last.gpu_index, last.gpu_uuid or "", shared=False),
        index=last.gpu_index,
        model=last.gpu_name or "",
        uuid=last.gpu_uuid or "",
        vendor=last.vendor or "",
        times=column(lambda s: s.timestamp),
        values={
            Quantity.UTILIZATION: column(lambda s: s.utilization),
            Quantity.MEMORY: column(lambda s: s.memory_used_bytes),
            Quantity.POWER: column(lambda s: s.power_watts),
            Quantity.TEMPERATURE: column(lambda s: s.temperature_celsius),
            Quantity.CLOCK: column(_clock),
            Quantity.FAN: column(lambda s: s.fan),
        },
        energy_joules=column(lambda s: s.energy_joules),
        memory_total_bytes=_largest(totals),
        power_limit_watts=_largest(limits),
        temperature_limit_celsius=_slowdown(samples),
        throttled=sum(bool(sample.throttle) for sample in samples),
    )


def _clock(sample: RecordedSample) -> float | None:
    clocks = {name.lower(): hertz for name, hertz in sample.clocks}
    return next((clocks[name] for name in ("sm", "graphics", "sclk", "gfx") if name in clocks), None)


def _largest(values: Floats) -> float | None:
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def _slowdown(samples: Sequence[RecordedSample]) -> float | None:
    """Return the lowest temperature at which the GPU reports to slow down or to exceed its rating."""
    limits = next((sample.temperature_limits for sample in samples if sample.temperature_limits), ())
    return min((celsius for _, _, celsius in limits if celsius > 0), default=None)


def _training(samples: Sequence[RecordedSample]) -> Progress | None:
    """Return progress from a recorded run's labels: ``batch`` is the steps so far."""
    rows: list[dict[str, Any]] = []
    before: object = None
    for sample in samples:
        if sample.training and sample.training != before:
            before = labels = sample.training
            rows.append(
                {"at": sample.timestamp, "attempt": 1, "step": labels.get("batch"), "epoch": labels.get("epoch")}
                | {"phase": labels.get("phase"), "total_steps": labels.get("total_steps")}
            )
    return progress_of(rows)
