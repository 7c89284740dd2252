"""Errors of the core: faults of orch, never a user's mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId


class CoreError(Exception):
    """The core was asked for something that its rules forbid; report it with the printed events."""


class BrokenRuleError(CoreError):
    """An event would break a rule of the record, such as a second live attempt; the job's recent events follow."""

    def __init__(self, job_id: JobId, rule: str, story: tuple[str, ...]) -> None:
        self.job_id, self.rule, self.story = job_id, rule, story
        super().__init__(f"job {job_id}: {rule}; what led here: {' | '.join(story) or 'nothing'}")


class UnknownEventError(CoreError):
    """The store holds an event that this version does not know; it was written by a newer version."""
