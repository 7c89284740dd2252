"""Errors of the core: faults of orch, never a user's mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId


class CoreError(Exception):
    """A caller requested something that the rules of the core forbid; report it with the printed events."""


class BrokenRuleError(CoreError):
    """An event would break a rule of the record, such as a second live attempt; the job's recent events follow."""

    def __init__(self, job_id: JobId, rule: str, story: tuple[str, ...]) -> None:
        self.job_id, self.rule, self.story = job_id, rule, story
        super().__init__(f"job {job_id}: {rule}; events before it: {' | '.join(story) or 'nothing'}")


class UnknownEventError(CoreError):
    """The store holds an event of a kind that this version lacks; a newer version wrote it."""
