"""What a job's observations say over a window of time: means and medians for each rank and GPU, never one sample.

Ranks and GPUs are compared only while every rank is at steps and steps are made: a first step that compiles, an evaluation
or a save on one rank is no difference between them. Pure: the caller brings the clock, which counts witnessed time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.definitions import LEAST_SAMPLES, LEAST_STEPS, STILL_PAUSES, WINDOW_SECONDS
from orchestrator.core.diagnosis.growth import GrowthWindow
from orchestrator.core.diagnosis.straggler import paces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.diagnosis.growth import Growth
    from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, RankSeen

PAUSE_SECONDS: Final = 6.0
"""No step for so long, or for three usual ones, is a pause."""
BUSY: Final = 0.5
"""A clock counts where its GPU was busy for this share of the sample."""
SETTLE_SECONDS: Final = 10.0
"""A job that reports no steps is looked at once it has run for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """A rank over the window: medians in seconds. ``low`` and ``high`` are the quartiles of its step times, ``own_low`` the lower of its own part's."""

    rank: int
    node: str
    step_seconds: float
    low: float
    high: float
    own_seconds: float | None
    own_low: float | None
    data_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """A GPU over the window: means of ratios, medians of the rest. ``throttle`` are the shares of samples by reason.

    ``growth`` is that of its memory. ``clock_offset_seconds`` is the smallest one: what a late report adds to it is left out.
    """

    newest: GpuSeen
    utilization: float | None
    power_watts: float | None
    clock_hertz: float | None
    throttle: Mapping[str, float]
    growth: Growth | None = None
    clock_offset_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """A loss: its newest value, and for how many steps and seconds it has not changed.

    ``usual_steps`` is the longest time without a change before, None while it has not changed three times.
    """

    metric: str
    value: float
    steps: int
    seconds: float
    usual_steps: int | None
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """A job over the window. ``ranks`` and ``gpus`` are empty while they cannot be compared."""

    newest: JobSeen
    ranks: tuple[RankFigures, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()
    losses: tuple[LossFigures, ...] = ()
    reports: bool = False


@dataclass(slots=True)
class _Loss:
    value: float
    step: int
    at: float
    changes: int = 0
    longest: int = 0


@dataclass(slots=True)
class _Rows:
    ranks: dict[int, deque[tuple[float, RankSeen]]] = field(default_factory=dict)
    gpus: dict[str, deque[tuple[float, GpuSeen]]] = field(default_factory=dict)
    memory: dict[str, GrowthWindow] = field(default_factory=dict)


class JobWindows:
    """The windows of one attempt; ``began`` is the clock at its begin."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._rows = _Rows()
        self._losses: dict[str, _Loss] = {}
        self._steps = 0
        self._stepped_at = began

    def add(self, clock: float, seen: JobSeen) -> JobFigures:
        """Take in what is seen now; what the windows say with it."""
        steps = min((rank.steps for rank in seen.ranks), default=0) if len(seen.ranks) == seen.num_ranks else 0
        if steps != self._steps:
            self._steps, self._stepped_at = steps, clock
        self._note_losses(clock, seen)
        reports = any(rank.steps for rank in seen.ranks)
        if self._comparable(clock, seen, reports=reports):
            self._take(clock, seen)
        self._expire(clock)
        self._note_memory(clock, seen)
        return JobFigures(
            newest=seen,
            ranks=self._rank_figures(seen) if reports else (),
            gpus=tuple(self._gpu_figures(gpu) for gpu in seen.gpus),
            losses=tuple(
                LossFigures(
                    metric=name,
                    value=loss.value,
                    steps=max(0, self._loss_step(seen) - loss.step),
                    seconds=clock - loss.at,
                    usual_steps=loss.longest if loss.changes >= 3 else None,
                    changed=loss.changes > 0,
                )
                for name, loss in self._losses.items()
            ),
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
            self._rows.ranks.setdefault(rank.rank, deque()).append((clock, rank))
        for gpu in seen.gpus:
            rows = self._rows.gpus.setdefault(gpu.gpu_uuid, deque())
            if not gpu.silent and (not rows or rows[-1][1].sampled_at != gpu.sampled_at):
                rows.append((clock, gpu))

    def _expire(self, clock: float) -> None:
        for ranks in self._rows.ranks.values():
            while ranks and ranks[0][0] <= clock - WINDOW_SECONDS:
                ranks.popleft()
        for gpus in self._rows.gpus.values():
            while gpus and gpus[0][0] <= clock - WINDOW_SECONDS:
                gpus.popleft()

    # -- ranks

    def _rank_figures(self, seen: JobSeen) -> tuple[RankFigures, ...]:
        windows = {rank.rank: [row for _, row in self._rows.ranks.get(rank.rank, ())] for rank in seen.ranks}
        if any(len(rows) < LEAST_SAMPLES for rows in windows.values()):
            return ()
        steps = {rank: _newest_steps(rows) for rank, rows in windows.items()}
        if any(len(known) < LEAST_STEPS for known in steps.values()):
            return ()
        usual = {rank: median(known) for rank, known in steps.items()}
        parts = {rank: _parts(rows) for rank, rows in windows.items()}
        busy = {rank: self._busy(rank, rows, usual[rank], seen) for rank, rows in windows.items()}
        own = {pace.rank: pace.own_seconds for pace in paces(usual, parts, busy)}
        figures = []
        for rank, known in steps.items():
            low, _, high = quantiles(known, n=4)
            figures.append(
                RankFigures(
                    rank=rank,
                    node=windows[rank][-1].node,
                    step_seconds=usual[rank],
                    low=low,
                    high=high,
                    own_seconds=own[rank],
                    own_low=_low(windows[rank], parts=all(parts.values())) if own[rank] is not None else None,
                    data_seconds=parts[rank].get("data_seconds"),
                )
            )
        return tuple(figures)

    def _busy(self, rank: int, rows: list[RankSeen], step: float, seen: JobSeen) -> float | None:
        """Seconds of a step in which the rank worked; on a real GPU its thread spins, and they say nothing."""
        if not seen.certain_work:
            return None
        told = _median(row.busy_seconds for row in rows)
        if told is not None:
            return told
        gpus = [gpu.gpu_uuid for gpu in seen.gpus if gpu.rank == rank]
        shares = [_mean(row.work for _, row in self._rows.gpus.get(uuid, ())) for uuid in gpus]
        return max((step * share for share in shares if share is not None), default=None)

    # -- GPUs

    def _gpu_figures(self, gpu: GpuSeen) -> GpuFigures:
        rows = [row for _, row in self._rows.gpus.get(gpu.gpu_uuid, ())]
        whole = len(rows) >= LEAST_SAMPLES and not gpu.silent
        reasons = {reason for row in rows for reason in row.throttle}
        return GpuFigures(
            newest=gpu,
            utilization=_mean(row.utilization for row in rows) if whole else None,
            power_watts=_median(row.power_watts for row in rows) if whole else None,
            clock_hertz=_median(row.clock_hertz for row in rows if (row.utilization or 0.0) >= BUSY) if whole else None,
            throttle={reason: fmean(reason in row.throttle for row in rows) for reason in reasons} if whole else {},
            growth=self._rows.memory[gpu.gpu_uuid].growth() if gpu.gpu_uuid in self._rows.memory else None,
            clock_offset_seconds=_nearest(row.clock_offset_seconds for row in rows) if whole else None,
        )

    def _note_memory(self, clock: float, seen: JobSeen) -> None:
        for gpu in seen.gpus:
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
                self._losses[name] = _Loss(value=value, step=step, at=clock)
            elif value != known.value:
                known.longest = max(known.longest, step - known.step) if known.changes else 0
                known.changes += 1
                known.value, known.step, known.at = value, step, clock


def _newest_steps(rows: list[RankSeen]) -> tuple[float, ...]:
    """The durations of the steps that were made in the window, and of the last few where those are fewer."""
    made = rows[-1].steps - rows[0].steps
    return rows[-1].step_seconds[-max(LEAST_STEPS, made) :]


def _parts(rows: list[RankSeen]) -> dict[str, float]:
    names = {name for row in rows for name in row.parts}
    return {name: median(row.parts[name] for row in rows if name in row.parts) for name in names}


def _low(rows: list[RankSeen], *, parts: bool) -> float | None:
    """The lower quartile of a rank's own part of a step; None where that is known from elsewhere."""
    known = [sum(row.parts.values()) for row in rows if row.parts] if parts else []
    known = known or [row.busy_seconds for row in rows if row.busy_seconds is not None]
    return quantiles(known, n=4)[0] if len(known) >= LEAST_SAMPLES else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _nearest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), key=abs, default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
