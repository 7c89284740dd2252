"""Sentences about holds, start times and matrices."""

from __future__ import annotations

from datetime import UTC, datetime

from orchestrator.core.facts import reasons, requesters  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.sentences.base import plural, sentence


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
    return f"starts at {datetime.fromtimestamp(fact.start_at, UTC):%Y-%m-%d %H:%M:%S} UTC"


@sentence.register
def _(fact: reasons.MatrixAtLimit) -> str:
    return f"{fact.matrix} runs at most {plural(fact.limit, 'job')} at a time (matrix.max_concurrent)"
