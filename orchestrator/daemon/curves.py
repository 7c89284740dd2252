"""Answers queries about jobs and GPUs over time from jobs' records alone: any number of readings becomes lines of a bounded number of points.

Records are append-only, so their lines are in order of time, and a time is found by bisection; a long part is read as evenly spread samples. A job can
write to its records: the function that returns a line's time also validates it, foreign lines are skipped, and reads are bounded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.api.curve_views import (
    MAX_POINTS,
    ChartView,
    CurveQuery,
    CurvesView,
    CurveView,
    GpuHistoryView,
    GpuUseView,
)
from orchestrator.gpu.recording.job_record import COLUMNS, PREFIX, read_identity, row_number, sampled_at
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    TimeOf = Callable[[bytes], float | None]
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths

PROBE_BYTES: Final = 64 * 1024
"""Longest line of a record."""

NEAR_BYTES: Final = 4096
SAMPLES: Final = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """The times of a record's first and last line."""

    begin: float
    end: float


def extent(path: Path, time_of: TimeOf) -> Extent | None:
    """Return the times of a record's first and last line; None without a valid line. Raises OSError."""
    handle = open_plain(path, real=True)
    try:
        size = os.fstat(handle).st_size
        first = _first_time(os.pread(handle, PROBE_BYTES, 0), time_of)
        tail = os.pread(handle, PROBE_BYTES, max(0, size - PROBE_BYTES)).split(b"\n")
        last = next((at for line in reversed(tail) if (at := time_of(line)) is not None), None)
    finally:
        os.close(handle)
    return None if first is None or last is None else Extent(first, max(first, last))


def read_part(
    path: Path, time_of: TimeOf, since: float | None, until: float | None, most_bytes: int
) -> tuple[list[bytes], bool]:
    """Return lines between the two times and a few beside them; and whether they are samples. Raises OSError."""
    handle = open_plain(path, real=True)
    try:
        size = os.fstat(handle).st_size
        begin = 0 if since is None else _place(handle, size, time_of, since)
        end = size if until is None else min(size, _place(handle, size, time_of, until) + NEAR_BYTES)
        if end - begin <= most_bytes:
            return os.pread(handle, max(0, end - begin), begin).split(b"\n"), False
        return _samples(handle, begin, end, most_bytes), True
    finally:
        os.close(handle)


def _samples(handle: int, begin: int, end: int, most_bytes: int) -> list[bytes]:
    """Return whole lines of evenly spread blocks; the last block ends where the part does."""
    lines: list[bytes] = []
    line_bytes = _line_bytes(handle, begin)
    count = max(2, min(SAMPLES, most_bytes // (2 * line_bytes)))
    length = most_bytes // count
    for number in range(count):
        at = begin + (end - begin - length) * number // (count - 1)
        data = os.pread(handle, length, at)
        lines += data.split(b"\n")[1 if at else 0 : -1]
    return lines


def _line_bytes(handle: int, at: int) -> int:
    data = os.pread(handle, PROBE_BYTES, at)
    return max(16, len(data) // max(1, data.count(b"\n")))


def _place(handle: int, size: int, time_of: TimeOf, wanted: float) -> int:
    """Return a position shortly before the first line of that time or a later one."""
    low, high = 0, size
    while high - low > NEAR_BYTES:
        middle = (low + high) // 2
        data = os.pread(handle, PROBE_BYTES, middle)
        at = _first_time(data[data.find(b"\n") + 1 :], time_of)
        if at is not None and at < wanted:
            low = middle
        else:
            high = middle
    # A line that begins before this position may be cut: it is skipped like any incomplete line.
    return low


def _first_time(data: bytes, time_of: TimeOf) -> float | None:
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        at = time_of(data[start:stop])
        if at is not None:
            return at
        start = stop + 1
    return None


MAX_NAMES: Final = 64
MAX_NAME: Final = 200
MAX_RANKS: Final = 4096
_MOST: Final = 2.0**53


@dataclass(slots=True)
class Readings:
    """Readings over time or steps: metrics by name, the job's step, the ranks' step times, and their own work in those."""

    metrics: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    step_seconds: list[tuple[float, float | None]] = field(default_factory=list)
    rank_step_seconds: dict[int, list[tuple[float, float | None]]] = field(default_factory=dict)
    rank_own_seconds: dict[int, list[tuple[float, float | None]]] = field(default_factory=dict)


def reported_at(line: bytes) -> float | None:
    """Return when a line was written; None for a line that is not orch's."""
    row = parsed(line)
    return None if row is None else row["at"]


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line with a usable time and step."""
    if not line.startswith(b"{"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or _number(row.get("at")) is None or _number(row.get("step")) is None:
        return None
    return row


def readings_of(lines: Iterable[bytes], *, by_step: bool) -> Readings:
    """Return the readings in the lines, by time or by step."""
    rows = [row for line in lines if (row := parsed(line)) is not None]
    key = "step" if by_step else "at"
    found = Readings()
    for row in _kept(rows) if by_step else rows:
        x = float(row[key])
        if (seconds := _number(row.get("step_seconds"))) is not None:
            found.step_seconds.append((x, seconds))
        _add_metrics(found, x, row.get("metrics"))
        _add_ranks(found.rank_step_seconds, x, row.get("rank_step_seconds"))
        _add_ranks(found.rank_own_seconds, x, row.get("rank_own_seconds"))
    return found


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without steps that a later attempt repeated."""
    kept, least = [], float("inf")
    for row in reversed(rows):
        if row["step"] < least:
            least = row["step"]
            kept.append(row)
    return kept[::-1]


def _add_metrics(found: Readings, x: float, metrics: object) -> None:
    if not isinstance(metrics, dict):
        return
    for name, value in metrics.items():
        if name not in found.metrics and len(found.metrics) >= MAX_NAMES:
            continue
        if value is None or (type(value) in (int, float) and abs(value) <= _MOST):
            found.metrics.setdefault(name[:MAX_NAME], []).append((x, value))


def _add_ranks(found: dict[int, list[tuple[float, float | None]]], x: float, ranks: object) -> None:
    if not isinstance(ranks, list):
        return
    for rank, value in enumerate(ranks[:MAX_RANKS]):
        if (seconds := _number(value)) is not None:
            found.setdefault(rank, []).append((x, seconds))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value) if 0 <= value <= _MOST else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A column, the name and unit to show, and the factor to that unit."""

    name: str
    column: int
    unit: str
    factor: float


QUANTITIES: Final = (
    Quantity(name="GPU load", column=COLUMNS.index("utilization"), unit="%", factor=100.0),
    Quantity(name="GPU memory", column=COLUMNS.index("memory_used_bytes"), unit="GiB", factor=1 / 2**30),
    Quantity(name="GPU power", column=COLUMNS.index("power_watts"), unit="W", factor=1.0),
    Quantity(name="GPU temperature", column=COLUMNS.index("temperature_celsius"), unit="°C", factor=1.0),
)


@dataclass(slots=True)
class GpuReadings:
    """One GPU's readings by the quantity's name."""

    uuid: str
    index: int
    values: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)


def add_rows(found: GpuReadings, lines: Iterable[bytes]) -> None:
    """Add the values in the rows; unmeasured values are left out."""
    columns = [(one.column, one.factor, found.values.setdefault(one.name, [])) for one in QUANTITIES]
    for line in lines:
        at, cells = sampled_at(line), line.split(b",")
        if at is None:
            continue
        for column, factor, values in columns:
            if (value := row_number(cells[column])) is not None:
                values.append((at, value * factor))


MAX_CURVES: Final = 16
"""More GPUs or ranks than this are drawn as one line with a band."""

DIGITS: Final = 5


@dataclass(slots=True)
class Part:
    """The readings in one part of a span."""

    x: float
    total: float = 0.0
    count: int = 0
    low: float = inf
    high: float = -inf
    not_finite: int = 0

    def add(self, value: float | None) -> None:
        """Add a reading; None stands for one that was not finite."""
        if value is None or not isfinite(value):
            self.not_finite += 1
            return
        self.total += value
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)


@dataclass(frozen=True, slots=True)
class Grid:
    """``points`` parts of equal length between two ends."""

    begin: float
    end: float
    points: int

    def parts(self, readings: Iterable[tuple[float, float | None]]) -> dict[int, Part]:
        """Return the readings by part; those outside are left out."""
        found: dict[int, Part] = {}
        scale = self.points / (self.end - self.begin) if self.end > self.begin else 0.0
        for x, value in readings:
            if not self.begin <= x <= self.end:
                continue
            number = min(self.points - 1, int((x - self.begin) * scale))
            part = found.get(number)
            if part is None:
                part = found[number] = Part(x)
            part.add(value)
        return found


def curve(label: str, parts: Mapping[int, Part]) -> CurveView:
    """Return a line through the means of the parts."""
    ordered = [parts[number] for number in sorted(parts)]
    return CurveView(
        label=label,
        x=tuple(round(part.x, 3) for part in ordered),
        values=tuple(_rounded(part.total / part.count) if part.count else None for part in ordered),
        lows=tuple(_rounded(part.low) if part.count else None for part in ordered),
        highs=tuple(_rounded(part.high) if part.count else None for part in ordered),
        not_finite=sum(part.not_finite for part in ordered),
    )


def chart(
    name: str,
    unit: str,
    lines: Sequence[tuple[str, Mapping[int, Part]]],
    *,
    kind: str = "GPUs",
    most: int = MAX_CURVES,
) -> ChartView | None:
    """Return the lines that have readings; one for all of them where there are more than ``most``; None without any."""
    shown = [(label, parts) for label, parts in lines if any(part.count or part.not_finite for part in parts.values())]
    if not shown:
        return None
    if len(shown) <= most:
        return ChartView(name=name, unit=unit, curves=tuple(curve(label, parts) for label, parts in shown))
    together: dict[int, Part] = {}
    for _, parts in shown:
        for number, part in parts.items():
            _join(together.setdefault(number, Part(part.x)), part)
    label = f"mean of {len(shown)} {kind}"
    return ChartView(name=name, unit=unit, curves=(curve(label, together),), merged=len(shown))


def _join(whole: Part, part: Part) -> None:
    whole.total += part.total
    whole.count += part.count
    whole.not_finite += part.not_finite
    whole.low, whole.high = min(whole.low, part.low), max(whole.high, part.high)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


MAX_BYTES: Final = 1024 * 1024
"""Most bytes read at once, from all records together: some milliseconds of processor time."""

MAX_METRICS: Final = 12
MAX_USES: Final = 200
MAX_GPUS: Final = 1024


class Curves:
    """Answers the queries in threads of ``pool``."""

    def __init__(self, paths: Paths, pool: Pool) -> None:
        self._paths = paths
        self._pool = pool

    async def curves(self, job_id: JobId, query: CurveQuery) -> CurvesView:
        """Return what the job recorded over time."""
        return await self._pool.run(job_curves, self._paths.job(job_id), job_id, query)

    async def gpu_history(self, uuids: Sequence[str], query: CurveQuery) -> GpuHistoryView:
        """Return what these GPUs did over time, for all jobs."""
        return await self._pool.run(gpu_history, self._paths.jobs, uuids, query)


def job_curves(directory: Path, job_id: JobId, query: CurveQuery) -> CurvesView:
    """Read the records in a job's directory. Blocks."""
    files = (directory / "metrics.jsonl.1", directory / "metrics.jsonl")
    reported = [p for p in files if os.path.isfile(p)]  # noqa: PTH113  # Path.is_file raises
    sampled_gpus = [] if query.by_step else _telemetry(directory)
    spans = _extents([(p, reported_at) for p in reported] + [(p, sampled_at) for p in sampled_gpus])
    if not spans:
        return CurvesView(job_id=job_id)
    bounds = (None, None) if query.by_step else (query.since, query.until)
    share = MAX_BYTES // (len(reported) + len(sampled_gpus))
    lines, sampled = _lines(reported, reported_at, bounds, share)
    readings = readings_of(lines, by_step=query.by_step)
    begin, end = _ends(spans, readings if query.by_step else None)
    grid = _grid(query, begin, end)
    charts = _progress_charts(readings, grid, ranks=not query.together)
    gpus, also = _gpus(sampled_gpus, bounds, share)
    return CurvesView(
        job_id=job_id,
        begin=begin,
        end=end,
        charts=(*charts, *gpu_charts(gpus, grid, most=1 if query.together else MAX_CURVES)),
        sampled=sampled or also,
    )


def gpu_history(jobs: Path, uuids: Sequence[str], query: CurveQuery) -> GpuHistoryView:
    """Read the telemetry of these GPUs in the directories of jobs. Blocks."""
    wanted = {_file_name(uuid): uuid for uuid in uuids[:MAX_GPUS]}
    files = _newest(path for job in _entries(jobs) for path in _telemetry(job) if path.name in wanted)
    spans = {path: span for path, span in ((p, _extent(p, sampled_at)) for p in files) if span is not None}
    if not spans:
        return GpuHistoryView()
    uses = tuple(
        GpuUseView(gpu_uuid=wanted[path.name], job_id=path.parent.parent.name, begin=span.begin, end=span.end)
        for path, span in spans.items()
    )
    begin, end = min(u.begin for u in uses), max(u.end for u in uses)
    grid = _grid(query, begin, end)
    seen = [p for p, span in spans.items() if span.end >= grid.begin and span.begin <= grid.end]
    gpus, sampled = _gpus(seen, (query.since, query.until), MAX_BYTES // max(1, len(seen)))
    return GpuHistoryView(
        uses=tuple(sorted(uses, key=lambda use: -use.end)),
        begin=begin,
        end=end,
        charts=gpu_charts(gpus, grid),
        sampled=sampled,
    )


def gpu_charts(gpus: Sequence[GpuReadings], grid: Grid, *, most: int = MAX_CURVES) -> tuple[ChartView, ...]:
    """Return a chart for each measured quantity."""
    indices = [gpu.index for gpu in gpus]
    labels = [_gpu_label(gpu, shared=indices.count(gpu.index) > 1) for gpu in gpus]
    made = (
        chart(
            one.name,
            one.unit,
            [(label, grid.parts(gpu.values.get(one.name, ()))) for label, gpu in zip(labels, gpus, strict=True)],
            most=most,
        )
        for one in QUANTITIES
    )
    return tuple(one for one in made if one is not None)


def _gpu_label(gpu: GpuReadings, *, shared: bool) -> str:
    return f"GPU {gpu.index} ({gpu.uuid.removeprefix('GPU-')[:13]})" if shared else f"GPU {gpu.index}"


def _progress_charts(readings: Readings, grid: Grid, *, ranks: bool) -> list[ChartView]:
    names = sorted(readings.metrics, key=lambda name: ("loss" not in name, name))[:MAX_METRICS]
    made = [chart(name, "", [(name, grid.parts(readings.metrics[name]))]) for name in names]
    made.append(chart("step time", "s", [("step time", grid.parts(readings.step_seconds))]))
    for name, values in (
        ("step time by rank", readings.rank_step_seconds),
        ("step time by rank, waiting left out", readings.rank_own_seconds),
    ):
        if ranks and len(values) > 1:
            lines = [(f"rank {rank}", grid.parts(found)) for rank, found in sorted(values.items())]
            made.append(chart(name, "s", lines, kind="ranks"))
    return [one for one in made if one is not None]


def _grid(query: CurveQuery, begin: float, end: float) -> Grid:
    since = begin if query.since is None else query.since
    until = end if query.until is None else query.until
    return Grid(since, max(since, until), max(2, min(query.points, MAX_POINTS)))


def _ends(spans: Sequence[Extent], steps: Readings | None) -> tuple[float, float]:
    if steps is None:
        return min(span.begin for span in spans), max(span.end for span in spans)
    known = [x for values in (steps.step_seconds, *steps.metrics.values()) for x, _ in values]
    return (min(known), max(known)) if known else (0.0, 0.0)


def _gpus(
    files: Sequence[Path], bounds: tuple[float | None, float | None], share: int
) -> tuple[list[GpuReadings], bool]:
    """Return the readings of each GPU, by index; one GPU's files of several jobs follow each other."""
    found: dict[str, GpuReadings] = {}
    sampled = False
    for path in files:
        gpu = read_identity(path, real=True)
        lines, also = _lines([path], sampled_at, bounds, share)
        add_rows(found.setdefault(gpu.uuid, GpuReadings(gpu.uuid, gpu.index)), lines)
        sampled = sampled or also
    return sorted(found.values(), key=lambda gpu: (gpu.index, gpu.uuid)), sampled


def _lines(
    files: Sequence[Path], time_of: TimeOf, bounds: tuple[float | None, float | None], share: int
) -> tuple[list[bytes], bool]:
    lines: list[bytes] = []
    sampled = False
    for path in files:
        try:
            found, also = read_part(path, time_of, *bounds, share)
        except OSError:  # removed, or not a record
            continue
        lines += found
        sampled = sampled or also
    return lines, sampled


def _extents(files: Sequence[tuple[Path, TimeOf]]) -> list[Extent]:
    return [span for path, time_of in files if (span := _extent(path, time_of)) is not None]


def _extent(path: Path, time_of: TimeOf) -> Extent | None:
    try:
        return extent(path, time_of)
    except OSError:
        return None


def _telemetry(job: Path) -> list[Path]:
    stop_if_abandoned()
    folder = job / "telemetry"
    return [
        path
        for path in _entries(folder)[: 2 * MAX_GPUS]
        if path.name.startswith(PREFIX) and path.name.endswith(".csv") and not path.is_symlink()
    ]


def _newest(files: Iterable[Path]) -> list[Path]:
    dated = []
    for path in files:
        try:
            dated.append((path.lstat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(dated, reverse=True)[:MAX_USES]]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _file_name(uuid: str) -> str:
    """Return the name that ``JobRecorder`` gives to a GPU's file."""
    return f"{PREFIX}{''.join(c if c.isalnum() or c in '-_.' else '_' for c in uuid)}.csv"
