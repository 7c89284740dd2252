"""Whether a checkpoint that a script writes by itself is complete, although nothing marks its end.

Owns the evidence: what the files' formats prove, for how long this process has seen them unchanged, which files the
previous one had. A file's time is no evidence: it may be of a server whose clock is ahead of this node's, or behind it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.external import file_facts, file_formats
from orchestrator.checkpoint.external.file_facts import facts_of, member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orchestrator.checkpoint.external.file_facts import Facts

SETTLE_SECONDS = 2.0  # without a change before something counts as written
QUIET_SECONDS = 0.02  # without a change before a copy begins: two ticks of the file systems' clock
_FEWER_FILES_SECONDS = 20.0  # without a change until a checkpoint with fewer files than the previous one counts
_LONGEST_STEP_SECONDS = (
    1.0  # counted between two looks: this process may have been stopped, and the writer killed meanwhile
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that writes the files: whether it has ended, and whether it had finished."""

    ended: bool = False
    well: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last look at a checkpoint found, when (by the check's clock), and for how long it has been so."""

    facts: Facts
    at: float
    quiet_seconds: float = 0.0


class CompletenessCheck:
    """Remembers each unfinished checkpoint from one scan to the next. ``clock`` gives monotonic seconds, ``pause`` waits some."""

    def __init__(self, clock: Callable[[], float], pause: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._pause = pause
        self._seen: dict[str, _Seen] = {}

    def is_complete(
        self, path: str, facts: Facts, *, writer: Writer, is_copied: bool, previous: Callable[[], Iterable[str]]
    ) -> bool:
        """Whether the files in ``facts`` are a complete checkpoint.

        ``is_copied``: it is copied before it can change. ``previous`` gives the files of the newest complete one.
        Raises CorruptCheckpointError where a format proves a file torn, OSError where a file cannot be read.
        """
        proofs = [file_formats.check(member(path, name)) for name in facts]
        is_proven = proofs == [True] and "" in facts  # a single file that its format proves complete
        if writer.ended:
            return writer.well or is_proven  # anything else may have been cut short, however old it looks
        seen = self._look(path, facts)
        if is_proven and is_copied:
            return seen.quiet_seconds > 0 or self._is_quiet(path, facts)
        return seen.quiet_seconds >= SETTLE_SECONDS and not self._may_grow(seen, previous)

    def _look(self, path: str, facts: Facts) -> _Seen:
        now, before = self._clock(), self._seen.get(path)
        seen = _Seen(facts, now)
        if before is not None and before.facts == facts:
            step = min(now - before.at, _LONGEST_STEP_SECONDS)
            seen = _Seen(facts, now, before.quiet_seconds + step)
        self._seen[path] = seen
        return seen

    def _is_quiet(self, path: str, facts: Facts) -> bool:
        self._pause(QUIET_SECONDS)
        return facts_of(path) == facts

    def _may_grow(self, seen: _Seen, previous: Callable[[], Iterable[str]]) -> bool:
        """Whether files are missing that the previous one has, and that may still be written."""
        if seen.quiet_seconds >= _FEWER_FILES_SECONDS:
            return False
        kinds = {file_facts.kind(name) for name in seen.facts}
        return any(file_facts.kind(name) not in kinds for name in previous())
