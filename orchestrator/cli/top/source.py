"""What `orch top` shows, fetched beside the screen: a daemon or a driver that hangs never holds up a key.

A thread looks once an interval and leaves a frame behind; the screen takes the newest. This machine's own drivers are asked
only from when the daemon does not answer: its exporters ask them already.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from orchestrator.api.errors import OrchError
from orchestrator.cli.render.gpu_rows import GpuSummary, gpu_summary
from orchestrator.gpu.balance.balance import GpuLoad, LoadWindow
from orchestrator.gpu.balance.view import balance_json, gpu_row
from orchestrator.gpu.drivers.inventory import node_name, survey
from orchestrator.gpu.sampler import Health, Sampler, SamplerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Any

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session
    from orchestrator.gpu.balance.view import GpuRow

HISTORY = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    """A process on a GPU; what cannot be known of it is empty or None."""

    pid: int
    node: str
    gpu: int
    gpu_uuid: str
    memory_bytes: int | None
    user: str = ""
    cpu_percent: float | None = None
    resident_bytes: int | None = None
    seconds: float | None = None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A job with the balance that the daemon or this program worked out."""

    job: JobView
    balance: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One look: GPUs with their histories of utilization and power (oldest first), jobs, processes, notes."""

    at: float
    rows: tuple[GpuRow, ...]
    history: Mapping[str, Sequence[float | None]]
    power_history: Mapping[str, Sequence[float | None]]
    jobs: tuple[JobLine, ...] = ()
    processes: tuple[ProcessLine, ...] = ()
    problems: tuple[str, ...] = ()
    daemon: bool = False


class TopSource:
    """Looks once an interval, from entering to leaving."""

    def __init__(self, session: Session, *, simulate: int = 0, interval: float = 1.0) -> None:
        self._session = session
        self._simulate = simulate
        self._interval = interval
        self._node = node_name()
        self._group: SamplerGroup | None = None
        self._local_problems: tuple[str, ...] = ()
        self._window = LoadWindow()
        self._history: dict[str, deque[float | None]] = {}
        self._power: dict[str, deque[float | None]] = {}
        self._known: dict[int, Any] = {}
        self._frame: Frame | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orch-top", daemon=True)

    @property
    def frame(self) -> Frame | None:
        """The newest look; None before the first."""
        return self._frame

    def __enter__(self) -> Self:
        """Start looking."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop looking; a look that hangs is left behind."""
        self._stop.set()
        self._thread.join(0.5)
        if self._group is not None:
            self._group.stop(timeout=0.5)

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            self.look()
            if self._stop.wait(max(0.05, self._interval - (time.monotonic() - started))):
                return

    def look(self) -> Frame:
        """Look once and keep the frame."""
        try:
            seen = self._see()
        except OrchError as error:
            rows, problems = self._local()
            seen = GpuSummary(rows=tuple(rows), problems=(error.message, *problems))
        now = time.monotonic()
        for row in seen.rows:
            self._remember(row, now)
        frame = Frame(
            at=time.time(),
            rows=seen.rows,
            history={uuid: tuple(values) for uuid, values in self._history.items()},
            power_history={uuid: tuple(values) for uuid, values in self._power.items()},
            jobs=tuple(JobLine(job=job, balance=self._balance(job, now)) for job in seen.jobs),
            processes=tuple(self._processes(seen.rows)),
            problems=seen.problems,
            daemon=seen.daemon,
        )
        self._frame = frame
        return frame

    def _see(self) -> GpuSummary:
        if self._simulate:
            rows, problems = self._local()
            return GpuSummary(rows=tuple(rows), problems=problems)
        return gpu_summary(self._session, self._local)

    def _local(self) -> tuple[list[GpuRow], tuple[str, ...]]:
        """GPUs of this machine as its drivers say, sampled from the first time on that they are asked for."""
        if self._group is None:
            found = survey(simulate=self._simulate)
            for reader in found.readers:
                reader.options.processes = True
            self._local_problems = found.problems
            self._group = SamplerGroup(Sampler(reader, rate=1.0 / max(self._interval, 1.0)) for reader in found.readers)
            self._group.start()
        rows = [
            gpu_row(sampler.info, self._node, sampler.fresh(), health=sampler.health(), problem=sampler.trouble())
            for sampler in self._group.samplers
        ]
        return rows, self._local_problems

    def _remember(self, row: GpuRow, now: float) -> None:
        known = row.health in {Health.OK, Health.STARTING}
        utilization = row.utilization_ratio if known else None
        self._history.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(utilization)
        self._power.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(row.power_watts if known else None)
        if known and row.sampled_at is not None:
            used = None if row.memory_used_bytes is None else float(row.memory_used_bytes)
            load = GpuLoad(utilization=utilization, memory=used, power=row.power_watts)
            self._window.add_load(row.gpu_uuid, now, load)

    def _balance(self, job: JobView, now: float) -> Mapping[str, Any] | None:
        """The daemon's own word where it has one; else worked out from what was seen here."""
        if job.balance is not None:
            return job.balance
        uuids = [uuid for rank in job.gpus for uuid in rank.gpu_uuids]
        return balance_json(self._window.balance(uuids, now)) if uuids else None

    def _processes(self, rows: Sequence[GpuRow]) -> list[ProcessLine]:
        lines: list[ProcessLine] = []
        seen: set[int] = set()
        for row in rows:
            for entry in row.processes:
                pid = entry.get("pid")
                if pid is not None:
                    here = row.node == self._node
                    seen.add(pid)
                    lines.append(self._process(pid, row, entry.get("memory_bytes"), here=here))
        self._known = {pid: process for pid, process in self._known.items() if pid in seen}
        return lines

    def _process(self, pid: int, row: GpuRow, memory: int | None, *, here: bool) -> ProcessLine:
        line = ProcessLine(pid=pid, node=row.node, gpu=row.index, gpu_uuid=row.gpu_uuid, memory_bytes=memory)
        if not here:
            return line
        import psutil

        try:
            # The same object each time: its processor share is that since the last look.
            process = self._known.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                return ProcessLine(
                    pid=pid,
                    node=row.node,
                    gpu=row.index,
                    gpu_uuid=row.gpu_uuid,
                    memory_bytes=memory,
                    user=process.username(),
                    cpu_percent=process.cpu_percent(),
                    resident_bytes=process.memory_info().rss,
                    seconds=time.time() - process.create_time(),
                    command=" ".join(process.cmdline()) or process.name(),
                )
        except psutil.Error:
            return line
