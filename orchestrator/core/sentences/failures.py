"""Sentences about a failed attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.sentences.base import advice, sentence

if TYPE_CHECKING:
    from orchestrator.core.events import Failure


def failure_sentence(failure: Failure) -> str:
    """What happened, where, and why it is not tried again."""
    return sentence(failure.reason)


def failure_advice(failure: Failure, job_id: str) -> str:
    """What a person can do about it, with what is to be told of the job's log policies; empty for nothing."""
    note = sentence(failure.policy_note) if failure.policy_note else ""
    return "; ".join(filter(None, (advice(failure.cause, job_id), note)))
