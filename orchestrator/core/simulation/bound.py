"""Shortest remaining time first, with known durations and free preemption, on GPUs without nodes.

No scheduler can do this: it is the bound for a scheduler's mean completion time.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING

from orchestrator.core.simulation.trace import Outcome, Ran, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.simulation.trace import TraceJob

Entry = tuple[float, int]
_EPSILON = 1e-6


@dataclass(slots=True)
class Left:
    """A job that has not ended."""

    job: TraceJob
    started_at: float | None = None
    preemptions: int = 0


def shortest_remaining(trace: Sequence[TraceJob], gpus: float) -> Outcome:
    """Run the trace; jobs that need more GPUs than there are count as refused."""
    jobs = sorted((job for job in trace if job.all_gpus <= gpus), key=lambda job: job.at)
    refused = tuple(job for job in trace if job.all_gpus > gpus)
    lives = [Left(job) for job in jobs]
    waiting: list[Entry] = []
    running: list[Entry] = []
    ran: list[Ran] = []
    usage = Usage()
    samples: list[tuple[float, float, int]] = []
    now, arrived = (jobs[0].at if jobs else 0.0), 0
    while arrived < len(jobs) or running:
        arrival = jobs[arrived].at if arrived < len(jobs) else float("inf")
        following = min(arrival, now + running[0][0]) if running else arrival
        busy = sum(jobs[number].all_gpus for _, number in running)
        usage.add(following - now, gpus=gpus, busy=busy, pieces=0.0, waiting=bool(waiting))
        running = [(left - (following - now), number) for left, number in running]
        now = following
        for left, number in running:
            if left <= _EPSILON:
                began = lives[number].started_at
                ran.append(
                    Ran(
                        job=jobs[number],
                        started_at=now if began is None else began,
                        ended_at=now,
                        preemptions=lives[number].preemptions,
                    )
                )
        running = [entry for entry in running if entry[0] > _EPSILON]
        while arrived < len(jobs) and jobs[arrived].at <= now:
            insort(waiting, (jobs[arrived].seconds, arrived))
            arrived += 1
        running, waiting = choose(running, waiting, lives, gpus, now)
        samples.append((now, busy, len(waiting)))
    return Outcome(ran=tuple(ran), refused=refused, usage=usage, samples=tuple(samples))


def choose(
    running: list[Entry], waiting: list[Entry], lives: Sequence[Left], gpus: float, now: float
) -> tuple[list[Entry], list[Entry]]:
    """Choose which jobs run next, in order of remaining time, and which wait."""
    chosen: list[Entry] = []
    left = gpus
    for entry in merge(running, waiting):
        if left <= 0:
            break
        live = lives[entry[1]]
        if live.job.all_gpus <= left:
            left -= live.job.all_gpus
            live.started_at = now if live.started_at is None else live.started_at
            chosen.append(entry)
    if chosen == running:
        return running, waiting
    taken = {number for _, number in chosen}
    stays = [entry for entry in waiting if entry[1] not in taken]
    for entry in running:
        if entry[1] not in taken:
            lives[entry[1]].preemptions += 1
            insort(stays, entry)
    return chosen, stays
