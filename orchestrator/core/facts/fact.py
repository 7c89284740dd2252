"""The base of all facts, and the fact that stands for one that cannot be read."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from orchestrator.core.codec import Kind, Record, Text


class Fact:
    """A fact in figures and names, which puts itself into words for the command line, the API and web hooks.

    Every fact is a ``FactRecord``. Fields that hold any fact are declared with this class: it is none that msgspec knows, so ``codec.py`` reads
    them, and replaces a fact that cannot be read. ``kind`` names the fact in the store and in the API. ``failure_code`` is the code
    of a failure that it causes, where several facts share one.
    """

    __slots__ = ()
    kind = Kind()
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
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class FactRecord(Record, Fact, tag_field="kind", omit_defaults=True, forbid_unknown_fields=False):
    """Base of the classes of facts; ``tag`` is the kind."""


class UnreadableFact(FactRecord, tag="unreadable"):
    """A stored fact that this version cannot read: ``text`` is what was stored, shown and never parsed."""

    text: Text

    def sentence(self) -> str:
        return self.text
