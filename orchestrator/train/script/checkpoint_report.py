"""A rank's report of its checkpoints: facts and times on the progress page, and warnings for the user.

Works without a page, too, as outside of orch. Must not save or load.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import failure_kind
from orchestrator.train.script.progress_facts import CheckpointFacts

if TYPE_CHECKING:
    from orchestrator.checkpoint.snapshots.slot_pool import SlotPool
    from orchestrator.checkpoint.storage.info import CheckpointInfo
    from orchestrator.train.script.progress import ProgressPage


class CheckpointWarning(UserWarning):
    """A checkpoint could not be saved, or not in the fast way; training continues, and the next save tries again."""


class CheckpointReport:
    """Keeps the facts of one rank, and publishes each change."""

    def __init__(self, page: ProgressPage | None) -> None:
        self._page = page
        self._facts = CheckpointFacts()
        self._publishing = threading.Lock()  # a save and should_save may be called from different threads
        self._warned: set[str] = set()

    def publish(self, **changes: Any) -> None:
        """Update facts on the page."""
        with self._publishing:
            self._facts = dataclasses.replace(self._facts, **changes)
            if self._page is not None:
                self._page.write_facts(self._facts)

    def warn(self, topic: str, message: str) -> None:
        """Warn once per topic until it succeeds again; never raises, whatever filters are set."""
        if topic in self._warned:
            return
        self._warned.add(topic)
        try:
            warnings.warn(message, CheckpointWarning, stacklevel=5)
        except CheckpointWarning:
            return  # filters that turn warnings into errors must not let a full disk end the training

    def leave(self) -> None:
        """Stop writing to the page; for a forked child, which is not the rank."""
        self._page = None

    # -- the time of a save

    def stalled(self) -> None:
        """Record that training waits for storage from now on."""
        if self._page is not None:
            self._page.write_saving()

    def returned(self, seconds: float, *, snapshot_step: int | None = None, counts: bool) -> None:
        """Record that a save has returned after ``seconds``; as ProgressPage.write_saved."""
        if self._page is not None:
            self._page.write_saved(seconds, snapshot_step=snapshot_step, counts=counts)

    # -- its result

    def snapshots_off(self, why: str) -> None:
        """Record, and warn, that there are no snapshots in shared memory."""
        self.warn("snapshot", why)
        if self._facts.snapshots_off != why:
            self.publish(snapshots_off=why)

    def snapshots_on(self, memory_bytes: int) -> None:
        """Record that snapshots in shared memory are on, and the memory that they use."""
        self._warned.discard("snapshot")
        if self._facts.snapshot_bytes != memory_bytes or self._facts.snapshots_off:
            self.publish(snapshot_bytes=memory_bytes, snapshots_off="")

    def backlog(self, slots: SlotPool) -> None:
        """Report that the last save waited for storage, or that storage failed and earlier ones were dropped."""
        left_out, slots.left_out = slots.left_out, []
        if not (slots.waited_seconds or left_out):
            return
        facts = self._facts
        self.publish(
            waits=facts.waits + bool(slots.waited_seconds),
            waited_seconds=facts.waited_seconds + slots.waited_seconds,
            left_out=facts.left_out + len(left_out),
            left_out_step=left_out[-1] if left_out else facts.left_out_step,
        )

    def stored(self, info: CheckpointInfo) -> None:
        """Record a checkpoint that this rank has written to storage."""
        self._warned.discard("save")
        self.publish(
            saved_step=info.step,
            saved_at=time.time(),
            saved_path=info.path,
            saved_bytes=info.bytes,
            failure="",
            failure_kind="",
            failed_at=None,
        )

    def failed(self, step: int, error: Exception) -> None:
        """Record, and warn, that a save failed."""
        message = f"checkpoint of step {step} not saved: {error}"
        self.publish(
            failure=message,
            failure_kind=failure_kind(error),
            failed_at=time.time(),
            failed_saves=self._facts.failed_saves + 1,
        )
        self.warn("save", f"{message}; training goes on and the next save tries again")
