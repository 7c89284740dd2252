"""Figures: values over windows of time, computed from a job's observations. Begin with ``JobWindows``, at the end. Pure.

A figure has a standard error where chance may explain it; differences are expressed in standard errors.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.diagnosis.observation import APART
from orchestrator.core.facts.findings import LossJumped
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
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, ProcessSeen, RankSeen, StorageSeen

TRIMMED: Final = 0.2
"""This share of the samples is left out at each end: a save or an evaluation in the window changes no figure."""
FEW: Final = 3.0
"""The true spread of n samples may be larger than measured, by the share ``FEW`` / n."""
LEAST_ERROR: Final = 1e-3
"""Least error, as a share of the value: no clock and no window is more exact than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``value`` is the trimmed mean of samples and ``error`` its standard error."""

    value: float
    error: float


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the trimmed mean, and its error by the winsorized deviation. There are at least two ``samples``."""
    ordered, cut = sorted(samples), int(TRIMMED * len(samples))
    kept = ordered[cut : len(ordered) - cut]
    value = fmean(kept)
    ordered[:cut], ordered[len(ordered) - cut :] = kept[:1] * cut, kept[-1:] * cut  # winsorized
    share = len(kept) / len(ordered)
    error = (1.0 + FEW / len(ordered)) * _deviation(ordered) / (share * math.sqrt(len(ordered)))
    return Estimate(value=value, error=max(error, LEAST_ERROR * abs(value)))


def share(hits: int, looks: int) -> Estimate:
    """Return the share of ``looks``, at least one, that were hits. The error is that of a share further from 0 and 1, so that a few looks that are all alike prove little."""
    middle = (hits + 2.0) / (looks + 4.0)  # Agresti and Coull, Approximate is better than "exact", 1998
    return Estimate(value=hits / looks, error=math.sqrt(middle * (1.0 - middle) / (looks + 4.0)))


def _deviation(values: Sequence[float]) -> float:
    """Return the sample's standard deviation. ``statistics`` computes it in fractions and takes a hundred times as long."""
    return math.dist(values, [fmean(values)] * len(values)) / math.sqrt(len(values) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value, the others' typical one (``usual``), and the difference in standard errors (``deviations``)."""

    value: float
    usual: float
    deviations: float


def typical(estimates: Sequence[Estimate]) -> float:
    """Return the median of the values."""
    return median([one.value for one in estimates])


def above(one: Estimate, others: Sequence[Estimate]) -> Difference:
    """Compare one with the others' median. Where its error is smaller than theirs, the median of theirs is used."""
    usual, spread = typical(others), median([other.error for other in others])
    error = math.hypot(max(one.error, spread), 1.25 * spread / math.sqrt(len(others)))
    return Difference(value=one.value, usual=usual, deviations=(one.value - usual) / error if error else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Steady growth: the use at its end, and its rate."""

    used: float
    per_second: float


class GrowthWindow:
    """The maximum use in each of the newest ``slots`` of equal length. A pause of the observer begins a new series."""

    def __init__(self, slots: int = d.GROWTH_SLOTS, seconds: float = d.GROWTH_SLOT_SECONDS) -> None:
        self._most = slots
        self._seconds = seconds
        self._slots: deque[tuple[int, float]] = deque(maxlen=slots + 2)

    def add(self, clock: float, used: float) -> None:
        """Add a value; ``clock`` counts observed seconds."""
        slot = int(clock // self._seconds)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, max(used, self._slots[-1][1]))
            return
        if self._slots and self._slots[-1][0] != slot - 1:
            self._slots.clear()
        self._slots.append((slot, used))

    def growth(self) -> Growth | None:
        """Return the growth over the completed slots, where it is steady."""
        over = [used for _, used in self._slots][:-1]
        if len(over) <= self._most or not _is_steady(over):
            return None
        seconds = self._seconds * (len(over) - 1)
        return Growth(used=over[-1], per_second=(over[-1] - over[0]) / seconds)


def _is_steady(values: Sequence[float]) -> bool:
    changes = [later - earlier for earlier, later in pairwise(values)]
    half = len(changes) // 2
    earlier, later = sum(changes[:half]), sum(changes[-half:])
    grew = sum(change > 0.0 for change in changes)
    return min(changes) >= 0.0 and grew >= d.GROWING_SHARE * len(changes) and later >= d.STEADY_GROWTH * earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """``uncorrected`` errors and ``remapped`` rows since the first look, ``corrected`` errors of the newest ten minutes."""

    uncorrected: int = 0
    corrected: int = 0
    remapped: int = 0


NO_ERRORS: Final = MemoryErrors()


class ErrorWindow:
    """Memory errors of one GPU. A counter that decreases was reset; the decrease adds nothing."""

    def __init__(self) -> None:
        self._uncorrected = _Count()
        self._remapped = _Count()
        self._corrected = _Count()
        self._lately: deque[tuple[float, int]] = deque()

    def add(self, clock: float, gpu: GpuSeen) -> None:
        """Add the GPU's counters."""
        self._uncorrected.add(gpu.uncorrected)
        self._remapped.add(gpu.remapped)
        more = self._corrected.add(gpu.corrected)
        if more:
            self._lately.append((clock, more))
        while self._lately and self._lately[0][0] <= clock - d.COUNTED_SECONDS:
            self._lately.popleft()

    def errors(self) -> MemoryErrors:
        """Return the errors counted so far."""
        return MemoryErrors(
            uncorrected=self._uncorrected.since,
            corrected=sum(more for _, more in self._lately),
            remapped=self._remapped.since,
        )


class _Count:
    def __init__(self) -> None:
        self._newest: int | None = None
        self.since = 0

    def add(self, count: int | None) -> int:
        """Add a count; return its increase since the last one, 0 for the first."""
        if count is None:
            return 0
        more = 0 if self._newest is None else max(0, count - self._newest)
        self._newest = count
        self.since += more
        return more


MAD_TO_DEVIATION: Final = 1.4826
"""The median absolute deviation of a normal distribution, times this, is its standard deviation."""
HIGH: Final = 0.9
"""After a jump, every one of the newest values is above this quantile of the window."""
MAX_BEFORE: Final = 2
"""A loss varies, and has not jumped, where more than this many spans of values in the window reached half of the jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """A loss: its newest value, and for how many steps and seconds it has not changed.

    ``usual_steps`` is the longest earlier run of steps without a change, None before three changes. ``jump`` is the
    newest values' excess over the ``usual`` one, divided by the least excess of a jump; None while too little is known.
    """

    metric: str
    value: float
    steps: int
    seconds: float
    usual_steps: int | None
    changed: bool
    usual: float = 0.0
    now: float = 0.0
    jump: float | None = None


class LossWindow:
    """Newest values of one metric; begins with its first value."""

    def __init__(self, metric: str, value: float, step: int, at: float) -> None:
        self._metric, self._value, self._step, self._at = metric, value, step, at
        self._changes = self._longest = 0
        self._usual: deque[float] = deque(maxlen=d.LOSS_WINDOW)
        self._newest: deque[float] = deque(maxlen=d.JUMPED_VALUES)
        self._held: deque[float] = deque(maxlen=d.LOSS_WINDOW)
        self._jumped: tuple[float | None, float, float] = (None, 0.0, 0.0)
        self._note(value)

    def add(self, value: float, step: int, at: float) -> None:
        """Add the value reported at ``step``."""
        if value == self._value:
            return
        self._longest = max(self._longest, step - self._step) if self._changes else 0
        self._changes += 1
        self._value, self._step, self._at = value, step, at
        self._note(value)

    def figures(self, step: int, now: float) -> LossFigures:
        """Return the figures at ``step``."""
        jump, usual, newest = self._jumped
        return LossFigures(
            metric=self._metric,
            value=self._value,
            steps=max(0, step - self._step),
            seconds=now - self._at,
            usual_steps=self._longest if self._changes >= 3 else None,
            changed=self._changes > 0,
            usual=usual,
            now=newest,
            jump=jump,
        )

    def _note(self, value: float) -> None:
        if not math.isfinite(value):
            return
        if len(self._newest) == d.JUMPED_VALUES:
            self._held.append(self._newest[0])
        self._newest.append(value)
        self._jumped = self._jump()
        jump = self._jumped[0]
        if jump is None or jump < DEFINITIONS[LossJumped].closes_at or len(self._held) >= d.JUMP_ENDS_AFTER:
            self._usual.extend(self._held)
            self._held.clear()

    def _jump(self) -> tuple[float | None, float, float]:
        """Return the newest value's excess over the usual one in units of the least jump, the usual value, the newest."""
        if len(self._usual) < d.LEAST_LOSSES or len(self._newest) < d.JUMPED_VALUES:
            return None, 0.0, 0.0
        ordered = sorted(self._usual)
        usual = median(ordered)
        deviation = MAD_TO_DEVIATION * median(abs(value - usual) for value in ordered)
        newest = median(self._newest)
        least = max(d.JUMPED_DEVIATIONS * deviation, d.JUMPED_FACTOR * abs(usual))
        if least <= 0.0 or min(self._newest) <= ordered[int(HIGH * (len(ordered) - 1))]:
            return 0.0, usual, newest
        values, half = list(self._usual), (usual + newest) / 2.0
        spans = (values[start : start + d.JUMPED_VALUES] for start in range(0, len(values), d.JUMPED_VALUES))
        if sum(median(span) >= half for span in spans) > MAX_BEFORE:
            return 0.0, usual, newest
        return (newest - usual) / least, usual, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """One rank: processors used, and the shares of looks in which its training thread waited. None where too little is known.

    ``asleep`` and ``locked`` are those of ``ProcessSeen``.
    """

    newest: ProcessSeen
    busy: Estimate | None = None
    asleep: float | None = None
    locked: Estimate | None = None
    growth: Growth | None = None
    fast_growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    at: float
    busy: float
    looks: int
    asleep: int
    locked: int


class ProcessWindow:
    """The window of one rank."""

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque()
        self._before: ProcessSeen | None = None
        self._slow = GrowthWindow()
        self._fast = GrowthWindow(d.FAST_SLOTS, d.FAST_SLOT_SECONDS)

    def add(self, clock: float, seen: ProcessSeen, *, comparable: bool) -> None:
        """Add an observation. Time in which ranks cannot be compared is no evidence of what they wait for."""
        before, self._before = self._before, seen if comparable else None
        self._slow.add(clock, seen.resident_bytes)
        self._fast.add(clock, seen.resident_bytes)
        if before is not None and seen.at > before.at and seen.looks >= before.looks:
            self._spans.append(
                _Span(
                    at=clock,
                    busy=max(0.0, seen.cpu_seconds - before.cpu_seconds) / (seen.at - before.at),
                    looks=seen.looks - before.looks,
                    asleep=seen.asleep - before.asleep,
                    locked=seen.locked - before.locked,
                )
            )
        while self._spans and self._spans[0].at <= clock - d.PROCESS_WINDOW_SECONDS:
            self._spans.popleft()

    def figures(self, newest: ProcessSeen) -> ProcessFigures:
        """Return the figures of the window."""
        looks = sum(span.looks for span in self._spans)
        known = looks >= d.LEAST_LOOKS
        busy = [span.busy for span in self._spans]
        return ProcessFigures(
            newest=newest,
            busy=estimate(busy) if len(busy) >= d.LEAST_STEPS else None,
            asleep=sum(span.asleep for span in self._spans) / looks if known else None,
            locked=share(sum(span.locked for span in self._spans), looks) if known else None,
            growth=self._slow.growth(),
            fast_growth=self._fast.growth(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """A rank over the window: the seconds of a step, its own work in them, and its wait for the next batch."""

    rank: int
    node: str
    step: Estimate
    own: Estimate | None
    data_seconds: float | None


def in_lockstep(ranks: Sequence[RankFigures]) -> bool:
    """Whether the steps of all ranks take the same time: then they meet in a collective at every step. True where no rank reports steps."""
    steps = [rank.step.value for rank in ranks]
    return not steps or max(steps) <= d.LOCKSTEP * min(steps)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    step_seconds: float
    parts_seconds: float | None
    data_seconds: float | None
    busy_seconds: float | None


class RankWindow:
    """The window of one rank."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._steps = 0

    def add(self, clock: float, seen: RankSeen) -> None:
        """Add the rank's report, where it has made steps since the last one."""
        made, self._steps = seen.steps - self._steps, seen.steps
        if made <= 0 or not seen.step_seconds:
            return
        parts = [value for name in APART if (value := seen.parts.get(name)) is not None]
        self._samples.append(
            _Sample(
                at=clock,
                step_seconds=median(seen.step_seconds[-made:]),
                parts_seconds=sum(parts) if parts else None,
                data_seconds=seen.parts.get("data_seconds"),
                busy_seconds=seen.busy_seconds,
            )
        )

    def expire(self, clock: float) -> None:
        """Drop samples that are older than the longest window, except the last few."""
        while len(self._samples) > d.LEAST_STEPS and self._samples[0].at <= clock - d.LONG_WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def whole(self) -> bool:
        """Whether there are enough samples for a figure."""
        return len(self._samples) >= d.LEAST_STEPS

    @property
    def has_parts(self) -> bool:
        """Whether the rank reports the parts of its steps."""
        return bool(self._samples) and self._samples[-1].parts_seconds is not None

    def figures(self, rank: RankSeen, since: float, *, parts: bool, busy: bool, work: float | None) -> RankFigures:
        """Return the figures of the samples after ``since``, or the last few. Own work is from ``parts``, else processor time (``busy``).

        ``work`` is the share of time in which the rank worked, by its GPU, where nothing else shows it.
        """
        samples = [sample for sample in self._samples if sample.at > since]
        if len(samples) < d.LEAST_STEPS:
            samples = list(self._samples)[-d.LEAST_STEPS :]
        steps = [sample.step_seconds for sample in samples]
        data = [sample.data_seconds for sample in samples if sample.data_seconds is not None]
        own: list[float] = []
        if parts:
            own = [sample.parts_seconds for sample in samples if sample.parts_seconds is not None]
        elif busy:
            own = [sample.busy_seconds for sample in samples if sample.busy_seconds is not None]
            own = own or ([step * work for step in steps] if work is not None else [])
        return RankFigures(
            rank=rank.rank,
            node=rank.node,
            step=estimate(steps),
            own=estimate(own) if len(own) >= d.LEAST_STEPS else None,
            data_seconds=median(data) if data else None,
        )


MAX_WRITES: Final = 16
LEAST_WRITES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStorage:
    """One rank: seconds of its newest write, or of the one in progress (``busy``) if that is longer, and of a usual one if known."""

    rank: int
    seconds: float
    busy: bool
    usual_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFigures:
    """``needed_bytes`` is the sum of the ranks' newest writes, ``free_bytes`` the smallest free space of a rank's storage.

    ``waiting`` is the share of the newest time in which saves waited for storage.
    """

    ranks: tuple[RankStorage, ...] = ()
    needed_bytes: int = 0
    free_bytes: int | None = None
    waiting: float = 0.0


NO_STORAGE: Final = StorageFigures()


class StorageWindow:
    """Writes of one attempt."""

    def __init__(self) -> None:
        self._writes: dict[int, deque[float]] = {}
        self._counted: dict[int, int] = {}
        self._waited: deque[tuple[float, float]] = deque()

    def add(self, clock: float, seen: JobSeen) -> StorageFigures:
        """Add an observation; return the figures with it."""
        if not seen.running:
            return NO_STORAGE
        ranks = tuple(self._rank(one) for one in seen.storage)
        free = [one.free_bytes for one in seen.storage if one.free_bytes is not None]
        return StorageFigures(
            ranks=ranks,
            needed_bytes=sum(one.written_bytes for one in seen.storage),
            free_bytes=min(free, default=None),
            waiting=self._waiting(clock, seen.saves.waited_seconds),
        )

    def _rank(self, seen: StorageSeen) -> RankStorage:
        writes = self._writes.setdefault(seen.rank, deque(maxlen=MAX_WRITES))
        if seen.writes > self._counted.get(seen.rank, 0) and not seen.failures:
            self._counted[seen.rank] = seen.writes
            writes.append(seen.seconds)
        earlier = list(writes)[:-1] if seen.busy_seconds < seen.seconds else list(writes)
        return RankStorage(
            rank=seen.rank,
            seconds=max(seen.busy_seconds, seen.seconds),
            busy=seen.busy_seconds >= max(seen.seconds, d.LEAST_WRITE_SECONDS),
            usual_seconds=median(earlier) if len(earlier) >= LEAST_WRITES else None,
        )

    def _waiting(self, clock: float, waited: float) -> float:
        self._waited.append((clock, waited))
        while len(self._waited) > 1 and self._waited[1][0] <= clock - d.WAITING_SECONDS:
            self._waited.popleft()
        (since, before), seconds = self._waited[0], clock - self._waited[0][0]
        return max(0.0, waited - before) / seconds if seconds >= d.WAITING_SECONDS / 2.0 and since < clock else 0.0


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
