"""Publishes GPUs to Prometheus: samples in the background, serves prerendered bytes.

A plain object, for the Ray actor and other users. No request calls a driver: each GPU's thread renders its lines after
each new sample, the server's thread (for a single GPU, its own) combines them, and a timer there removes the lines of a
GPU whose sample is too old, so that a hanging GPU disappears instead of showing its last values for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from orchestrator.gpu.balance.balance import WINDOW_SECONDS, LoadPoint, load_of
from orchestrator.gpu.exporter.exposition import Block, ExporterStatus, Renderer, compose
from orchestrator.gpu.exporter.http import HttpSettings, MetricsServer
from orchestrator.gpu.reader import Detail
from orchestrator.gpu.recording.job_record import JobRecorder
from orchestrator.gpu.sampler import Health, Pace, Reading, Sampler, SamplerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from orchestrator.gpu.balance.balance import GpuLoad
    from orchestrator.gpu.reader import GpuReader
    from orchestrator.gpu.sample import GpuInfo, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterTarget:
    """The sampling rate (hertz), the silence in seconds after which a GPU counts as gone, and the address.

    `processes` adds a series for every process on a GPU to the page; `statuses` has them in any case.
    """

    rate: float = 1.0
    stale_after: float | None = None
    processes: bool = False
    pace: Pace = field(default_factory=Pace)
    http: HttpSettings = field(default_factory=HttpSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU's present state in its exporter; `sample` is None unless it is healthy."""

    info: GpuInfo
    health: Health
    sample: Sample | None
    error: str | None


class GpuExporter:
    """Exports one or more GPUs."""

    def __init__(self, readers: Sequence[GpuReader], node: str, settings: ExporterTarget | None = None) -> None:
        """Export what `readers` read, as GPUs of `node`. Raises ValueError for an address without protection."""
        settings = settings or ExporterTarget()
        self._lanes = tuple(_Lane(reader, node, settings, self._changed) for reader in readers)
        self._group = SamplerGroup(lane.sampler for lane in self._lanes)
        self._server = MetricsServer(settings.http, self.page)
        self._page = b""
        self._pending = False
        self._composing = threading.Lock()

    def start(self) -> None:
        """Begin to sample and to serve. Raises OSError when the address is taken."""
        self._page = compose([lane.render(time.monotonic()) for lane in self._lanes])
        self._server.start()
        self._group.start()
        self._server.call_soon(self._watch)

    @property
    def url(self) -> str:
        """Return the page's address."""
        return self._server.url

    def page(self) -> bytes:
        """Return the page as last composed."""
        return self._page

    def statuses(self) -> tuple[GpuStatus, ...]:
        """Return the present state of every GPU, for the API, without calling a driver."""
        now = time.monotonic()
        return tuple(lane.status(now) for lane in self._lanes)

    def loads_since(self, timestamp: float) -> tuple[LoadPoint, ...]:
        """Return the GPUs' loads after Unix time `timestamp`, at most over the window of a balance, oldest first.

        A client that requests them rarely, or has just started, thus gets the same data as a permanent one.
        """
        now = time.monotonic()
        return tuple(point for lane in self._lanes for point in lane.loads_since(timestamp, now))

    def recorded_jobs(self) -> frozenset[str]:
        """Return the jobs whose telemetry is being written."""
        return frozenset(job_id for lane in self._lanes for job_id in lane.recorded_jobs)

    def record_job(
        self, job_id: str, directory: Path, *, rate: float = 1.0, gpu_uuids: Sequence[str] | None = None
    ) -> None:
        """Append samples of these GPUs (all of them by default) to the telemetry in `directory` from now on.

        `rate` in hertz: a GPU is sampled at the highest rate that its jobs require; the page is still renewed once a
        second.
        """
        for lane in self._lanes:
            if gpu_uuids is None or lane.sampler.info.uuid in gpu_uuids:
                lane.record(job_id, directory, rate)

    def stop_recording(self, job_id: str) -> None:
        """End the job's telemetry; a job that is not recorded is no error."""
        for lane in self._lanes:
            lane.stop_recording(job_id)

    def stop(self) -> tuple[str, ...]:
        """Stop serving and sampling; return the UUIDs of GPUs whose driver hangs and whose threads still run."""
        self._server.stop()
        hanging = self._group.stop()
        for lane in self._lanes:
            lane.close()
        return hanging

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _changed(self) -> None:
        """Schedule a new page after a GPU's change, one for all simultaneous changes; called in that GPU's thread.

        A single GPU's page is composed at once in this thread: waking another one would cost more.
        """
        if len(self._lanes) == 1:
            self._compose()
        elif not self._pending:
            self._pending = True
            self._server.call_soon(self._compose)

    def _compose(self) -> None:
        self._pending = False
        with self._composing:  # the last thread to enter reads the newest lines
            self._page = compose([lane.block for lane in self._lanes])

    def _watch(self) -> None:
        """Remove the lines of stale GPUs, in the server's thread, and run again when the next GPU can become stale."""
        now = time.monotonic()
        stale = [lane.refresh_if_stale(now) for lane in self._lanes]
        if any(stale):
            self._compose()
        due = min((lane.stale_in(now) for lane in self._lanes), default=1.0)
        self._server.call_later(max(0.05, due), self._watch)


class _Lane:
    """One GPU: its sampler, its lines, the jobs that record it."""

    def __init__(self, reader: GpuReader, node: str, settings: ExporterTarget, changed: Callable[[], None]) -> None:
        reader.options.processes = True
        reader.options.xids = True
        reader.options.sparing = True
        self.sampler = Sampler(
            reader,
            rate=settings.rate,
            stale_after=settings.stale_after,
            on_reading=self._read,
            on_change=lambda: self._news(changed),
            pace=settings.pace,
        )
        self._renderer = Renderer(reader.info, node, processes=settings.processes)
        self._rate = settings.rate
        self._lock = threading.Lock()
        self._jobs: dict[str, JobRecorder] = {}
        self._recent: deque[tuple[float, float, GpuLoad]] = deque()
        self._errors = 0
        self._last_success: float | None = None
        self._shown_up = False
        self.block: Block = ()

    def _read(self, reading: Reading) -> None:
        if reading.detail is Detail.FULL:
            sample = reading.sample
            self._recent.append(
                (sample.monotonic, sample.timestamp, load_of(sample, simulated=self.sampler.info.simulated))
            )
            while self._recent[0][0] <= sample.monotonic - WINDOW_SECONDS:
                self._recent.popleft()
        for recorder in self._jobs.values():  # the dictionary is replaced, never changed
            recorder.append(reading)

    def _news(self, changed: Callable[[], None]) -> None:
        self._errors += self.sampler.error is not None
        self.render(time.monotonic())
        changed()

    def render(self, now: float) -> Block:
        """Render the GPU as it is at monotonic time `now`; its own thread and the server's may call this at once."""
        with self._lock:
            return self._render(now)

    def _render(self, now: float) -> Block:
        sample = self.sampler.fresh(now)
        if sample is not None:
            self._last_success = sample.timestamp
        self._shown_up = sample is not None
        status = ExporterStatus(up=sample is not None, last_success=self._last_success, read_errors=self._errors)
        self.block = self._renderer.block(sample, status)
        return self.block

    def refresh_if_stale(self, now: float) -> bool:
        """Render the GPU again if it is shown as up and no longer is; return whether that was the case."""
        if not self._shown_up or self.sampler.fresh(now) is not None:
            return False
        self.render(now)
        return True

    def stale_in(self, now: float) -> float:
        """Return the seconds until the shown sample is too old; 1 when none is shown."""
        latest = self.sampler.latest
        if not self._shown_up or latest is None:
            return 1.0
        return latest.monotonic + self.sampler.stale_after - now

    def status(self, now: float) -> GpuStatus:
        """Return the GPU's state at monotonic time `now`."""
        return GpuStatus(
            info=self.sampler.info,
            health=self.sampler.health(now),
            sample=self.sampler.fresh(now),
            error=self.sampler.trouble(now),
        )

    def loads_since(self, timestamp: float, now: float) -> list[LoadPoint]:
        """Return the GPU's loads after that Unix time; `now` is monotonic."""
        recent = self._recent.copy()  # copied at once, because the GPU's own thread appends
        return [
            LoadPoint(timestamp=taken, age_seconds=now - at, load=load)
            for at, taken, load in recent
            if taken > timestamp
        ]

    @property
    def recorded_jobs(self) -> tuple[str, ...]:
        """The jobs that record this GPU."""
        return tuple(self._jobs)

    def record(self, job_id: str, directory: Path, rate: float) -> None:
        """Record for a job from the next reading on."""
        if job_id not in self._jobs:
            self._jobs = {**self._jobs, job_id: JobRecorder(directory, self.sampler.info, rate=rate)}
            self._adjust_rate()

    def stop_recording(self, job_id: str) -> None:
        """End a job's recording."""
        recorder = self._jobs.get(job_id)
        if recorder is not None:
            self._jobs = {key: value for key, value in self._jobs.items() if key != job_id}
            self._adjust_rate()
            recorder.close()

    def _adjust_rate(self) -> None:
        self.sampler.rate = max([self._rate, *(recorder.rate for recorder in self._jobs.values())])

    def close(self) -> None:
        """End every job's recording."""
        for job_id in tuple(self._jobs):
            self.stop_recording(job_id)
