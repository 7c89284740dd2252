"""Classifies a failed attempt, then decides whether it is retried. Two pure functions; nothing is carried out here.

Survivors of a dead rank fail too, with errors of the collective in which they waited. These are collateral: they never
hide the rank that failed first. While only collateral is known, the decision waits a moment for the root cause.

A rank that left because of a request to stop that orch had not sent has failed, whatever its exit code: its job is not
done. The others probably got the same request, and get the time to save that the job grants.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.diagnosis.signatures import (
    SHELL_BASE,
    child_end,
    explaining,
    killed,
    match_signature,
    uncaught_exception,
)
from orchestrator.core.events import Failure
from orchestrator.core.facts.faults import (
    CollectiveTimeout,
    EndedAlone,
    ExitCode,
    FileLeftOut,
    GpuFault,
    LeftEarly,
    MemoryLimit,
    NoExitStatus,
    OomKill,
    PeerLost,
    PortTaken,
    Problem,
    ProcessSignal,
    PythonException,
    RecordRestored,
    RendezvousTimeout,
    RepeatedCrash,
    RetryExitCode,
    ScriptProblem,
    StartupTimeout,
    TerminatedFromOutside,
)
from orchestrator.core.facts.reasons import BudgetSpent, LogPolicyFails, NoNewCheckpoint
from orchestrator.core.states import FailureClass, OutOf, StopScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.events import Exit
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.faults import RankEnd
    from orchestrator.core.job.record import Job


def memory_cause(job: Job, ended: Exit) -> MemoryLimit | OomKill | None:
    """Return the cause, when memory explains the end; None when it does not.

    A process of the rank may have been killed for memory long before the rank ended for another reason.
    """
    memory = ended.memory
    if memory is None or memory.killed is None:
        return None
    if not killed(ended):
        return None
    asked = job.spec.resources.resources_per_worker.memory_bytes
    if memory.killed is OutOf.LIMIT:
        limit = memory.used_bytes if memory.limit_bytes is None else memory.limit_bytes
        return MemoryLimit(rank=ended.rank, used_bytes=memory.used_bytes, limit_bytes=limit, asked_bytes=asked)
    return OomKill(rank=ended.rank, used_bytes=memory.used_bytes, asked_bytes=asked)


def with_port(ended: Exit, failure_class: FailureClass, cause: RankEnd) -> tuple[FailureClass, RankEnd]:
    """Return class and cause with what is known of the port; any other cause as it is.

    Class USER, without a restart, where the error names a port that does not follow from MASTER_PORT and a process listens there after
    the rank has ended. A port that orch chose is another one in the next attempt, and one at which no process listens (connections
    that end, an error without the port) may be free by then.
    """
    if not isinstance(cause, ScriptProblem) or cause.problem is not Problem.PORT_IN_USE:
        return failure_class, cause
    taken = next((fact for fact in ended.evidence if isinstance(fact, PortTaken)), None)
    if taken is None:
        return failure_class, cause
    lasting = taken.listening and not taken.chosen_by_orch
    return FailureClass.USER if lasting else failure_class, replace(taken, rank=ended.rank, said=cause.said)


OWN_SIGNALS: Final = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: caused by the program. SIGKILL and SIGTERM come from outside."""


def repeated(job: Job, failure: Failure) -> Failure:
    """Return the failure as the script's, where the previous attempt failed in the same way at the same step; else unchanged."""
    mark = _mark(failure.cause)
    if mark is None or failure.failure_class is not FailureClass.INFRA:
        return failure
    times = 2 if failure.step is None and mark[1] is not Problem.PORT_IN_USE else 1
    before = [attempt.failure for attempt in job.attempts[-1 - times : -1]]
    same = [
        (one.step, one.rank, _mark(one.cause)) == (failure.step, failure.rank, mark)
        for one in before
        if one is not None
    ]
    if len(same) < times or not all(same):
        return failure
    cause = RepeatedCrash(rank=failure.rank, crash=failure.cause, step=failure.step)
    return replace(failure, failure_class=FailureClass.USER, cause=cause)


def _mark(cause: Fact) -> tuple[str, object] | None:
    """Return what makes two crashes the same; None for those that are no evidence about the program."""
    match cause:
        case RepeatedCrash(crash=crash):
            return _mark(crash)
        case TerminatedFromOutside():
            return None
        case ProcessSignal(signal=number):
            return (cause.kind, number) if number in OWN_SIGNALS else None
        case ScriptProblem(problem=problem):
            return cause.kind, problem
        case PortTaken():
            return ScriptProblem.kind, Problem.PORT_IN_USE
        case _:
            return None


# Time that a collateral error waits for the end that caused it: an ending process closes its connections before it is
# gone, by more than 0.25 s on a busy machine.
SETTLE_SECONDS = 3.0
KEEP_GANG_SECONDS = 10.0  # a longer back-off releases the GPUs meanwhile

_COLLATERAL = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|connection was (?:closed|reset)|recvBytes failed|Broken pipe"
    r"|NCCL (?:communicator was aborted|error|timeout)|ncclRemoteError|ncclSystemError|remote process exited"
    r"|DistBackendError|DistNetworkError: (?!.*EADDRINUSE)|DistStoreError|ProcessGroup\w* .*(?:abort|timed? ?out)"
    r"|gloo.*(?:timed? ?out|EnforceNotMet|pair\.cc)|failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
    r"|Rank \d+ (?:is|was) (?:gone|lost)|Socket Timeout|failed to recv",
    re.IGNORECASE,
)
_SIGABRT = 6
_SIGTERM = 15
_SIGNALS_FROM_OUTSIDE = frozenset({1, 9, 15})


@dataclass(frozen=True, slots=True)
class ClassifiedFailure:
    """A failure, and the time at which it began (seconds since the epoch)."""

    failure: Failure
    failed_at: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Decision whether to retry, and the earliest time."""

    retry: bool
    keep_gang: bool
    not_before: float
    refusal: Fact | None = None


def is_collateral(ended: Exit) -> bool:
    """Whether the rank failed because another one had: an exception, an exit code or an abort about its peers."""
    if ended.ok or ended.signal not in (None, _SIGABRT):
        return False
    text = f"{ended.error_type}: {ended.error_message}" if ended.error_type else "\n".join(ended.log_tail[-15:])
    return bool(_COLLATERAL.search(text)) and child_end(ended) is None


def classify(job: Job, now: float) -> ClassifiedFailure | float | None:
    """Classify the current attempt's failure; return a time to call again until the cause is known, None if none failed."""
    left = job.left_early
    failed = [e for e in job.exits if not e.ok and e not in left]
    if left and not any(not is_collateral(e) and e.failed_at < _asked_at(left) for e in failed):
        return _classify_left(job, left, now)
    if not failed:
        return None
    first = min(failed, key=lambda e: (is_collateral(e), e.failed_at))
    if job.gang_lost and is_collateral(first):
        return ClassifiedFailure(gang_failure(job.reason), first.failed_at)
    if is_collateral(first) and len(job.exits) < job.num_workers:
        settled_at = min(e.heard_at for e in failed) + SETTLE_SECONDS
        if now < settled_at:
            return settled_at
    return ClassifiedFailure(_judged(job, first), first.failed_at)


def _asked_at(left: Sequence[Exit]) -> float:
    return min(e.stop_seen_at for e in left if e.stop_seen_at is not None)


def _classify_left(job: Job, left: tuple[Exit, ...], now: float) -> ClassifiedFailure | float:
    """Classify ranks that left, once the others have ended too, or had their time to."""
    until = follow_until(job, left)
    if len(job.exits) < job.num_workers and not job.gang_lost and now < until:
        return until
    return ClassifiedFailure(stop_failure(left), _asked_at(left))


def follow_until(job: Job, left: Sequence[Exit]) -> float:
    """Return the time until which the other ranks may run, once these have left after a request not sent by orch."""
    return min(e.heard_at for e in left) + job.spec.stop_duration.total_seconds()


def stop_failure(left: Sequence[Exit]) -> Failure:
    """Return the failure of ranks that left after a request to stop that orch had not sent."""
    first = min(left, key=lambda e: (e.stop_seen_at or e.at, e.rank))
    scope = StopScope.MACHINE if any(e.stop_scope is StopScope.MACHINE for e in left) else StopScope.RANK
    cause = LeftEarly(rank=first.rank, scope=scope, step=first.last_step, total_steps=first.total_steps)
    failure_class = FailureClass.PREEMPTION if scope is StopScope.MACHINE else FailureClass.INFRA
    return replace(_failed(first, failure_class, cause), policy=first.policy)


def _judged(job: Job, first: Exit) -> Failure:
    failure_class, cause = _cause(job, first)
    failure = _failed(first, failure_class, cause)
    if isinstance(cause, _OF_PEERS) and is_collateral(first):
        said = getattr(cause, "said", "")
        failure = ended_alone(job, waiting=first.rank, since=first.failed_at, said=said) or failure
    return repeated(job, replace(failure, policy=first.policy, policy_note=first.policy_note))


_OF_PEERS = (PeerLost, CollectiveTimeout, RendezvousTimeout, PythonException, ExitCode, ProcessSignal)
"""Causes that, where they are collateral, say no more than that another rank was missing."""


def ended_alone(job: Job, *, waiting: int | None, since: float, said: str = "") -> Failure | None:
    """Return the failure of the rank that had ended with exit code 0 when others began to miss it; None where none had.

    Its connections close before it is gone. One that prints such an error itself, and ends with 0 then, was a victim too.
    """
    until = since + SETTLE_SECONDS
    gone = [e for e in job.exits if e.ok and e.at <= until and not _COLLATERAL.search("\n".join(e.log_tail))]
    first = min(gone, key=lambda e: (e.at, e.rank), default=None)
    if first is None:
        return None
    cause = EndedAlone(rank=first.rank, waiting=waiting, step=first.last_step, said=said)
    return _failed(first, FailureClass.USER, cause)


def _failed(first: Exit, failure_class: FailureClass, cause: Fact) -> Failure:
    return Failure(
        failure_class=failure_class,
        cause=cause,
        rank=first.rank,
        exit_code=first.exit_code,
        signal=first.signal,
        log_tail=first.log_tail,
        step=first.last_step,
    )


def _cause(job: Job, first: Exit) -> tuple[FailureClass, Fact]:
    """Return why the rank ended, by the most certain evidence."""
    rank, code = first.rank, first.exit_code
    if code is not None and code in job.spec.retry.exit_codes.retry:
        return FailureClass.INFRA, RetryExitCode(rank=rank, exit_code=code)
    if first.left_out_by:
        return FailureClass.USER, FileLeftOut(rank=rank, path=first.missing_file, ignore_file=first.left_out_by)
    reported = memory_cause(job, first) or explaining(first)
    if reported is not None:
        return FailureClass.INFRA, reported
    named = match_signature(first)
    if named is not None:
        return with_port(first, *named)
    if first.signal is not None:
        return FailureClass.INFRA, _signalled(rank, first.signal)
    if code is not None and code - SHELL_BASE in _SIGNALS_FROM_OUTSIDE | OWN_SIGNALS and not first.error_type:
        return FailureClass.INFRA, _signalled(rank, code - SHELL_BASE, code)
    if code is None and not first.error_type:
        return FailureClass.INFRA, NoExitStatus(rank=rank)
    failure_class = FailureClass.INFRA if is_collateral(first) else FailureClass.USER
    if first.error_type:
        first_line = next(iter(first.error_message.strip().splitlines()), "")
        return failure_class, PythonException(rank=rank, error_type=first.error_type, said=first_line)
    shown = uncaught_exception(first)
    if shown is not None:
        return failure_class, PythonException(rank=rank, error_type=shown[0], said=shown[1])
    return failure_class, ExitCode(rank=rank, exit_code=code)


def _signalled(rank: int, number: int, exit_code: int | None = None) -> ProcessSignal:
    kind = TerminatedFromOutside if number == _SIGTERM else ProcessSignal
    return kind(rank=rank, signal=number, exit_code=exit_code)


def gang_failure(cause: Fact) -> Failure:
    """Return the failure of a lost actor or node."""
    restored = isinstance(cause, RecordRestored)  # no fault of the job, nor of a node
    return Failure(failure_class=FailureClass.PREEMPTION if restored else FailureClass.INFRA, cause=cause)


def decide_retry(job: Job, failure: Failure, now: float) -> Retry:
    """Decide whether the job is retried: by log policies, then the class's budget, then progress."""
    policy = failure.policy
    if policy == "fail":
        return Retry(retry=False, keep_gang=False, not_before=now, refusal=LogPolicyFails())
    budget = _budget(job, failure.failure_class)
    used = job.restarts.get(failure.failure_class.value, 0)
    if policy != "restart" and budget is not None and used >= budget:
        spent = BudgetSpent(failure_class=failure.failure_class, used=used, budget=budget)
        refusal = spent if budget else None
        return Retry(retry=False, keep_gang=False, not_before=now, refusal=refusal)
    progressed = job.attempts[-1].progressed or job.checkpoints.step > job.attempts[-1].start_step
    without_progress = 0 if progressed else job.no_progress
    preempted = failure.failure_class is FailureClass.PREEMPTION  # not the job's fault
    if not preempted and without_progress >= job.spec.retry.max_no_progress:
        return Retry(
            retry=False,
            keep_gang=False,
            not_before=now,
            refusal=NoNewCheckpoint(restarts=without_progress),
        )
    delay = backoff_seconds(job, without_progress)
    keep_gang = delay <= KEEP_GANG_SECONDS and not job.gang_lost and not _needs_fresh_gang(failure.cause)
    return Retry(retry=True, keep_gang=keep_gang, not_before=now + delay)


def _needs_fresh_gang(cause: Fact) -> bool:
    """Whether the same place would fail in the same way."""
    match cause:
        case GpuFault() | StartupTimeout():
            return True
        case _:
            return False


def backoff_seconds(job: Job, without_progress: int) -> float:
    """Return the seconds to wait: none after progress, then doubling; less up to 10 % that depends on job and attempt only."""
    if without_progress == 0:
        return 0.0
    backoff = job.spec.retry.backoff
    doubled = backoff.initial.total_seconds() * 2.0 ** min(without_progress - 1, 60)
    jitter = zlib.crc32(f"{job.id}/{job.attempt_number}".encode()) / 0xFFFFFFFF
    return min(backoff.max.total_seconds(), doubled) * (1.0 - 0.1 * jitter)


def _budget(job: Job, failure_class: FailureClass) -> int | None:
    limits = job.spec.retry.max_restarts
    match failure_class:
        case FailureClass.USER:
            return limits.user
        case FailureClass.INFRA:
            return limits.infra
        case FailureClass.HANG:
            return limits.hang
        case FailureClass.PREEMPTION:
            return limits.preemption
        case FailureClass.TIMEOUT | FailureClass.SPEC:
            return 0
