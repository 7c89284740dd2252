"""Decides which nodes and GPUs are quarantined because ranks keep failing first there. Pure.

A strike is an infrastructure failure that began with a rank on the node, with a cause that may lie in the node.
Strikes decay. Reports of the hardware count each time; failures that a job may have caused itself (a signal, a memory
kill) count once per job, so that one crashing job quarantines no node. The last usable node is never quarantined.

A report of the hardware about one GPU also counts against that GPU, which needs fewer strikes: it is quarantined before its node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.facts.fact import Fact  # noqa: TC001  # codec.py reads the annotations
from orchestrator.core.facts.faults import (
    DiskFull,
    GangFault,
    GpuFault,
    NoExitStatus,
    OomCount,
    OomKill,
    ProcessSignal,
    RepeatedFailures,
    StartupTimeout,
    TerminatedFromOutside,
)
from orchestrator.core.ids import JobId  # noqa: TC001  # codec.py reads the annotations when it runs
from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

HALF_LIFE_SECONDS: Final = 1800.0
ENOUGH: Final = 2.5  # three strikes within minutes
ENOUGH_OF_A_GPU: Final = 1.5  # two: one may be chance, and much less is lost than with a whole node
CHECK_AFTER_SECONDS: Final = 300.0
LONGEST_CHECK_AFTER_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One failure that counts against a node, and perhaps one of its GPUs; ``at`` is seconds since the epoch."""

    node_id: str
    at: float
    job_id: JobId
    cause: Fact
    gpu_uuid: str = ""

    @property
    def is_hardware(self) -> bool:
        """Whether the hardware itself reported it."""
        return isinstance(self.cause, GpuFault)


def strike_of(job: Job, event: ev.Event) -> Strike | None:
    """Return the strike of ``event``, after which the record is ``job``; None for most."""
    if not isinstance(event, ev.AttemptFailed) or event.failure.failure_class is not FailureClass.INFRA:
        return None
    failure = event.failure
    if not speaks_of_place(failure.cause) or failure.rank is None or failure.rank >= len(job.nodes):
        return None
    return Strike(
        node_id=job.nodes[failure.rank],
        at=event.at,
        job_id=job.id,
        cause=failure.cause,
        gpu_uuid=_blamed_gpu(job, failure),
    )


def speaks_of_place(cause: Fact) -> bool:
    """Whether a failure with this cause counts against the node, or the GPU, where it began."""
    match cause:
        case TerminatedFromOutside():
            return False
        case ProcessSignal() | NoExitStatus() | GangFault() | StartupTimeout() | OomKill() | OomCount() | DiskFull():
            return True
        case _:
            return isinstance(cause, GpuFault)


def _blamed_gpu(job: Job, failure: ev.Failure) -> str:
    """Return the GPU that the hardware's fact names, or the rank's only one; empty where several are possible."""
    if not isinstance(failure.cause, GpuFault):
        return ""
    if failure.cause.gpu_uuid:
        return failure.cause.gpu_uuid
    uuids = next((seat.gpu_uuids for seat in job.seats if seat.rank == failure.rank), ())
    return uuids[0] if len(uuids) == 1 else ""


def weight(strikes: Iterable[Strike], now: float) -> float:
    """Return the sum of strikes, each halved with each half-life; of a job's non-hardware ones, the newest counts."""
    total = 0.0
    seen: set[JobId] = set()
    for strike in sorted(strikes, key=lambda s: -s.at):
        if not strike.is_hardware:
            if strike.job_id in seen:
                continue
            seen.add(strike.job_id)
        total += 0.5 ** (max(0.0, now - strike.at) / HALF_LIFE_SECONDS)
    return total


def condemned(strikes: Iterable[Strike], now: float) -> RepeatedFailures | None:
    """Return the reason to quarantine the node; None for none."""
    return _reason(list(strikes), now, ENOUGH)


def condemned_gpu(strikes: Iterable[Strike], now: float) -> RepeatedFailures | None:
    """Return the reason to quarantine the GPU that these strikes name; None for none."""
    return _reason(list(strikes), now, ENOUGH_OF_A_GPU)


def _reason(known: list[Strike], now: float, enough: float) -> RepeatedFailures | None:
    if weight(known, now) < enough:
        return None
    newest = max(known, key=lambda s: s.at)
    return RepeatedFailures(failures=len(known), job_id=newest.job_id, cause=newest.cause)


def quarantined(nodes: Mapping[str, Node], reasons: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the effective reasons by node; none at all where they would exclude every open node."""
    open_nodes = {n.id for n in nodes.values() if n.alive and n.reachable and not n.cordoned}
    if open_nodes and open_nodes <= reasons.keys():
        return {}
    return {node_id: reason for node_id, reason in reasons.items() if node_id in nodes}


def check_after(failed_checks: int) -> float:
    """Return the seconds until the node's health check: doubling with every failed one."""
    return min(LONGEST_CHECK_AFTER_SECONDS, CHECK_AFTER_SECONDS * 2.0 ** min(failed_checks, 20))
