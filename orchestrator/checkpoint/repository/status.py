"""Status of a rank's snapshots, and of the storage that they are written to. Any thread may read it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from orchestrator.core.codec import Count, Message, Seconds, Text, Time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.checkpoint.storage.storage import Storage

ROOM_SECONDS: Final = 10.0
"""Seconds between two readings of the free space, while nothing is written."""


class PersisterStatus(Message):
    """Result of the writes of this rank's snapshots. ``at`` is a wall time, ``seconds`` the duration of the last write.

    ``path`` is empty until this rank's write made a checkpoint complete. ``failures`` counts all, ``failures_in_a_row``
    those since the newest success, and ``failing_since`` is the wall time of the first of these.
    """

    step: Count | None = None
    attempt: Count | None = None
    path: Text = ""
    bytes: Count = 0
    at: Time | None = None
    seconds: Seconds = 0.0
    persisted: Count = 0
    failures: Count = 0
    failure: Text = ""
    failure_kind: Text = ""  # from `errors.failure_kind`: the same for all saves that fail for the same cause
    watched: bool = False  # a checkpoint that the script wrote by itself (watcher.py)
    digest: Text = ""  # of its content
    failures_in_a_row: Count = 0
    failing_since: Time | None = None


class StorageGauge:
    """Duration of the current access to a storage, and free space. ``clock`` gives seconds that never go backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._asked_at: float | None = None
        self.free_bytes: int | None = None
        """Free space of the storage at the last reading; None where it is unknown."""

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current access to the storage began; 0.0 while there is none."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @contextlib.contextmanager
    def writing(self, storage: Storage) -> Iterator[None]:
        """Measure a write; read the free space after it, whether or not it has succeeded."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._ask(storage)

    def look(self, storage: Storage) -> None:
        """Read the free space, if a reading is due."""
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
