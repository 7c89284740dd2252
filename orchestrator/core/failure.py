"""Classify a failed attempt, then decide whether it is tried again. Two pure functions; carrying out is elsewhere.

Survivors of a dead rank fail too, with errors of the collective they were waiting in. They are collateral: they never
hide the rank that failed first. When only collateral is known yet, the verdict waits a moment for the root.

A rank that left because it was asked to stop, though orch had not asked, has failed whatever its exit code is: its job is
not done. The others were probably asked as well, and get the time to save that the job gives them.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.diagnosis.signatures import evidence_line, match_signature
from orchestrator.core.events import Failure
from orchestrator.core.memory_failure import memory_failure
from orchestrator.core.states import FailureClass, StopScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.attempt import Exit
    from orchestrator.core.diagnosis.signatures import Signature
    from orchestrator.core.job import Job

# How long a collateral error waits for the end that caused it: a process that ends by itself closes its connections before it
# is gone, by more than 0.25 s on a busy machine.
SETTLE_SECONDS = 3.0
KEEP_GANG_SECONDS = 10.0  # a longer back-off gives the GPUs back meanwhile

_FRESH_GANG = frozenset({"startup_timeout", "gpu_lost", "gpu_ecc", "gpu_xid"})  # the same place would fail the same way

_COLLATERAL = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|connection was (?:closed|reset)|recvBytes failed|Broken pipe"
    r"|NCCL (?:communicator was aborted|error|timeout)|ncclRemoteError|ncclSystemError|remote process exited"
    r"|DistBackendError|DistNetworkError: (?!.*EADDRINUSE)|DistStoreError|ProcessGroup\w* .*(?:abort|timed? ?out)"
    r"|gloo.*(?:timed? ?out|EnforceNotMet|pair\.cc)|failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
    r"|Rank \d+ (?:is|was) (?:gone|lost)|Socket Timeout|failed to recv",
    re.IGNORECASE,
)
_SIGABRT = 6
# What a shell returns for a child that one of these signals ended: they come from outside of the program.
_SHELL_BASE = 128
_SIGTERM = 15
_SIGNALS_FROM_OUTSIDE = frozenset({1, 9, 15})
_SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}


# SIGTERM is a request to stop: it comes from a person or a program, and says nothing about the node.
_STOPPED = "stopped_from_outside"
_STOPPED_ADVICE = "the job resumes from its last checkpoint; to stop a job, use `orch pause` or `orch cancel`"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What failed, and when the failure began (seconds since the epoch)."""

    failure: Failure
    failed_at: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Whether to try again, and not before when."""

    retry: bool
    keep_gang: bool
    not_before: float
    refusal: str = ""


def is_collateral(ended: Exit) -> bool:
    """The rank failed because another one had: by an exception, an exit code or an abort that speaks of its peers."""
    if ended.ok or ended.signal not in (None, _SIGABRT):
        return False
    text = f"{ended.error_type}: {ended.error_message}" if ended.error_type else "\n".join(ended.log_tail[-15:])
    return bool(_COLLATERAL.search(text))


def classify(job: Job, now: float) -> Verdict | float | None:
    """The verdict on the current attempt; a time to ask again at, when the root is not known yet; None if none failed."""
    left = job.left_early
    failed = [e for e in job.exits if not e.ok and e not in left]
    if left and not any(not is_collateral(e) and e.failed_at < _asked_at(left) for e in failed):
        return _classify_left(job, left, now)
    if not failed:
        return None
    first = min(failed, key=lambda e: (is_collateral(e), e.failed_at))
    if job.gang_lost and is_collateral(first):
        return Verdict(gang_failure(job.reason, None), first.failed_at)
    if is_collateral(first) and len(job.exits) < job.num_workers:
        settled_at = min(e.at for e in failed) + SETTLE_SECONDS
        if now < settled_at:
            return settled_at
    return Verdict(_judged(job, first), first.failed_at)


def _asked_at(left: Sequence[Exit]) -> float:
    return min(e.stop_seen_at for e in left if e.stop_seen_at is not None)


def _classify_left(job: Job, left: tuple[Exit, ...], now: float) -> Verdict | float:
    """The verdict on ranks that left, once the others have ended too, or had their time to."""
    until = min(e.at for e in left) + job.spec.stop_duration.total_seconds()
    if len(job.exits) < job.num_workers and not job.gang_lost and now < until:
        return until
    return Verdict(stop_failure(left), _asked_at(left))


def stop_failure(left: Sequence[Exit]) -> Failure:
    """Ranks left because of a request to stop that orch had not sent."""
    first = min(left, key=lambda e: (e.stop_seen_at or e.at, e.rank))
    machine = any(e.stop_scope is StopScope.MACHINE for e in left)
    what = "SIGTERM to the processes of its node" if machine else "a request to stop"
    return Failure(
        failure_class=FailureClass.PREEMPTION if machine else FailureClass.INFRA,
        code=_STOPPED,
        sentence=f"rank {first.rank} ended{_position(first)} after {what} that orch did not send",
        rank=first.rank,
        exit_code=first.exit_code,
        signal=first.signal,
        log_tail=first.log_tail,
        advice=_STOPPED_ADVICE,
        policy=first.policy,
    )


def _position(ended: Exit) -> str:
    if ended.last_step is None:
        return ""
    return f" at step {ended.last_step}" + (f" of {ended.total_steps}" if ended.total_steps is not None else "")


def _judged(job: Job, first: Exit) -> Failure:
    failure = replace(_failure(job, first), policy=first.policy)
    if not first.policy_note:
        return failure
    return replace(failure, advice="; ".join(filter(None, (failure.advice, first.policy_note))))


def _failure(job: Job, first: Exit) -> Failure:
    retry_codes = job.spec.retry.exit_codes.retry
    if first.exit_code is not None and first.exit_code in retry_codes:
        return Failure(
            failure_class=FailureClass.INFRA,
            code="retry_exit_code",
            sentence=f"rank {first.rank} asked to be tried again (exit code {first.exit_code}, in retry.exit_codes)",
            rank=first.rank,
            exit_code=first.exit_code,
            log_tail=first.log_tail,
        )
    if first.left_out_by:
        return _left_out(first)
    out_of_memory = memory_failure(job, first)
    if out_of_memory is not None:
        return out_of_memory
    signature = match_signature(first)
    if signature is not None:
        return Failure(
            failure_class=signature.failure_class,
            code=signature.code,
            sentence=f"rank {first.rank}: {signature.sentence}{_because(first, signature)}",
            rank=first.rank,
            exit_code=first.exit_code,
            signal=first.signal,
            log_tail=first.log_tail,
            advice=signature.advice.replace("JOB", job.id),
        )
    if first.signal is not None:
        return _signalled(first)
    if first.exit_code is not None and first.exit_code - _SHELL_BASE in _SIGNALS_FROM_OUTSIDE and not first.error_type:
        return _signalled(first)
    if first.exit_code is None and not first.error_type:
        return gang_failure(f"rank {first.rank} went away without an exit status", first.rank)
    if first.error_type:
        message = first.error_message.strip().splitlines()
        sentence = f"rank {first.rank} raised {first.error_type}" + (f": {message[0][:200]}" if message else "")
        code, advice = "exception", f"read the traceback: orch logs {job.id} --rank {first.rank}"
    else:
        sentence = f"rank {first.rank} ended with exit code {first.exit_code}"
        code, advice = "exit_code", f"read its last lines: orch logs {job.id} --rank {first.rank}"
    return Failure(
        failure_class=FailureClass.INFRA if is_collateral(first) else FailureClass.USER,
        code=code,
        sentence=sentence,
        rank=first.rank,
        exit_code=first.exit_code,
        log_tail=first.log_tail,
        advice=advice,
    )


def _left_out(first: Exit) -> Failure:
    """The script misses a file that its submitter has, and that an ignore file kept out of the job's copy."""
    name = first.missing_file.rpartition("/")[2]
    return Failure(
        failure_class=FailureClass.USER,
        code="file_left_out",
        sentence=f"rank {first.rank} did not find {first.missing_file[:200]}, which {first.left_out_by} leaves out of the job's copy",
        rank=first.rank,
        exit_code=first.exit_code,
        log_tail=first.log_tail,
        advice=f"add the line !{name[:200]} to a file .orchignore beside the {first.left_out_by}, or read data by an absolute path",
    )


def _because(first: Exit, signature: Signature) -> str:
    """What the signature rests on, in brackets: the evidence, else the exception's first line."""
    lines = [line.strip() for line in first.error_message.strip().splitlines()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    told = evidence_line(first, signature) or said
    return f" ({told[:200]})" if told else ""


def _signalled(first: Exit) -> Failure:
    number = first.signal if first.signal is not None else (first.exit_code or 0) - _SHELL_BASE
    name = _SIGNAL_NAMES.get(number, f"signal {number}")
    how = (
        "was killed by"
        if first.signal is not None
        else f"ended with exit code {first.exit_code}, as a process killed by"
    )
    advice = {
        9: "somebody or the kernel killed it; if memory ran out, `dmesg` says so: ask for more with resources_per_worker.memory",
        11: "a native library crashed; the last lines of its log may say where",
        _SIGTERM: _STOPPED_ADVICE,
    }.get(number, "")
    return Failure(
        failure_class=FailureClass.INFRA,
        code=_STOPPED if number == _SIGTERM else "signal",
        sentence=f"rank {first.rank} {how} {name}",
        rank=first.rank,
        exit_code=first.exit_code,
        signal=first.signal,
        log_tail=first.log_tail,
        advice=advice,
    )


def gang_failure(reason: str, rank: int | None) -> Failure:
    """An actor or a node went away under the job."""
    return Failure(failure_class=FailureClass.INFRA, code="gang_lost", sentence=reason, rank=rank)


def decide_retry(job: Job, failure: Failure, now: float) -> Retry:
    """Whether the job is tried again: log policies, then the class's budget, then progress."""
    policy = failure.policy
    if policy == "fail":
        return Retry(retry=False, keep_gang=False, not_before=now, refusal="a log policy says fail")
    budget = _budget(job, failure.failure_class)
    used = job.restarts.get(failure.failure_class.value, 0)
    if policy != "restart" and budget is not None and used >= budget:
        refusal = f"{used} of {budget} {failure.failure_class} restarts used" if budget else ""
        return Retry(retry=False, keep_gang=False, not_before=now, refusal=refusal)
    progressed = job.attempts[-1].progressed or job.checkpoint_step > job.attempts[-1].start_step
    without_progress = 0 if progressed else job.no_progress
    preempted = failure.failure_class is FailureClass.PREEMPTION  # says nothing about the job
    if not preempted and without_progress >= job.spec.retry.max_no_progress:
        return Retry(
            retry=False,
            keep_gang=False,
            not_before=now,
            refusal=f"{without_progress} restarts in a row brought no newer checkpoint (retry.max_no_progress)",
        )
    delay = backoff_seconds(job, without_progress)
    keep_gang = delay <= KEEP_GANG_SECONDS and not job.gang_lost and failure.code not in _FRESH_GANG
    return Retry(retry=True, keep_gang=keep_gang, not_before=now + delay)


def backoff_seconds(job: Job, without_progress: int) -> float:
    """Seconds to wait: none after progress, then doubling; less up to 10 % that depends on job and attempt only."""
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
