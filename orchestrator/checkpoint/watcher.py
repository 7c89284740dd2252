"""Looks after the checkpoints that a running script writes by itself, beside it: in the process of rank 0's actor."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from orchestrator.checkpoint.errors import CheckpointError
from orchestrator.checkpoint.persister import PersisterStatus
from orchestrator.checkpoint.watched import WatchedFiles

if TYPE_CHECKING:
    from orchestrator.checkpoint.info import CheckpointInfo
    from orchestrator.checkpoint.watched import WatchSettings

LOOK_SECONDS = 1.0


class FileWatcher:
    """Registers and retains in a background thread; ``status`` tells what became of it, as a persister does."""

    def __init__(self, settings: WatchSettings) -> None:
        self._files = WatchedFiles(settings)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._attempt = 0
        self._gone_at: float | None = None
        self._well = False
        self.status = PersisterStatus()

    def start(self, attempt: int) -> None:
        """Look every second until ``close``; what is registered from now on belongs to ``attempt``."""
        with self._lock:
            self._attempt, self._gone_at, self._well = attempt, None, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, after the look that it is busy with."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ended(self, at: float, *, well: bool) -> None:
        """The writer has ended at ``at`` (seconds since the epoch): what is whole by now counts, nothing else will."""
        self._gone_at, self._well = at, well

    def look(self) -> None:
        """Register what has become whole, and delete what is not kept. Bad storage shows in ``status``."""
        with self._lock:
            try:
                fresh = self._files.scan(attempt=self._attempt, writer_gone_at=self._gone_at, ended_well=self._well)
                if fresh:
                    self._tell(fresh[-1], len(fresh))
                    self._files.retain()
            except (OSError, CheckpointError) as error:
                message = f"what checkpoint.watch names could not be looked after: {error}"
                self.status = dataclasses.replace(
                    self.status, failures=self.status.failures + 1, failure=message, persisted=self.status.persisted + 1
                )

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            self.look()

    def _tell(self, newest: CheckpointInfo, count: int) -> None:
        self.status = dataclasses.replace(
            self.status,
            step=newest.step,
            attempt=newest.attempt,
            path=newest.path,
            bytes=newest.bytes,
            at=newest.created_at,
            persisted=self.status.persisted + count,
            failure="",
            watched=True,
        )
