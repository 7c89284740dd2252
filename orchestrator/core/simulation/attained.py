"""Least attained service, as published: the order of Tiresias (NSDI 2019), for comparison. Durations are not known.

Jobs are in queues by the GPU time that they have used. Earlier queues go first, and in each queue the first job to
arrive. A job may stop when it moves to a later queue, or when another of an earlier queue displaces it. As in the bound
(``bound.py``), and unlike in any scheduler, preemption is free, nothing is repeated, and GPUs have no nodes. So the
results here are at least as good as on a cluster.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Final

from orchestrator.core.simulation.bound import Entry, Left, choose
from orchestrator.core.simulation.trace import Outcome, Ran, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.simulation.trace import TraceJob

TIRESIAS: Final = (3250.0, 7200.0, 18000.0)
"""Ends of the queues of Tiresias, in GPU seconds, from its authors' simulator."""
LAS: Final = tuple(60.0 * 2.0**n for n in range(22))
"""Ends of so many queues that the order comes close to least attained service without queues."""
_EPSILON: Final = 1e-6


def least_attained(trace: Sequence[TraceJob], gpus: float, ends: Sequence[float]) -> Outcome:
    """Run the trace; ``ends`` is where the queues end, in GPU seconds.

    Jobs that need more GPUs than there are count as refused.
    """
    return _Play(trace, gpus, ends).run()


class _Play:
    """One run. Jobs are identified by their number in order of arrival."""

    def __init__(self, trace: Sequence[TraceJob], gpus: float, ends: Sequence[float]) -> None:
        self._jobs = sorted((job for job in trace if job.all_gpus <= gpus), key=lambda job: job.at)
        self._refused = tuple(job for job in trace if job.all_gpus > gpus)
        self._gpus = gpus
        self._ends = ends
        self._lives = [Left(job) for job in self._jobs]
        self._left = [job.seconds for job in self._jobs]
        self._running: list[Entry] = []
        self._waiting: list[Entry] = []
        self._ran: list[Ran] = []

    def run(self) -> Outcome:
        """Run until all jobs have ended."""
        usage, samples, arrived = Usage(), list[tuple[float, float, int]](), 0
        now = self._jobs[0].at if self._jobs else 0.0
        while arrived < len(self._jobs) or self._running:
            following = self._jobs[arrived].at if arrived < len(self._jobs) else float("inf")
            following = min(following, now + self._next_change()) if self._running else following
            busy = sum(self._jobs[number].all_gpus for _, number in self._running)
            usage.add(following - now, gpus=self._gpus, busy=busy, pieces=0.0, waiting=bool(self._waiting))
            self._advance(now, following)
            now = following
            while arrived < len(self._jobs) and self._jobs[arrived].at <= now:
                insort(self._waiting, (0.0, arrived))
                arrived += 1
            self._running, self._waiting = choose(self._running, self._waiting, self._lives, self._gpus, now)
            samples.append((now, busy, len(self._waiting)))
        return Outcome(ran=tuple(self._ran), refused=self._refused, usage=usage, samples=tuple(samples))

    def _queue(self, number: int) -> float:
        job = self._jobs[number]
        return float(bisect_right(self._ends, (job.seconds - self._left[number]) * job.all_gpus + _EPSILON))

    def _next_change(self) -> float:
        """Return the seconds until a running job ends or moves to a later queue."""
        found = []
        for queue, number in self._running:
            job, left = self._jobs[number], self._left[number]
            if queue < len(self._ends):
                left = min(left, self._ends[int(queue)] / job.all_gpus - (job.seconds - left))
            found.append(max(left, _EPSILON))
        return min(found)

    def _advance(self, since: float, now: float) -> None:
        for _, number in self._running:
            self._left[number] -= now - since
        for _, number in self._running:
            if self._left[number] <= _EPSILON:
                live = self._lives[number]
                began = now if live.started_at is None else live.started_at
                self._ran.append(Ran(job=live.job, started_at=began, ended_at=now, preemptions=live.preemptions))
        stay = (number for _, number in self._running if self._left[number] > _EPSILON)
        self._running = sorted((self._queue(number), number) for number in stay)
