"""Figures of a job's observations over windows of time: means and medians for each rank and GPU, never one sample.

Ranks and GPUs are compared only while every rank trains and steps are made: a first step that compiles, an evaluation
or a save on one rank is no difference between them. Pure: the caller passes the clock, which counts observed time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.figures.error_window import NO_ERRORS, ErrorWindow
from orchestrator.core.diagnosis.figures.growth import GrowthWindow
from orchestrator.core.diagnosis.figures.loss_window import LossWindow
from orchestrator.core.diagnosis.figures.process_window import ProcessWindow
from orchestrator.core.diagnosis.figures.rank_window import RankWindow
from orchestrator.core.diagnosis.figures.storage_window import NO_STORAGE, StorageWindow
from orchestrator.core.thresholds import (
    LATE_LOOKS,
    LEAST_SAMPLES,
    LEAST_STEPS,
    LONG_WINDOW_SECONDS,
    RANK_WINDOW_SECONDS,
    STILL_PAUSES,
    WINDOW_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.diagnosis.figures.error_window import MemoryErrors
    from orchestrator.core.diagnosis.figures.growth import Growth
    from orchestrator.core.diagnosis.figures.loss_window import LossFigures
    from orchestrator.core.diagnosis.figures.process_window import ProcessFigures
    from orchestrator.core.diagnosis.figures.rank_window import RankFigures
    from orchestrator.core.diagnosis.figures.storage_window import StorageFigures
    from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen

PAUSE_SECONDS: Final = 6.0
"""No step for this long, or for three typical ones, is a pause."""
BUSY: Final = 0.5
"""A clock counts where its GPU was busy for this share of the sample."""
SETTLE_SECONDS: Final = 10.0
"""A job that reports no steps is examined once it has run for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """A GPU over the window: means of ratios, medians of the rest. ``throttle`` are the shares of samples by reason.

    ``growth`` is that of its memory. ``clock_offset_seconds`` is the one nearest to 0: late reports increase it.
    """

    newest: GpuSeen
    utilization: float | None
    power_watts: float | None
    clock_hertz: float | None
    throttle: Mapping[str, float]
    growth: Growth | None = None
    clock_offset_seconds: float | None = None
    errors: MemoryErrors = NO_ERRORS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """A job over the window; ``long_ranks`` over the long one. They are empty while ranks and GPUs cannot be compared."""

    newest: JobSeen
    ranks: tuple[RankFigures, ...] = ()
    long_ranks: tuple[RankFigures, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()
    processes: tuple[ProcessFigures, ...] = ()
    losses: tuple[LossFigures, ...] = ()
    storage: StorageFigures = NO_STORAGE
    late_seconds: float | None = None
    reports: bool = False

    def node_of(self, rank: int) -> str:
        """Return the rank's node; empty where it is unknown."""
        nodes = [one.node for one in self.newest.ranks if one.rank == rank]
        nodes += [gpu.node for gpu in self.newest.gpus if gpu.rank == rank]
        return nodes[0] if nodes else ""


@dataclass(slots=True)
class _Rows:
    ranks: dict[int, RankWindow] = field(default_factory=dict)
    gpus: dict[str, deque[tuple[float, GpuSeen]]] = field(default_factory=dict)
    memory: dict[str, GrowthWindow] = field(default_factory=dict)
    errors: dict[str, ErrorWindow] = field(default_factory=dict)
    processes: dict[int, ProcessWindow] = field(default_factory=dict)


class JobWindows:
    """The windows of one attempt; ``began`` is the clock at its start."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._rows = _Rows()
        self._losses: dict[str, LossWindow] = {}
        self._storage = StorageWindow()
        self._lateness: deque[float] = deque(maxlen=LATE_LOOKS)
        self._steps = 0
        self._stepped_at = began

    def add(self, clock: float, seen: JobSeen) -> JobFigures:
        """Add an observation; return the figures with it."""
        steps = min((rank.steps for rank in seen.ranks), default=0) if len(seen.ranks) == seen.num_ranks else 0
        if steps != self._steps:
            self._steps, self._stepped_at = steps, clock
        self._note_losses(clock, seen)
        reports = any(rank.steps for rank in seen.ranks)
        comparable = self._comparable(clock, seen, reports=reports)
        if comparable:
            self._take(clock, seen)
        for process in seen.processes if seen.running else ():
            window = self._rows.processes.setdefault(process.rank, ProcessWindow())
            window.add(clock, process, comparable=comparable)
        self._expire(clock)
        self._note_memory(clock, seen)
        return JobFigures(
            newest=seen,
            ranks=self._rank_figures(seen, clock - RANK_WINDOW_SECONDS) if reports else (),
            long_ranks=self._rank_figures(seen, clock - LONG_WINDOW_SECONDS) if reports else (),
            gpus=tuple(self._gpu_figures(gpu) for gpu in seen.gpus),
            processes=tuple(
                self._rows.processes[one.rank].figures(one)
                for one in seen.processes
                if one.rank in self._rows.processes
            ),
            losses=tuple(loss.figures(self._loss_step(seen), clock) for loss in self._losses.values()),
            storage=self._storage.add(clock, seen),
            late_seconds=self._late(seen),
            reports=reports,
        )

    def _comparable(self, clock: float, seen: JobSeen, *, reports: bool) -> bool:
        if not seen.running or not all(rank.training for rank in seen.ranks):
            return False
        if not reports:
            return clock - self._began >= SETTLE_SECONDS
        if len(seen.ranks) < seen.num_ranks or min(rank.steps for rank in seen.ranks) < LEAST_STEPS:
            return False
        usual = max((median(rank.step_seconds) for rank in seen.ranks if rank.step_seconds), default=0.0)
        return clock - self._stepped_at <= max(PAUSE_SECONDS, STILL_PAUSES * usual)

    def _take(self, clock: float, seen: JobSeen) -> None:
        for rank in seen.ranks:
            self._rows.ranks.setdefault(rank.rank, RankWindow()).add(clock, rank)
        for gpu in seen.gpus:
            rows = self._rows.gpus.setdefault(gpu.gpu_uuid, deque())
            if not gpu.silent and (not rows or rows[-1][1].sampled_at != gpu.sampled_at):
                rows.append((clock, gpu))

    def _expire(self, clock: float) -> None:
        for ranks in self._rows.ranks.values():
            ranks.expire(clock)
        for gpus in self._rows.gpus.values():
            while gpus and gpus[0][0] <= clock - WINDOW_SECONDS:
                gpus.popleft()

    # -- ranks

    def _rank_figures(self, seen: JobSeen, since: float) -> tuple[RankFigures, ...]:
        windows = {rank.rank: self._rows.ranks.get(rank.rank) or RankWindow() for rank in seen.ranks}
        if not all(window.whole for window in windows.values()):
            return ()
        parts = all(window.has_parts for window in windows.values())
        figures = tuple(
            windows[rank.rank].figures(
                rank,
                since,
                parts=parts,
                busy=seen.certain_work,
                work=self._work(rank.rank, seen) if seen.certain_work else None,
            )
            for rank in seen.ranks
        )
        known = all(one.own is not None for one in figures)  # own work is compared where every rank's is known
        return figures if known else tuple(replace(one, own=None) for one in figures)

    def _work(self, rank: int, seen: JobSeen) -> float | None:
        """Return the share of time in which the rank worked, from its simulated GPUs."""
        gpus = [gpu.gpu_uuid for gpu in seen.gpus if gpu.rank == rank]
        shares = [_mean([row.work for _, row in self._rows.gpus.get(uuid, ())]) for uuid in gpus]
        return max((share for share in shares if share is not None), default=None)

    # -- GPUs

    def _gpu_figures(self, gpu: GpuSeen) -> GpuFigures:
        rows = [row for _, row in self._rows.gpus.get(gpu.gpu_uuid, ())]
        whole = len(rows) >= LEAST_SAMPLES and not gpu.silent
        reasons = set().union(*[row.throttle for row in rows])
        return GpuFigures(
            newest=gpu,
            utilization=_mean([row.utilization for row in rows]) if whole else None,
            power_watts=_median([row.power_watts for row in rows]) if whole else None,
            clock_hertz=_median([row.clock_hertz for row in rows if (row.utilization or 0.0) >= BUSY])
            if whole
            else None,
            throttle={reason: fmean(reason in row.throttle for row in rows) for reason in reasons} if whole else {},
            growth=self._rows.memory[gpu.gpu_uuid].growth() if gpu.gpu_uuid in self._rows.memory else None,
            clock_offset_seconds=_nearest([row.clock_offset_seconds for row in rows]) if whole else None,
            errors=self._rows.errors[gpu.gpu_uuid].errors() if gpu.gpu_uuid in self._rows.errors else NO_ERRORS,
        )

    def _note_memory(self, clock: float, seen: JobSeen) -> None:
        for gpu in seen.gpus:
            if seen.running and not gpu.silent:
                self._rows.errors.setdefault(gpu.gpu_uuid, ErrorWindow()).add(clock, gpu)
            if seen.running and not gpu.silent and gpu.memory_bytes is not None:
                self._rows.memory.setdefault(gpu.gpu_uuid, GrowthWindow()).add(clock, gpu.memory_bytes)

    # -- losses

    def _loss_step(self, seen: JobSeen) -> int:
        return max((rank.steps for rank in seen.ranks), default=0)

    def _note_losses(self, clock: float, seen: JobSeen) -> None:
        step = self._loss_step(seen)
        newest = {name: value for rank in reversed(seen.ranks) for name, value in rank.losses.items()}
        for name, value in newest.items():
            known = self._losses.get(name)
            if known is None:
                self._losses[name] = LossWindow(name, value, step, clock)
            else:
                known.add(value, step, clock)

    # -- the daemon

    def _late(self, seen: JobSeen) -> float | None:
        if seen.late_seconds is not None:
            self._lateness.append(seen.late_seconds)
        return median(self._lateness) if len(self._lateness) == LATE_LOOKS else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _nearest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), key=abs, default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
