"""The base of all facts, the fact that stands for one that cannot be read, and parts of sentences."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Final

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
    words: ClassVar[str]
    """The sentence of a fact for which it is always the same."""
    todo: ClassVar[str] = ""
    """Likewise the advice."""

    @property
    def code(self) -> str:
        """Return the code of a failure that this fact causes, or of its note."""
        return self.failure_code or self.kind

    def sentence(self) -> str:
        """Return the fact in words, without a full stop. No code may parse it: what a program needs is in the fields."""
        return self.words

    def advice(self, job_id: str = "JOB") -> str:  # a user replaces JOB by the job's id
        """Return what a user can do about it; empty for most."""
        return self.todo

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


CUT: Final = 200
"""Maximum characters of another program's text in a sentence; the fact has all of it."""


def quoted(text: str) -> str:
    """Return another program's text in brackets, to append to a sentence; empty for nothing."""
    return f" ({text[:CUT]})" if text else ""


def of_rank(rank: int | None, text: str) -> str:
    """Return ``text`` about a rank; ``text`` alone about a fact without a rank."""
    return text if rank is None else f"rank {rank}: {text}"


def moment(at: float) -> str:
    """Return seconds since the epoch as a date and a time."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
