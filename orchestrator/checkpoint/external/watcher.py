"""Watches the checkpoints that a running script writes by itself, in the process of rank 0's actor."""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.checkpoint.errors import CheckpointError, failure_kind
from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints
from orchestrator.checkpoint.repository.status import PersisterStatus

if TYPE_CHECKING:
    from orchestrator.checkpoint.external.external_checkpoints import WatchSettings
    from orchestrator.checkpoint.storage.info import CheckpointInfo

LOOK_SECONDS = 1.0
OFTEN_SECONDS = 0.25  # for a file that each save overwrites
FIRST_WAIT_SECONDS = 0.05  # while such a file is being written; then 1.5 times as long each time
BUSY_SHARE = 0.2  # of the time, at most, is spent copying and hashing
MOST_SAMPLES = 4096
COPY_FAILED = "copy"
"""The kind of failure where a file that each save overwrites could not be copied."""

ReportedStep = Callable[[], "tuple[float, int] | None"]
"""The newest step that the script has reported, and its time; None where it reports none."""


class FileWatcher:
    """Registers and retains in a background thread; ``status`` gives the result, as for a persister.

    ``reported`` gives the step of a file whose name does not contain one.
    """

    def __init__(
        self,
        settings: WatchSettings,
        *,
        reported: ReportedStep = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = ExternalCheckpoints(settings, clock=clock)
        self._reported = reported
        self._samples: deque[tuple[float, int]] = deque(maxlen=MOST_SAMPLES)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._attempt = 0
        self._ended = self._well = False
        self.status = PersisterStatus()

    def start(self, attempt: int) -> None:
        """Scan every second until ``close``; files registered from now on belong to ``attempt``."""
        with self._lock:
            self._attempt, self._ended, self._well = attempt, False, False
            self._samples.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop after the scan in progress."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ended(self, *, well: bool) -> None:
        """Record the writer's end: of what is not registered by now, only what a format proves complete counts."""
        self._ended, self._well = True, well

    def look(self) -> None:
        """Register newly complete checkpoints, and apply retention. Storage errors appear in ``status``."""
        with self._lock:
            try:
                self._sample()
                fresh = self._files.scan(
                    attempt=self._attempt, writer_ended=self._ended, ended_well=self._well, step_at=self._step_at
                )
                if fresh:
                    self._publish(fresh[-1], len(fresh))
                    self._files.retain()
                elif self._files.copy_failure and self._files.copy_failure != self.status.failure:
                    self._fail(self._files.copy_failure, COPY_FAILED)
            except (
                Exception
            ) as error:  # the files are the script's; if the thread ended, none of them would be registered
                known = isinstance(error, OSError | CheckpointError)
                shown = str(error) if known else f"{type(error).__name__}: {error}"
                self._fail(f"the files of checkpoint.watch could not be processed: {shown}", failure_kind(error))

    def _run(self) -> None:
        pause, waiting = FIRST_WAIT_SECONDS, False
        while not self._closing.wait(pause):
            began = time.monotonic()
            self.look()
            usual = OFTEN_SECONDS if self._files.has_fixed_name else LOOK_SECONDS
            if not self._files.is_waiting:
                pause = usual
            elif waiting:
                pause = min(usual, 1.5 * pause)
            else:
                pause = FIRST_WAIT_SECONDS
            waiting = self._files.is_waiting
            pause = max(pause, (time.monotonic() - began) / BUSY_SHARE)

    def _sample(self) -> None:
        newest = self._reported()
        if newest is not None and (not self._samples or newest > self._samples[-1]):
            self._samples.append(newest)

    def _step_at(self, at: float) -> int | None:
        """Return the step at time ``at``, interpolated between two reports."""
        index = bisect_right(self._samples, (at, sys.maxsize))
        if index == 0:
            return self._samples[0][1] if self._samples else None  # no report is earlier
        before = self._samples[index - 1]
        if index == len(self._samples):
            return before[1]
        after = self._samples[index]
        share = (at - before[0]) / (after[0] - before[0])
        return before[1] + int(share * (after[1] - before[1]))

    def _fail(self, message: str, kind: str) -> None:
        self.status = structs.replace(
            self.status,
            failures=self.status.failures + 1,
            failure=message,
            failure_kind=kind,
            persisted=self.status.persisted + 1,
        )

    def _publish(self, newest: CheckpointInfo, count: int) -> None:
        self.status = structs.replace(
            self.status,
            step=newest.step,
            attempt=newest.attempt,
            path=newest.path,
            bytes=newest.bytes,
            at=newest.created_at,
            persisted=self.status.persisted + count,
            failure=self._files.copy_failure,
            failure_kind=COPY_FAILED if self._files.copy_failure else "",
            watched=True,
            digest=newest.digest,
        )
