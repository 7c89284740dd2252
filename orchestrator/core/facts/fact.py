"""The base of all facts, and the one fact that is a sentence, written by earlier versions."""

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
class Legacy(Fact):
    """A sentence that an earlier version stored, with its code and advice: shown unchanged, never parsed."""

    kind: ClassVar[str] = "legacy"
    sentence: str
    legacy_code: str = ""
    advice: str = ""

    @property
    def code(self) -> str:
        """The code that was stored with the sentence."""
        return self.legacy_code
