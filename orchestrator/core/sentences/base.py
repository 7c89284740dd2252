"""The two questions that the modules of this package answer for every fact: what it says, and what to do about it."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact

CUT = 200
"""Characters of what another program wrote that a sentence repeats; the fact has all of it."""


@singledispatch
def sentence(fact: Fact) -> str:
    """The fact in words, without a full stop."""
    raise TypeError(f"nothing puts {type(fact).__name__} into words")


@singledispatch
def advice(fact: Fact, job_id: str = "JOB") -> str:  # a person puts the job's id for JOB
    """What a person can do about it; empty for most."""
    return ""


def quoted(said: str) -> str:
    """What another program wrote, in brackets behind a sentence; empty for nothing."""
    return f" ({said[:CUT]})" if said else ""


def of_rank(rank: int | None, text: str) -> str:
    """``text`` about a rank; about something that is tied to no rank, ``text`` alone."""
    return text if rank is None else f"rank {rank}: {text}"


def plural(number: float, one: str, many: str = "") -> str:
    """As in ``1 GPU``, ``2 GPUs``, ``0.5 GPUs``."""
    return f"{number:g} {one if number == 1 else many or one + 's'}"
