"""A job's telemetry: its GPUs' samples, appended to files in the job's directory while it runs.

One file per GPU, `telemetry-UUID.csv`, written by that GPU's exporter alone; `telemetry-UUID.json` beside it identifies
the GPU. Rows are appended whole, in one write; a row truncated by a crash is skipped when reading. A file over a size
limit is written half as often from then on, and again over twice the limit, so that a job of months ends with a bounded
file.
"""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.recording.reading import RecordedSample, Recording
from orchestrator.gpu.sample import Detail

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
        self._path = directory / f"telemetry-{_safe(info.uuid)}.csv"
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


def read_job_telemetry(directory: Path) -> Recording:
    """Return all GPUs' telemetry of a job, in the order of time; empty when nothing was recorded.

    Raises OSError when a file is unreadable. Incomplete rows are counted in `dropped`.
    """
    rows: list[tuple[float, GpuIdentity, list[str]]] = []
    dropped = 0
    for path in sorted(directory.glob("telemetry-*.csv")):
        identity = _identity(path)
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.reader(file):
                if not row or row[0] == COLUMNS[0]:
                    continue
                timestamp = _float(row[0])
                if len(row) != len(COLUMNS) or timestamp is None:
                    dropped += 1
                else:
                    rows.append((timestamp, identity, row))
    rows.sort(key=lambda entry: entry[0])
    start = rows[0][0] if rows else 0.0
    return Recording(
        source=directory,
        samples=tuple(_sample(timestamp, start, identity, row) for timestamp, identity, row in rows),
        dropped=dropped,
    )


GpuIdentity = dict[str, object]
"""Content of `telemetry-UUID.json`; empty when it is missing."""


def _identity(path: Path) -> GpuIdentity:
    try:
        document = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _sample(timestamp: float, start: float, identity: GpuIdentity, row: list[str]) -> RecordedSample:
    index, total = identity.get("index"), identity.get("memory_total_bytes")
    used, clock = _float(row[2]), _float(row[6])
    return RecordedSample(
        timestamp=timestamp,
        elapsed_seconds=timestamp - start,
        gpu_index=index if isinstance(index, int) else 0,
        gpu_name=_text(identity.get("model")),
        gpu_uuid=_text(identity.get("uuid")),
        vendor=_text(identity.get("vendor")),
        utilization=_float(row[1]),
        memory_used_bytes=int(used) if used is not None else None,
        memory_total_bytes=total if isinstance(total, int) else None,
        power_watts=_float(row[3]),
        energy_joules=_float(row[4]),
        temperature_celsius=_float(row[5]),
        clocks=(("sm", clock),) if clock is not None else (),
        throttle=tuple(reason for reason in row[7].split("|") if reason),
        fresh=row[8] == "1",
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
