"""Detects the same crash at the same step twice in a row, which the program will repeat wherever it runs.

A signal that a program causes itself (a segmentation fault, an abort), and errors that may be the machine's, first
count as the machine's. At the same step of the same rank in the next attempt they are the script's. Before the first
step the time is unknown: there it takes a third attempt, except for a port in use, which the first may have held. A port of
the script's own at which another process listens is the script's at once (``port_failure.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.facts.rank_ends import (
    PortTaken,
    Problem,
    ProcessSignal,
    RepeatedCrash,
    ScriptProblem,
    TerminatedFromOutside,
)
from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from orchestrator.core.events import Failure
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Job

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
