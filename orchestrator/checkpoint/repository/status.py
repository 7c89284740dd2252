"""What became of a rank's snapshots, and how the storage does that they are written to. Any thread may ask."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.checkpoint.storage.storage import Storage

ROOM_SECONDS: Final = 10.0
"""Between two questions for the space that is left, while nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersisterStatus:
    """What became of this rank's snapshots. ``at`` is a wall time, ``seconds`` how long the last write took.

    ``path`` is empty until this rank's write made a checkpoint complete. ``failures`` counts all, ``failures_in_a_row``
    those since the newest success, and ``failing_since`` is when the first of these was, as a wall time.
    """

    step: int | None = None
    attempt: int | None = None
    path: str = ""
    bytes: int = 0
    at: float | None = None
    seconds: float = 0.0
    persisted: int = 0
    failures: int = 0
    failure: str = ""
    failure_kind: str = ""  # as `errors.failure_kind` has it: the same for every save that fails of one cause
    watched: bool = False  # a checkpoint that the script wrote by itself (watcher.py)
    digest: str = ""  # of its content
    failures_in_a_row: int = 0
    failing_since: float | None = None


class StorageGauge:
    """How long the current write has taken, and what is free. ``clock`` gives seconds that never go backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._asked_at: float | None = None
        self.free_bytes: int | None = None
        """What the storage had left when it was asked last; None where it does not say."""

    @property
    def busy_seconds(self) -> float:
        """How long the storage has taken for what it is asked now; 0.0 while it is not."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @contextlib.contextmanager
    def writing(self, storage: Storage) -> Iterator[None]:
        """Measure a write; what is free is asked for after it, whether or not it has succeeded."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._ask(storage)

    def look(self, storage: Storage) -> None:
        """Ask what is free, if it is time to."""
        if self._asked_at is None or self._clock() - self._asked_at >= ROOM_SECONDS:
            self._since = self._clock()
            self._ask(storage)

    def _ask(self, storage: Storage) -> None:
        try:
            self.free_bytes = storage.free_bytes()
        except OSError:
            self.free_bytes = None
        finally:
            self._asked_at, self._since = self._clock(), None
