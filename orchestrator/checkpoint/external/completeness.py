"""Whether a checkpoint that a script writes by itself is complete, although nothing marks its end.

Owns the evidence: what the files' formats prove, how long nothing has changed, which files the previous one had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.external import file_facts, file_formats
from orchestrator.checkpoint.external.file_facts import changed_at, member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orchestrator.checkpoint.external.file_facts import Facts

SETTLE_SECONDS = 2.0  # without a change before something counts as written
QUIET_SECONDS = 0.02  # without a change before a copy begins: two ticks of the file systems' clock
_FEWER_FILES_SECONDS = 20.0  # without a change until a checkpoint with fewer files than the previous one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterEnd:
    """End of the process that writes the files: time (seconds since the epoch), None while it runs; whether it finished."""

    at: float | None = None
    well: bool = False


class CompletenessCheck:
    """Remembers the facts of each unfinished checkpoint from one scan to the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[Facts, float]] = {}

    def is_complete(
        self, path: str, facts: Facts, *, writer: WriterEnd, is_copied: bool, previous: Callable[[], Iterable[str]]
    ) -> bool:
        """Whether the files in ``facts`` are a complete checkpoint.

        ``is_copied``: it is copied before it can change. ``previous`` gives the files of the newest complete one.
        Raises CorruptCheckpointError where a format proves a file torn, OSError where a file cannot be read.
        """
        proofs = [file_formats.check(member(path, name)) for name in facts]
        if writer.well:
            return True
        # A single file that its format proves complete counts at once.
        if not self._is_settled(path, facts, writer, quick=proofs == [True] and "" in facts, copied=is_copied):
            return False
        return not self._may_grow(path, facts, previous)

    def _is_settled(self, path: str, facts: Facts, writer: WriterEnd, *, quick: bool, copied: bool) -> bool:
        at = changed_at(path, facts)
        if writer.at is not None:
            return quick or at <= writer.at - SETTLE_SECONDS
        now = self._clock()
        before, since = self._seen.get(path, (None, now))
        if before != facts:
            since = now
        self._seen[path] = facts, since
        if quick and copied:
            return before == facts or now - at >= QUIET_SECONDS
        # The file's time may be from a file server, whose clock may be ahead of this node's.
        return before == facts and now - min(at, since) >= SETTLE_SECONDS

    def _may_grow(self, path: str, facts: Facts, previous: Callable[[], Iterable[str]]) -> bool:
        """Whether files are missing that the previous one has, and that may still be written."""
        if self._clock() - changed_at(path, facts) >= _FEWER_FILES_SECONDS:
            return False
        kinds = {file_facts.kind(name) for name in facts}
        return any(file_facts.kind(name) not in kinds for name in previous())
