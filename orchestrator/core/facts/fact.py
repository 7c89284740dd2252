"""The base of all facts, and the fact that stands for one that cannot be read."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact in figures and names, which puts itself into words for the command line, the API and web hooks.

    ``kind`` names the fact in the store and in the API. ``failure_code`` is the code of a failure that it causes, where
    several facts share one.
    """

    kind: ClassVar[str] = ""
    failure_code: ClassVar[str] = ""

    @property
    def code(self) -> str:
        """Return the code of a failure that this fact causes, or of its note."""
        return self.failure_code or self.kind

    def sentence(self) -> str:
        """Return the fact in words, without a full stop. No code may parse it: what a program needs is in the fields."""
        raise NotImplementedError(f"nothing puts {type(self).__name__} into words")

    def advice(self, job_id: str = "JOB") -> str:  # a user replaces JOB by the job's id
        """Return what a user can do about it; empty for most."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fact as JSON-ready values: its ``kind``, and the fields without default values."""
        plain: dict[str, Any] = {"kind": self.kind}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default:
                plain[f.name] = _plain(value)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Fact):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFact(Fact):
    """A stored fact that this version cannot read: ``text`` is what was stored, shown and never parsed."""

    kind: ClassVar[str] = "unreadable"
    text: str

    def sentence(self) -> str:
        return self.text
