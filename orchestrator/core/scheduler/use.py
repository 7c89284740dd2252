"""Past use by queues and users, halved with every half-life, and the times at which their jobs last started. Pure.

Amounts are vectors of GPUs, CPUs and bytes of memory. Divided by what the cluster has, the largest part is the
*dominant* one. ``PastUse`` has the use by gangs that are gone; shares.py adds that by gangs that are held.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core import events as ev
from orchestrator.core.scheduler.durations import RunTimeHistory, RunTimes
from orchestrator.core.scheduler.resources import rank_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.attempt import Attempt
    from orchestrator.core.job.record import Job

MOST_HALVINGS: Final = 100.0
"""Number of half-lives after which use is counted from a new time, before weights become too large."""


class Amounts(NamedTuple):
    """GPUs, CPUs and memory, or seconds of them."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory: float = 0.0

    def plus(self, other: Amounts, factor: float = 1.0) -> Amounts:
        """Return the sum of these and ``factor`` times the other amounts."""
        return Amounts(
            self.gpus + factor * other.gpus, self.cpus + factor * other.cpus, self.memory + factor * other.memory
        )

    def dominant(self, of: Amounts) -> float:
        """Return the largest of the fractions that these amounts are of ``of``."""
        return max(
            self.gpus / of.gpus if of.gpus > 0 else 0.0,
            self.cpus / of.cpus if of.cpus > 0 else 0.0,
            self.memory / of.memory if of.memory > 0 else 0.0,
        )


class Account(NamedTuple):
    """The queue, as a job.yaml names it, and the user to which use is counted."""

    queue: str
    user: str


@dataclass(frozen=True, slots=True)
class Used:
    """Resource seconds, each weighted as it counts at the time ``at``."""

    at: float
    amounts: Amounts

    def by(self, now: float, half_life: float) -> Amounts:
        """Return the part that counts at ``now``."""
        return Amounts().plus(self.amounts, _fade(now - self.at, half_life))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUse:
    """The past as decisions use it: what ended gangs have ``used``, when jobs last ``started``, and run times.

    ``started`` is by queue, user and priority.
    """

    used: Mapping[Account, Used] = field(default_factory=dict)
    started: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    run_times: RunTimes = field(default_factory=RunTimes)


def _fade(seconds: float, half_life: float) -> float:
    return float(0.5 ** (max(0.0, seconds) / half_life))


def span_seconds(began: float, ended: float, now: float, half_life: float) -> float:
    """Return the seconds from ``began`` to ``ended`` as they count at ``now``: the integral of their weights."""
    if ended <= began:
        return 0.0
    return half_life / log(2) * (_fade(now - ended, half_life) - _fade(now - began, half_life))


def account_of(job: Job) -> Account:
    """Return the account to which the job's use is counted."""
    return Account(job.spec.queue, job.submission.user)


def amounts_of(job: Job, ranks: int) -> Amounts:
    """Return what this number of the job's ranks holds."""
    cpus, gpus, memory = rank_size(job)
    return Amounts(ranks * gpus, ranks * cpus, float(ranks * memory))


def capacity_of(nodes: Mapping[str, Node]) -> Amounts:
    """Return the resources of the nodes that accept new ranks."""
    there = [node for node in nodes.values() if node.schedulable]
    return Amounts(sum(n.gpus for n in there), sum(n.cpus for n in there), float(sum(n.memory_bytes for n in there)))


def gang_began(job: Job) -> float | None:
    """Return when the newest gang was ordered; None before the first."""
    return next((attempt.started_at for attempt in job.attempts if attempt.gang == job.gang), None)


class UseHistory:
    """Learns from events what jobs have used; ``remember`` rebuilds it from records."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._held: dict[JobId, tuple[int, float, Amounts]] = {}
        self._used: dict[Account, Used] = {}
        self._started: dict[tuple[str, str, int], float] = {}
        self._run_times = RunTimeHistory()

    def observe(self, job: Job, event: ev.Event) -> bool:
        """Record a folded event and the job's record after it; return whether what is known of the past has changed."""
        before = self._held.get(job.id)
        closes = before is not None and (not job.gang_open or before[0] != job.gang)
        if closes:
            self.released(job, event.at)
        starts = isinstance(event, ev.AttemptStarted)
        if starts:
            self._start(job, event.at)
        if job.gang_open and job.id not in self._held:
            self._held[job.id] = (job.gang, event.at, amounts_of(job, len(job.nodes)))
        if isinstance(event, ev.JobFinished):
            self._run_times.ended(job)
        return closes or starts

    def released(self, job: Job, at: float) -> None:
        """Record that a job has released the gang that it held."""
        _, began, amounts = self._held.pop(job.id)
        self._add(account_of(job), began, at, amounts)

    def remember(self, jobs: Iterable[Job]) -> None:
        """Count earlier use: the attempts that the jobs' records list, and the gangs that they hold."""
        found = list(jobs)
        self._run_times.remember(job for job in found if job.state.is_terminal)
        for job in found:
            for attempt in job.attempts:
                self._start(job, attempt.started_at)
                if not (job.gang_open and attempt.gang == job.gang):
                    self._add_attempt(job, attempt)
            began = gang_began(job)
            if job.gang_open and began is not None:
                self._held[job.id] = (job.gang, began, amounts_of(job, len(job.nodes)))

    def view(self) -> PastUse:
        """Return what is known now, as a value."""
        return PastUse(used=dict(self._used), started=dict(self._started), run_times=self._run_times.view)

    def _add_attempt(self, job: Job, attempt: Attempt) -> None:
        ended = attempt.ended_at if attempt.ended_at is not None else job.ended_at
        if ended is not None:
            self._add(account_of(job), attempt.started_at, ended, amounts_of(job, attempt.ranks))

    def _start(self, job: Job, at: float) -> None:
        key = (job.spec.queue, job.submission.user, job.priority)
        self._started[key] = max(at, self._started.get(key, at))

    def _add(self, account: Account, began: float, ended: float, amounts: Amounts) -> None:
        known = self._used.get(account, Used(ended, Amounts()))
        at = max(known.at, ended)
        seconds = span_seconds(began, ended, at, self._half_life)
        self._used[account] = Used(at, known.by(at, self._half_life).plus(amounts, seconds))
