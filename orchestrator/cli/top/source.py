"""Fetches the frames of `orch top` in a thread: a daemon or a driver that hangs never blocks a key.

The thread polls once an interval and stores a frame; the screen takes the newest. This machine's drivers are polled
only if the daemon does not answer: its exporters poll them already.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

import psutil

from orchestrator.api.errors import OrchError
from orchestrator.cli.render.gpu_rows import GpuSummary, gpu_summary
from orchestrator.cli.top.frame import Frame, Host, JobLine
from orchestrator.cli.top.past import DaemonWatch, Past
from orchestrator.cli.top.processes import ProcessTree
from orchestrator.gpu.balance.view import gpu_row
from orchestrator.gpu.drivers.inventory import node_name, survey
from orchestrator.gpu.sampler import Sampler, SamplerGroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session
    from orchestrator.gpu.balance.view import GpuRow


class TopSource:
    """Polls once an interval, from entering to leaving."""

    def __init__(self, session: Session, *, simulate: int = 0, interval: float = 1.0) -> None:
        self._session = session
        self._simulate = simulate
        self._interval = interval
        self._node = node_name()
        self._group: SamplerGroup | None = None
        self._local_problems: tuple[str, ...] = ()
        self._past = Past()
        self._daemon = DaemonWatch()
        self._tree = ProcessTree(self._node)
        self._frame: Frame | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orch-top", daemon=True)

    @property
    def frame(self) -> Frame | None:
        """Newest frame; None before the first."""
        return self._frame

    def __enter__(self) -> Self:
        """Start polling."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop polling; a poll that hangs is abandoned."""
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
        """Poll once and store the frame."""
        try:
            seen = self._see()
        except OrchError as error:
            rows, problems = self._local()
            seen = GpuSummary(rows=tuple(rows), problems=(error.message, *problems))
        self._past.add(seen.rows)
        frame = Frame(
            at=time.time(),
            rows=seen.rows,
            history=self._past.load,
            power_history=self._past.power,
            traffic=self._past.traffic,
            jobs=tuple(JobLine(job=job, balance=self._past.balance(job)) for job in seen.jobs),
            processes=self._tree.lines(seen.rows, _owners(seen.jobs, self._node)),
            problems=seen.problems,
            host=_host(),
            origin="simulated GPUs" if self._simulate else self._daemon.origin(there=seen.daemon),
        )
        self._frame = frame
        return frame

    def _see(self) -> GpuSummary:
        if self._simulate:
            rows, problems = self._local()
            return GpuSummary(rows=tuple(rows), problems=problems)
        return gpu_summary(self._session, self._local)

    def _local(self) -> tuple[list[GpuRow], tuple[str, ...]]:
        """Return this machine's GPUs as reported by its drivers; the first call starts sampling."""
        if self._group is None:
            found = survey(simulate=self._simulate)
            for reader in found.readers:
                reader.options.processes = True
                reader.options.sparing = True
            self._local_problems = found.problems
            self._group = SamplerGroup(Sampler(reader, rate=1.0 / max(self._interval, 1.0)) for reader in found.readers)
            self._group.start()
        rows = [
            gpu_row(sampler.info, self._node, sampler.fresh(), health=sampler.health(), problem=sampler.trouble())
            for sampler in self._group.samplers
        ]
        return rows, self._local_problems


def _owners(jobs: Sequence[JobView], node: str) -> dict[int, str]:
    """Return the ranks on this machine, by process id."""
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
