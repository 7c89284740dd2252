"""Jobs as traces: the daemon's readings of a job every two seconds, with noise, made from a few figures.

A rank's step has three parts: it waits for its batch, it works, and, where the ranks meet in a collective, it waits for the
slowest one. GPUs follow from that: one that works or spins in a collective is busy, one whose rank fetches data is not, and
work draws more power than waiting. Everything follows from the seed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, RankSeen, SavesSeen
from orchestrator.core.thresholds import BALANCE_SECONDS
from orchestrator.gpu.load import GpuLoad, balance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.facts.findings import Finding

TICK_SECONDS = 2.0
IDLE_WATTS, LIMIT_WATTS = 70.0, 400.0
WAITING_WORK = 0.35
CLOCK = 1.755e9
RECENT = 32
_TABLE = random.Random(0)
NORMAL = tuple(_TABLE.gauss(0.0, 1.0) for _ in range(100_000))


@dataclass(slots=True)
class RankModel:
    """One rank: factors that faults change. ``stopped``: it makes no step any more."""

    slower: float = 1.0
    data_share: float = 0.03
    clock: float = 1.0
    stopped: bool = False
    idle_gpu: bool = False
    steps: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


@dataclass(kw_only=True)
class JobModel:
    """A job. ``noise`` is the relative spread of a step's parts; ``parts``: the ranks report the parts of a step."""

    ranks: int = 4
    step_seconds: float = 0.1
    reports: bool = True
    parts: bool = True
    simulated: bool = False
    gpus: bool = True
    lockstep: bool = True
    noise: float = 0.03
    seed: int = 1
    models: tuple[str, ...] = ("H100",)
    nodes: int = 1
    memory: Callable[[float, random.Random], float] | None = None
    hook: Callable[[JobModel, float, JobSeen], JobSeen] | None = None
    loss: Callable[[int, random.Random], float] | None = None
    first_step_at: float = 4.0
    paused: Callable[[float], bool] = lambda _: False
    saves: Callable[[float], SavesSeen] = lambda _: SavesSeen()
    each: list[RankModel] = field(default_factory=list)
    minute: deque[list[tuple[float, float]]] = field(
        default_factory=lambda: deque(maxlen=round(BALANCE_SECONDS / TICK_SECONDS))
    )

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.each = [RankModel() for _ in range(self.ranks)]

    def seen(self, at: float) -> JobSeen:
        """Return the daemon's view of the job ``at`` seconds after every rank is up."""
        pausing, began = self.paused(at), at >= self.first_step_at
        works, waits = self._parts()
        whole = max(work + wait for work, wait in zip(works, waits, strict=True))
        frozen = any(rank.stopped for rank in self.each) and self.lockstep
        seen = [
            self._rank(number, works[number], waits[number], whole, moving=began and not pausing and not frozen)
            for number in range(self.ranks)
        ]
        job = JobSeen(
            ranks=tuple(rank for rank, _ in seen) if self.reports else (),
            gpus=tuple(gpu for _, gpu in seen if gpu is not None),
            certain_work=self.simulated or not self.gpus,
            num_ranks=self.ranks,
            saves=self.saves(at),
        )
        job = replace(job, gpus=tuple(self._with_memory(replace(gpu, sampled_at=at), at) for gpu in job.gpus))
        job = self.hook(self, at, job) if self.hook is not None else job
        return replace(job, load_cv=self._load_cv(job.gpus))

    def _load_cv(self, gpus: Sequence[GpuSeen]) -> float | None:
        """Return the job's coefficient of variation, as the daemon has it from the exporters' last minute."""
        if any(gpu.silent or gpu.utilization is None or gpu.power_watts is None for gpu in gpus):
            return None
        self.minute.append([(gpu.utilization or 0.0, gpu.power_watts or 0.0) for gpu in gpus])
        same = [row for row in self.minute if len(row) == len(gpus)]
        means = [[fmean(value) for value in zip(*column, strict=True)] for column in zip(*same, strict=True)]
        loads = {
            str(number): GpuLoad(utilization=utilization, memory=None, power=watts)
            for number, (utilization, watts) in enumerate(means)
        }
        worst = balance(loads).worst
        return None if worst is None else worst.cv

    def _normal(self, count: int) -> Sequence[float]:
        """Return normally distributed values from a table: drawing each would take most of the time of a trace."""
        start = int(self.random.random() * (len(NORMAL) - count))
        return NORMAL[start : start + count]

    def _node(self, rank: int) -> str:
        return f"n{1 + rank * self.nodes // self.ranks}"

    def _with_memory(self, gpu: GpuSeen, at: float) -> GpuSeen:
        return gpu if self.memory is None else replace(gpu, memory_bytes=self.memory(at, self.random))

    def _parts(self) -> tuple[list[float], list[float]]:
        def noisy(value: float) -> float:
            return value * max(0.2, self.random.gauss(1.0, self.noise))

        base = self.step_seconds
        works = [noisy(base * 0.9 * rank.slower) for rank in self.each]
        waits = [noisy(base * rank.data_share / max(0.01, 1.0 - rank.data_share)) for rank in self.each]
        return works, waits

    def _rank(
        self, number: int, work: float, wait: float, whole: float, *, moving: bool
    ) -> tuple[RankSeen, GpuSeen | None]:
        rank = self.each[number]
        step = (whole if self.lockstep else work + wait) + 0.05 * self.step_seconds
        moving = moving and not rank.stopped
        if moving:
            made = TICK_SECONDS / step
            before, rank.steps = int(rank.steps), rank.steps + made
            some = self._normal(min(RECENT, int(rank.steps) - before))
            rank.recent.extend([step * max(0.5, 1.0 + self.noise * value) for value in some])
        parts = {"data_seconds": wait, "forward_seconds": work * 0.4} if self.parts else {}
        losses = {} if self.loss is None else {"loss": self.loss(int(rank.steps), self.random)}
        seen = RankSeen(
            rank=number,
            node=self._node(number),
            steps=int(rank.steps),
            step_seconds=tuple(rank.recent),
            parts=parts,
            busy_seconds=work if self.simulated or not self.gpus else None,
            losses=losses,
        )
        return seen, self._gpu(number, work / step, wait / step, moving=moving) if self.gpus else None

    def _gpu(self, number: int, work: float, fetch: float, *, moving: bool) -> GpuSeen:
        rank = self.each[number]
        spins = max(0.0, 1.0 - work - fetch) if self.lockstep else 0.0
        if not moving:
            work, spins = 0.0, (0.0 if rank.stopped else 1.0) if self.lockstep and self.reports else 0.0
        if rank.idle_gpu:
            work = spins = 0.0
        busy = min(1.0, max(0.0, work + spins + self.random.gauss(0.0, 0.02)))
        power = IDLE_WATTS + (LIMIT_WATTS - IDLE_WATTS) * 0.8 * rank.clock**2 * min(1.0, work + WAITING_WORK * spins)
        uuid = f"simulated-n-{number}" if self.simulated else f"GPU-{number}"
        return GpuSeen(
            gpu_uuid=uuid,
            rank=number,
            node=self._node(number),
            model=self.models[number % len(self.models)],
            utilization=busy,
            memory_bytes=30e9,
            memory_total_bytes=80e9,
            clock_offset_seconds=-0.7 * (number % 4),
            power_watts=power * self.random.gauss(1.0, 0.02),
            power_limit_watts=LIMIT_WATTS,
            clock_hertz=CLOCK * rank.clock * self.random.gauss(1.0, 0.004) if busy > 0.05 else 3.45e8,
            work=work if self.simulated else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A finding and the time at which it opened, in seconds of the trace."""

    at: float
    finding: Finding


def diagnose(
    job: JobModel, seconds: float, *, events: Sequence[tuple[float, Callable[[JobModel], None]]] = ()
) -> list[Opened]:
    """Return every finding that opens while the job runs for ``seconds``; ``events`` change the job at their times."""
    diagnosis, opened, due = Diagnosis(0.0), [], sorted(events, key=lambda event: event[0])
    for tick in range(math.ceil(seconds / TICK_SECONDS)):
        at = tick * TICK_SECONDS
        while due and due[0][0] <= at:
            due.pop(0)[1](job)
        changes = diagnosis.observe(job.seen(at), at, at)
        opened += [Opened(at=at, finding=finding) for finding in changes.opened]
    return opened
