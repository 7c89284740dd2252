"""What `orch top` shows, fetched beside the screen: a daemon or a driver that hangs never holds up a key.

A thread looks once an interval and leaves a frame behind; the screen takes the newest. This machine's own drivers are asked
only from when the daemon does not answer: its exporters ask them already.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

import psutil

from orchestrator.api.errors import OrchError
from orchestrator.cli.render.gpu_rows import GpuSummary, gpu_summary
from orchestrator.cli.render.units import clock
from orchestrator.cli.top.frame import Frame, Host, JobLine, Traffic
from orchestrator.cli.top.processes import ProcessTree
from orchestrator.gpu.balance.balance import SETTLED_SECONDS, GpuLoad, LoadWindow
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
TRAFFIC = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")


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
        self._counters: dict[str, tuple[float, tuple[int | None, ...]]] = {}
        self._traffic: dict[str, Traffic] = {}
        self._tree = ProcessTree(self._node)
        self._gone_since: float | None = None
        self._was_there = False
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
        self._forget({row.gpu_uuid for row in seen.rows})
        frame = Frame(
            at=time.time(),
            rows=seen.rows,
            history={uuid: tuple(values) for uuid, values in self._history.items()},
            power_history={uuid: tuple(values) for uuid, values in self._power.items()},
            traffic=dict(self._traffic),
            jobs=tuple(JobLine(job=job, balance=self._balance(job)) for job in seen.jobs),
            processes=self._tree.lines(seen.rows, _owners(seen.jobs, self._node)),
            problems=seen.problems,
            host=_host(),
            origin=self._origin(there=seen.daemon),
        )
        self._frame = frame
        return frame

    def _origin(self, *, there: bool) -> str:
        """Where the rows come from, when that is not the daemon."""
        if there or self._simulate:
            self._gone_since, self._was_there = None, there
            return "" if there else "simulated GPUs"
        if self._gone_since is None:
            self._gone_since = time.time()
        since = f" since {clock(self._gone_since)}" if self._was_there else ""
        return f"no daemon{since}: this machine only"

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
        if known:
            self._count(row)
        if known and row.sampled_at is not None:
            used = None if row.memory_used_bytes is None else float(row.memory_used_bytes)
            load = GpuLoad(utilization=utilization, memory=used, power=row.power_watts)
            self._window.add_load(row.gpu_uuid, now, load)

    def _forget(self, there: set[str]) -> None:
        """Keep no history of a GPU for longer than a history is long."""
        for uuid in self._history.keys() - there:
            self._history[uuid].append(None)
            self._power[uuid].append(None)
            if all(value is None for value in self._power[uuid]):
                for known in (self._history, self._power, self._counters, self._traffic):
                    known.pop(uuid, None)

    def _balance(self, job: JobView) -> Mapping[str, Any] | None:
        """The daemon's own figures where it has any; else worked out from what was seen here while the job ran."""
        if job.balance is not None:
            return job.balance
        now = time.monotonic()
        uuids = [uuid for rank in job.gpus for uuid in rank.gpu_uuids]
        attempt = job.attempts[-1] if job.attempts else None
        if not uuids or attempt is None or attempt.running_at is None:
            return None
        running = time.time() - attempt.running_at
        if running < SETTLED_SECONDS:
            return None
        return balance_json(self._window.balance(uuids, now, since=now - running))

    def _count(self, row: GpuRow) -> None:
        """Make rates of the counters of two looks; a counter that went back began anew."""
        counters = (
            row.pcie_transmit_bytes, row.pcie_receive_bytes, row.nvlink_transmit_bytes, row.nvlink_receive_bytes,
        )  # fmt: skip
        at = row.sampled_at
        if at is None:
            return
        before = self._counters.get(row.gpu_uuid)
        if before is not None and before[0] == at:
            return
        self._counters[row.gpu_uuid] = (at, counters)
        if before is None or at < before[0]:
            return
        self._traffic[row.gpu_uuid] = Traffic(
            **{
                name: None if new is None or old is None or new < old else (new - old) / (at - before[0])
                for name, old, new in zip(TRAFFIC, before[1], counters, strict=True)
            }
        )


def _owners(jobs: Sequence[JobView], node: str) -> dict[int, str]:
    """The ranks on this machine, by process id."""
    return {
        rank.pid: f"{job.id}:{rank.rank}"
        for job in jobs
        for rank in job.gpus
        if rank.pid is not None and rank.node == node
    }


def _host() -> Host:
    memory = psutil.virtual_memory()
    return Host(
        cpu_share=psutil.cpu_percent() / 100,
        cores=psutil.cpu_count() or 1,
        load=psutil.getloadavg()[0],
        memory_used_bytes=memory.total - memory.available,
        memory_total_bytes=memory.total,
    )
