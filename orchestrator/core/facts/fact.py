"""The base of all facts, and the fact that stands for one that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact in figures and names. ``core.sentences`` puts it into words.

    ``kind`` names the fact in the store and in the API. ``failure_code`` is the code of a failure that it causes, where
    several facts share one.
    """

    kind: ClassVar[str] = ""
    failure_code: ClassVar[str] = ""

    @property
    def code(self) -> str:
        """Return the code of a failure that this fact causes, or of its note."""
        return self.failure_code or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFact(Fact):
    """A stored fact that this version cannot read: ``text`` is what was stored, shown and never parsed."""

    kind: ClassVar[str] = "unreadable"
    text: str
