"""Frames of `orch top`: what one look at the cluster found, with histories; fetched in a thread.

A daemon or a driver that hangs never blocks a key: the thread polls once an interval and stores a frame, and the screen
takes the newest. This machine's drivers are polled only if the daemon does not answer: its exporters poll them already.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import psutil

from orchestrator.api.errors import OrchError
from orchestrator.cli.render.gpus import GpuSummary, gpu_summary
from orchestrator.gpu.drivers.inventory import node_name, survey
from orchestrator.gpu.row import gpu_row
from orchestrator.gpu.sampler import Health, Sampler, SamplerGroup
from orchestrator.units import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session
    from orchestrator.gpu.row import GpuRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per second that a GPU sends and receives; None if the GPU has no counter, or was sampled only once."""

    pcie_sent: float | None = None
    pcie_received: float | None = None
    nvlink_sent: float | None = None
    nvlink_received: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine of this program: processor share of all cores, their number, load, memory."""

    cpu_share: float
    cores: int
    load: float
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment: GPUs with their histories of utilization and power (oldest first), jobs, processes, notes.

    `title` is the first text of the head line; `origin` says where the GPUs come from if not from the daemon.
    """

    at: float
    rows: tuple[GpuRow, ...]
    history: Mapping[str, Sequence[float | None]]
    power_history: Mapping[str, Sequence[float | None]]
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    jobs: tuple[JobView, ...] = ()
    processes: tuple[ProcessLine, ...] = ()
    problems: tuple[str, ...] = ()
    host: Host | None = None
    title: str = ""
    origin: str = ""


class FrameSource(Protocol):
    """Source of the screen's frames."""

    @property
    def frame(self) -> Frame | None:
        """Newest frame; None before the first."""


HISTORY = 240
TRAFFIC = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
Series = dict[str, deque[float | None]]


class Past:
    """Earlier readings, by GPU."""

    def __init__(self) -> None:
        self._load: Series = {}
        self._power: Series = {}
        self._counters: dict[str, tuple[float, tuple[int | None, ...]]] = {}
        self._traffic: dict[str, Traffic] = {}

    def add(self, rows: tuple[GpuRow, ...]) -> None:
        """Add a reading. A GPU that is missing from it is dropped once its history is empty."""
        for row in rows:
            self._add(row)
        for uuid in self._load.keys() - {row.gpu_uuid for row in rows}:
            self._load[uuid].append(None)
            self._power[uuid].append(None)
            if all(value is None for value in self._power[uuid]):
                for known in (self._load, self._power, self._counters, self._traffic):
                    known.pop(uuid, None)

    def _add(self, row: GpuRow) -> None:
        known = row.health in {Health.OK, Health.STARTING}
        utilization = row.utilization_ratio if known else None
        self._load.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(utilization)
        self._power.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(row.power_watts if known else None)
        if known and row.sampled_at is not None:
            self._count(row, row.sampled_at)

    def _count(self, row: GpuRow, at: float) -> None:
        """Compute rates from the counters of two samples; None for a counter that was reset."""
        counters = (
            row.pcie_transmit_bytes, row.pcie_receive_bytes, row.nvlink_transmit_bytes, row.nvlink_receive_bytes,
        )  # fmt: skip
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

    @property
    def load(self) -> dict[str, tuple[float | None, ...]]:
        """Utilization of each GPU, oldest first."""
        return {uuid: tuple(values) for uuid, values in self._load.items()}

    @property
    def power(self) -> dict[str, tuple[float | None, ...]]:
        """Power of each GPU, oldest first."""
        return {uuid: tuple(values) for uuid, values in self._power.items()}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Traffic of each GPU, from its newest two samples."""
        return dict(self._traffic)


class DaemonWatch:
    """Records whether the daemon answers, and since when it does not."""

    def __init__(self) -> None:
        self._was_there = False
        self._gone_since = 0.0

    def origin(self, *, there: bool) -> str:
        """Return the origin of a reading's rows; empty if it is the daemon."""
        if there:
            self._was_there, self._gone_since = True, 0.0
            return ""
        self._gone_since = self._gone_since or time.time()
        since = f" since {clock(self._gone_since)}" if self._was_there else ""
        return f"no daemon{since}: this machine only"


ABOVE = 2
MAX_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    """A process; unknown values are empty or None. `branch` draws its place in the tree.

    `gpu_share` is its part of the GPU's memory. `utilization` is the GPU's, if no other process is on the GPU.
    """

    pid: int
    node: str
    gpu: int | None = None
    gpu_uuid: str = ""
    memory_bytes: int | None = None
    gpu_share: float | None = None
    utilization: float | None = None
    owner: str = ""
    branch: str = ""
    user: str = ""
    cpu_percent: float | None = None
    resident_bytes: int | None = None
    seconds: float | None = None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """A process as reported by a GPU's driver."""

    row: GpuRow
    memory_bytes: int | None
    alone: bool


class ProcessTree:
    """Reads this machine's processes; the processor share of each is that since the last reading."""

    def __init__(self, node: str) -> None:
        self._node = node

    def lines(self, rows: Sequence[GpuRow], owners: Mapping[int, str]) -> tuple[ProcessLine, ...]:
        """Return this machine's tree, then processes on GPUs of other nodes. `owners` names ranks by process id."""
        here: dict[int, list[OnGpu]] = {}
        away: list[ProcessLine] = []
        for row in rows:
            alone = len(row.processes) == 1
            for entry in row.processes:
                pid = entry.get("pid")
                if pid is None:
                    continue
                use = OnGpu(row=row, memory_bytes=entry.get("memory_bytes"), alone=alone)
                if row.node == self._node:
                    here.setdefault(pid, []).append(use)
                else:
                    away.append(_line(pid, row.node, use))
        wanted = here.keys() | owners.keys()
        tree = self._tree(wanted, here, owners) if wanted else []
        return tuple([*tree, *away][:MAX_LINES])

    def _tree(
        self, wanted: set[int], here: Mapping[int, Sequence[OnGpu]], owners: Mapping[int, str]
    ) -> list[ProcessLine]:
        processes, parents = _processes()
        children: dict[int, list[int]] = {}
        shown = _shown(wanted & processes.keys(), parents)
        for pid in sorted(shown):
            if parents.get(pid) in shown:
                children.setdefault(parents[pid], []).append(pid)
        roots = [pid for pid in sorted(shown) if parents.get(pid) not in shown]
        lines: list[ProcessLine] = []
        for pid, branch in _walk(roots, children):
            uses = here.get(pid, ())
            for use in uses or (None,):
                line = _line(pid, self._node, use, owner=owners.get(pid, ""), branch=branch)
                lines.append(_with_host(line, processes[pid]))
        # Processes that only a driver reports: in another container, or just ended.
        lines += [_line(pid, self._node, use) for pid in sorted(here.keys() - processes.keys()) for use in here[pid]]
        return lines


def _processes() -> tuple[dict[int, psutil.Process], dict[int, int]]:
    """Return every process and its parent. psutil keeps the objects, with the processor time at the last reading."""
    processes: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    for process in psutil.process_iter(["ppid"]):
        processes[process.pid] = process
        parents[process.pid] = process.info["ppid"] or 0
    return processes, parents


def _shown(wanted: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return the wanted processes, at most two ancestors of each, and all descendants."""
    shown = set(wanted)
    for pid in wanted:
        above = pid
        for _ in range(ABOVE):
            above = parents.get(above, 0)
            if above <= 1:
                break
            shown.add(above)
    below = seen = set(wanted)
    while below:
        below = {pid for pid, parent in parents.items() if parent in below and pid not in seen}
        seen = seen | below
    return shown | seen


def _walk(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, str]]:
    """Yield each process after its parent, with the tree lines that lead to it."""
    todo = [(pid, "", "") for pid in reversed(roots)]
    while todo:
        pid, branch, below = todo.pop()
        yield pid, branch
        own = children.get(pid, ())
        todo += [
            (child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
            for child, last in reversed([(child, child == own[-1]) for child in own])
        ]


def _line(pid: int, node: str, use: OnGpu | None, *, owner: str = "", branch: str = "") -> ProcessLine:
    if use is None:
        return ProcessLine(pid=pid, node=node, owner=owner, branch=branch)
    row, memory = use.row, use.memory_bytes
    return ProcessLine(
        pid=pid,
        node=node,
        gpu=row.index,
        gpu_uuid=row.gpu_uuid,
        memory_bytes=memory,
        gpu_share=memory / row.memory_total_bytes if memory is not None and row.memory_total_bytes else None,
        utilization=row.utilization_ratio if use.alone else None,
        owner=owner,
        branch=branch,
    )


def _with_host(line: ProcessLine, process: psutil.Process) -> ProcessLine:
    """Return the line with the host's values; unchanged if the process may not be inspected or has ended."""
    try:
        with process.oneshot():
            return replace(
                line,
                user=process.username(),
                cpu_percent=process.cpu_percent(),
                resident_bytes=process.memory_info().rss,
                seconds=time.time() - process.create_time(),
                command=" ".join(process.cmdline()) or process.name(),
            )
    except psutil.Error:
        return line


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
            jobs=seen.jobs,
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
