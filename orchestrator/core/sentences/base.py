"""The two functions that this package implements for every fact: its sentence, and its advice."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact

CUT = 200
"""Maximum characters of another program's text in a sentence; the fact has all of it."""


@singledispatch
def sentence(fact: Fact) -> str:
    """Return the fact in words, without a full stop."""
    raise TypeError(f"nothing puts {type(fact).__name__} into words")


@singledispatch
def advice(fact: Fact, job_id: str = "JOB") -> str:  # a user replaces JOB by the job's id
    """Return what a user can do about it; empty for most."""
    return ""


def quoted(text: str) -> str:
    """Return another program's text in brackets, to append to a sentence; empty for nothing."""
    return f" ({text[:CUT]})" if text else ""


def of_rank(rank: int | None, text: str) -> str:
    """Return ``text`` about a rank; ``text`` alone about a fact without a rank."""
    return text if rank is None else f"rank {rank}: {text}"
