"""Reads GPUs again and again, each in a thread of its own, on deadlines that do not drift.

A driver call can hang for minutes, and nothing can interrupt it. So each GPU has its thread; a caller that needs its latest
sample reads what that thread stored, and how old it is. A GPU that hangs becomes stale, one that is lost is tried
again with growing pauses, and neither affects another GPU. Threads are daemons: one that never returns does not
keep its process from ending.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from orchestrator.gpu.sample import Detail, GpuLostError, GpuReader, GpuReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from orchestrator.gpu.sample import GpuInfo, Sample

SPREAD_SECONDS: Final = 0.0003
"""Time between the ticks of one GPU and the next of a group: about the duration of a reading."""
_SHORT_SLEEP: Final = 0.05
"""Below this a plain sleep is used: it wakes more exactly than a timed wait, and `stop` can wait that long."""


class Health(enum.StrEnum):
    """Whether a GPU answers."""

    OK = "ok"
    STALE = "stale"
    """It answered once, but its driver has been silent for too long."""
    FAILING = "failing"
    """Its driver answers with errors."""
    LOST = "lost"
    """Its driver reports that it is gone."""
    STARTING = "starting"
    """It has not answered yet, but has not been silent for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Intervals at which a GPU's values are read.

    Utilization, memory, clocks and temperatures at most every `load_seconds`: no driver renews them faster. All
    else except power at most every `full_seconds`. A failed GPU is tried again after `retry_seconds`; the last repeats.
    """

    load_seconds: float = 0.1
    full_seconds: float = 1.0
    retry_seconds: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)

    def retry(self, failures: int) -> float:
        """Return the pause after a failure, from the number of failures in a row before it."""
        return self.retry_seconds[min(failures, len(self.retry_seconds) - 1)]


class Details:
    """Chooses the values that each tick reads, by the pace; half a period early counts as due."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next_load = self._next_full = -math.inf

    def at(self, deadline: float, period: float) -> Detail:
        """Return the detail of the tick at `deadline`; there is one tick in each `period`."""
        detail = Detail.POWER
        if deadline >= self._next_load:
            detail, self._next_load = Detail.LOAD, deadline + self._pace.load_seconds - period / 2
        if deadline >= self._next_full:
            detail, self._next_full = Detail.FULL, deadline + self._pace.full_seconds - period / 2
        return detail


class Ticker:
    """Deadlines at multiples of a period from a common start; late ones are skipped and counted, never made up for."""

    def __init__(self, period: float, start: float) -> None:
        """Tick 0 is at `start` (monotonic seconds), the next one `period` seconds later."""
        self.period = period
        self.missed = 0
        self._start = start
        self._tick = -1

    def next(self, now: float) -> tuple[int, float]:
        """Return (number, deadline) of the first tick that is not a whole period late already."""
        tick = self._tick + 1
        late = now - (self._start + tick * self.period)
        if late >= self.period:
            skipped = math.floor(late / self.period)
            self.missed += skipped
            tick += skipped
        self._tick = tick
        return tick, self._start + tick * self.period


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One tick's outcome: the sample, its detail, and how late the tick began (seconds)."""

    tick: int
    lateness: float
    detail: Detail
    sample: Sample


class Sampler:
    """Reads one GPU in a thread."""

    def __init__(
        self,
        reader: GpuReader,
        *,
        rate: float = 1.0,
        stale_after: float | None = None,
        on_reading: Callable[[Reading], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Sample `reader` at `rate` hertz; the reader is used, and closed in the end, by the thread alone.

        `rate` may be set anew while it runs; it takes effect with the next tick but one.
        A GPU is stale when its latest sample is older than `stale_after` seconds (three periods, but at least 3 s).
        `on_reading` is called in the thread after each reading and must be quick.
        """
        self.info: GpuInfo = reader.info
        self.rate = rate
        self.stale_after = max(3.0, 3.0 / rate) if stale_after is None else stale_after
        self.failures = 0
        self.errors = 0
        """Failed readings since the start; `failures` are those since the last sample."""
        self.missed = 0
        self.error: str | None = None
        self.latest: Sample | None = None
        self._reader = reader
        self._on_reading = on_reading
        self._pace = pace or Pace()
        self._lost = False
        self._started = math.inf
        self._stopping = False
        self._until_stop = threading.Lock()
        """Held until the thread must stop: waiting for a lock costs less than waiting for an event."""
        self._until_stop.acquire()
        self._thread: threading.Thread | None = None

    def start(self, at: float | None = None) -> None:
        """Begin; `at` (monotonic seconds) aligns the ticks of several samplers."""
        self._started = time.monotonic() if at is None else at
        self._thread = threading.Thread(target=self._run, name=f"orch-gpu-{self.info.uuid}", daemon=True)
        self._thread.start()

    def health(self, now: float | None = None) -> Health:
        """Return the GPU's health at monotonic time `now`."""
        now = time.monotonic() if now is None else now
        if self._lost:
            return Health.LOST
        if self.error is not None:
            return Health.FAILING
        since = self._started if self.latest is None else self.latest.monotonic
        if now - since > self.stale_after:
            return Health.STALE
        return Health.OK if self.latest is not None else Health.STARTING

    def trouble(self, now: float | None = None) -> str | None:
        """Return the GPU's error at monotonic time `now`, with what to do about it; None while it answers."""
        now = time.monotonic() if now is None else now
        if self.error is None and self.health(now) is Health.STALE:
            since = self._started if self.latest is None else self.latest.monotonic
            return (
                f"its driver has not answered for {now - since:.0f} s. Nothing can interrupt it: look for Xid events in the"
                " kernel log; if it lasts, the GPU needs a reset or the node a reboot."
            )
        return self.error

    def fresh(self, now: float | None = None) -> Sample | None:
        """Return the latest complete sample of a GPU that answers; None for any other."""
        return self.latest if self.health(now) is Health.OK else None

    def request_stop(self) -> None:
        """Signal the thread to end without waiting for it."""
        if not self._stopping:
            self._stopping = True
            self._until_stop.release()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; return whether it has ended. A thread that hangs in its driver is left running."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ticker = Ticker(1.0 / self.rate, self._started)
        missed_before = 0
        details = Details(self._pace)
        try:
            # Opening takes tens of milliseconds, which must not delay the first tick. That tick reports a failure.
            with contextlib.suppress(Exception):  # any error of a driver's library: the first tick reports it
                self._reader.reopen()
            while not self._stopping:
                if ticker.period != 1.0 / self.rate:  # a caller changed the rate
                    missed_before += ticker.missed
                    ticker = Ticker(1.0 / self.rate, time.monotonic())
                tick, deadline = ticker.next(time.monotonic())
                self.missed = missed_before + ticker.missed
                if not self._sleep_until(deadline):
                    return
                lateness = time.monotonic() - deadline
                self._read(tick, lateness, details.at(deadline, ticker.period))
        finally:
            self._reader.close()

    def _sleep_until(self, deadline: float) -> bool:
        """Wait for a deadline; return False when the thread must stop meanwhile."""
        delay = deadline - time.monotonic()
        if delay > _SHORT_SLEEP:
            self._wait(delay)
        elif delay > 0.0:
            time.sleep(delay)
        return not self._stopping

    def _wait(self, seconds: float) -> None:
        """Wait that long, or until the thread must stop."""
        if not self._stopping and self._until_stop.acquire(timeout=seconds):
            self._until_stop.release()

    def _read(self, tick: int, lateness: float, detail: Detail) -> None:
        try:
            if self.error is not None:
                self._reader.reopen()
            sample = self._reader.read(detail)
        except Exception as error:
            self._fail(error)
            return
        self.failures, self.error, self._lost = 0, None, False
        if detail is Detail.FULL:
            self.latest = sample
        if self._on_reading is not None:
            self._on_reading(Reading(tick=tick, lateness=lateness, detail=detail, sample=sample))

    def _fail(self, error: Exception) -> None:
        """Record a failure, and pause before the next try."""
        pause = self._pace.retry(self.failures)
        self.failures += 1
        self.errors += 1
        self._lost = isinstance(error, GpuLostError)
        known = isinstance(error, GpuReadError)
        self.error = str(error) if known else f"{type(error).__name__} in the GPU reader: {error}"
        self._wait(pause)


class SamplerGroup:
    """Samplers of several GPUs, started and stopped together."""

    def __init__(self, samplers: Iterable[Sampler]) -> None:
        """Run these when entered."""
        self.samplers = tuple(samplers)

    def start(self, lead: float = 0.0) -> None:
        """Start them all, the first tick in `lead` seconds; if that is long enough, every GPU is open by then.

        Their ticks are a little apart, because threads that wake at the same moment delay each other.
        """
        at = time.monotonic() + lead
        for place, sampler in enumerate(self.samplers):
            sampler.start(at + place * min(SPREAD_SECONDS, 1.0 / len(self.samplers) / sampler.rate))

    def __enter__(self) -> Self:
        """Start them all now."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop them all."""
        self.stop()

    def stop(self, timeout: float = 2.0) -> tuple[str, ...]:
        """Stop them all within `timeout` seconds; returns the UUIDs of those that hang in their driver."""
        for sampler in self.samplers:
            sampler.request_stop()
        deadline = time.monotonic() + timeout
        return tuple(
            sampler.info.uuid for sampler in self.samplers if not sampler.join(max(0.0, deadline - time.monotonic()))
        )
