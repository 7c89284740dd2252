"""Sentences about holds, start times and matrices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from orchestrator.core.facts import reasons, requesters  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.sentences.base import quoted, sentence
from orchestrator.spec.units import format_duration
from orchestrator.units import plural


@sentence.register
def _(fact: requesters.ByHold) -> str:
    return fact.name


@sentence.register
def _(fact: requesters.ByMatrix) -> str:
    return f"fail_fast of {fact.matrix}: {fact.job} failed"


@sentence.register
def _(fact: requesters.ByPruner) -> str:
    value = "not finite" if fact.value is None else f"{fact.value:.6g}"
    return f"the pruner of {fact.matrix}: {fact.metric} was {value} at step {fact.step}"


@sentence.register
def _(fact: reasons.AwaitsTime) -> str:
    return f"starts at {_moment(fact.start_at)}"


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


@sentence.register
def _(fact: requesters.ByNodeReservation) -> str:
    return f"node {fact.node} is reserved until {_moment(fact.end)}{quoted(fact.said)}"


@sentence.register
def _(fact: requesters.ByIdleReclaim) -> str:
    limit = format_duration(timedelta(seconds=round(fact.seconds)))
    return f"for {fact.job}: all GPUs of this job had been idle for {limit}"


@sentence.register
def _(fact: reasons.NodeReserved) -> str:
    if fact.begun:
        return f"node {fact.node} is reserved until {_moment(fact.end)}{quoted(fact.said)}"
    need = (
        "it is not known how long the job runs (max_duration says it)"
        if fact.seconds is None
        else f"the job is expected to run for {format_duration(timedelta(seconds=round(fact.seconds)))}"
    )
    return (
        f"node {fact.node} is reserved from {_moment(fact.start)} to {_moment(fact.end)}{quoted(fact.said)}, and {need}"
    )


@sentence.register
def _(fact: reasons.MatrixAtLimit) -> str:
    return f"{fact.matrix} runs at most {plural(fact.limit, 'job')} at a time (matrix.max_concurrent)"
