"""Sentences about a failed attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.sentences.base import advice, sentence

if TYPE_CHECKING:
    from orchestrator.core.events import Failure


def failure_sentence(failure: Failure) -> str:
    """Return what happened, where, and why it is not retried."""
    return sentence(failure.reason)


def failure_advice(failure: Failure, job_id: str) -> str:
    """Return what a user can do about it, with the note about the job's log policies; empty for nothing."""
    note = sentence(failure.policy_note) if failure.policy_note else ""
    return "; ".join(filter(None, (advice(failure.cause, job_id), note)))
