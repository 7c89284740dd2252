"""A job's telemetry: its GPUs' samples, appended to files in the job's directory while it runs.

One file per GPU, `telemetry-UUID.csv`, written by that GPU's exporter alone; `telemetry-UUID.json` beside it identifies
the GPU. Rows are appended whole, in one write; a row truncated by a crash is skipped when reading. A file over a size
limit is written half as often from then on, and again over twice the limit, so that a job of months ends with a bounded
file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.recording.reading import RecordedSample, Recording
from orchestrator.gpu.sample import Detail
from orchestrator.spec.plain_files import open_plain, read_plain

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.gpu.sample import GpuInfo, Sample
    from orchestrator.gpu.sampler import Reading

COLUMNS: Final = (
    "timestamp",
    "utilization",
    "memory_used_bytes",
    "power_watts",
    "energy_joules",
    "temperature_celsius",
    "sm_clock_hertz",
    "throttle",
    "fresh",
)
PREFIX: Final = "telemetry-"
HEADER: Final = COLUMNS[0].encode()
IDENTITY_BYTES: Final = 64 * 1024
THIN_OUT_BYTES: Final = 64 * 2**20
FLUSH_SECONDS: Final = 1.0


class JobRecorder:
    """Appends one GPU's samples to a job's telemetry. Thread-safe; a full disk loses samples, never the caller."""

    def __init__(
        self, directory: Path, info: GpuInfo, *, rate: float = 1.0, thin_out_bytes: int = THIN_OUT_BYTES
    ) -> None:
        """Record into `directory`, created if missing, at most at `rate` hertz."""
        self.rate = rate
        self.lost_rows = 0
        self._lock = threading.Lock()
        self._rows: list[str] = []
        self._flushed = time.monotonic()
        self._next = 0.0
        self._seen = 0
        self._thin_out_bytes = thin_out_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{PREFIX}{_safe(info.uuid)}.csv"
        _write_identity(self._path.with_suffix(".json"), info)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size
        # A new line ends a truncated row of a crash; the header is repeated at each opening and skipped like that row.
        self._write(("\n" if self._size else "") + ",".join(COLUMNS) + "\n")

    def append(self, reading: Reading) -> None:
        """Add a reading; it is on disk within a second or by `close`."""
        with self._lock:
            now, period = reading.sample.monotonic, 1.0 / self.rate
            # A quarter of a period of slack: a tick that comes early by its jitter is not left out.
            if self._file < 0 or now < self._next - period / 4:
                return
            self._next = max(self._next + period, now + period / 2)
            self._seen += 1
            if self._seen % self._stride():
                return
            self._rows.append(_row(reading.sample, reading.detail))
            if time.monotonic() - self._flushed >= FLUSH_SECONDS or self.rate <= 1.0:
                self._flush()

    def _stride(self) -> int:
        """Return the number of samples for each row, by the size of the file: 1, then 2, 4 and so on."""
        return int(1 << (self._size // self._thin_out_bytes).bit_length())

    def _flush(self) -> None:
        if self._rows:
            self._write("".join(self._rows))
            self._rows.clear()
        self._flushed = time.monotonic()

    def _write(self, text: str) -> None:
        try:
            self._size += os.write(self._file, text.encode())
        except OSError:
            self.lost_rows += text.count("\n")

    def close(self) -> None:
        """Write the rest and close. Idempotent."""
        with self._lock:
            if self._file >= 0:
                self._flush()
                os.close(self._file)
                self._file = -1


def _safe(uuid: str) -> str:
    """Return a UUID as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in uuid)


def _write_identity(path: Path, info: GpuInfo) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(info)), encoding="utf-8")
    draft.replace(path)


def _row(sample: Sample, detail: Detail) -> str:
    clocks = dict(sample.clocks)
    values = (
        f"{sample.timestamp:.3f}",
        sample.utilization,
        sample.memory_used_bytes,
        sample.power_watts,
        sample.energy_joules,
        sample.temperature,
        clocks.get("sm", clocks.get("graphics")),
        "|".join(sample.throttle_active) if detail is Detail.FULL else None,
        int(sample.fresh),
    )
    return ",".join("" if value is None else str(value) for value in values) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """The GPU of a file of telemetry; the job may have written this, so lengths and ranges are limited."""

    uuid: str
    index: int = 0
    model: str = ""
    vendor: str = ""
    memory_total_bytes: int | None = None


def read_identity(path: Path, *, real: bool = False) -> GpuIdentity:
    """Return the GPU of the rows at `path`; by the name of the file alone where nothing valid describes it."""
    name = path.stem.removeprefix(PREFIX)
    try:
        body = json.loads(read_plain(path.with_suffix(".json"), IDENTITY_BYTES, real=real))
    except (OSError, ValueError, RecursionError):
        body = None
    body = body if isinstance(body, dict) else {}
    index, total = body.get("index"), body.get("memory_total_bytes")
    return GpuIdentity(
        uuid=_text(body.get("uuid")) or name,
        index=index if type(index) is int and 0 <= index < 2**16 else 0,
        model=_text(body.get("model")),
        vendor=_text(body.get("vendor")),
        memory_total_bytes=total if type(total) is int and 0 < total < 2**60 else None,
    )


def _text(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""


def sampled_at(line: bytes) -> float | None:
    """Return when a row was sampled; None for a header and an incomplete row."""
    return row_number(line[: line.find(b",")]) if line.count(b",") == len(COLUMNS) - 1 else None


def row_number(cell: bytes) -> float | None:
    """Return the number in a cell of a row; None for an empty one, and what is no finite number."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if isfinite(value) else None


def read_job_telemetry(directory: Path) -> Recording:
    """Return all GPUs' telemetry of a job, in the order of time; empty when nothing was recorded.

    Raises OSError when a file is unreadable. Incomplete rows are counted in `dropped`.
    """
    rows: list[tuple[float, GpuIdentity, list[bytes]]] = []
    dropped = 0
    for path in sorted(directory.glob(f"{PREFIX}*.csv")):
        identity = read_identity(path)
        with os.fdopen(open_plain(path), "rb") as file:
            for line in file:
                at = sampled_at(line)
                if at is not None:
                    rows.append((at, identity, line.rstrip().split(b",")))
                elif not (line.isspace() or line.startswith(HEADER)):
                    dropped += 1
    rows.sort(key=lambda entry: entry[0])
    start = rows[0][0] if rows else 0.0
    return Recording(
        source=directory,
        samples=tuple(_sample(at, start, identity, cells) for at, identity, cells in rows),
        dropped=dropped,
    )


def _sample(at: float, start: float, identity: GpuIdentity, cells: list[bytes]) -> RecordedSample:
    utilization, used, power, energy, celsius, clock = map(row_number, cells[1:7])
    return RecordedSample(
        timestamp=at,
        elapsed_seconds=at - start,
        gpu_index=identity.index,
        gpu_name=identity.model or None,
        gpu_uuid=identity.uuid,
        vendor=identity.vendor or None,
        utilization=utilization,
        memory_used_bytes=None if used is None else int(used),
        memory_total_bytes=identity.memory_total_bytes,
        power_watts=power,
        energy_joules=energy,
        temperature_celsius=celsius,
        clocks=() if clock is None else (("sm", clock),),
        throttle=tuple(reason for reason in cells[7].decode(errors="replace").split("|") if reason),
        fresh=cells[8] == b"1",
    )
