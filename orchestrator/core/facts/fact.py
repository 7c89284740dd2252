"""What all facts have in common, and the one fact that is a sentence: what earlier versions wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that is known, in figures and names. ``core.sentences`` puts it into words.

    ``kind`` names the fact in the store and in the API. ``failure_code`` is the code of a failure that it causes, where
    several facts share one.
    """

    kind: ClassVar[str] = ""
    failure_code: ClassVar[str] = ""

    @property
    def code(self) -> str:
        """The code of a failure that this fact causes, or of a note that it makes."""
        return self.failure_code or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Legacy(Fact):
    """What an earlier version stored as a sentence, with its code and advice: shown as it is, never looked into."""

    kind: ClassVar[str] = "legacy"
    sentence: str
    legacy_code: str = ""
    advice: str = ""

    @property
    def code(self) -> str:
        """The code that was stored with the sentence."""
        return self.legacy_code
