"""Record of the writes of a rank's snapshots: the status that is reported, and when a failed write is tried again."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from orchestrator.checkpoint.repository.status import PersisterStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.repository.pace import Pace
    from orchestrator.checkpoint.repository.persister_pages import PersisterPages
    from orchestrator.checkpoint.snapshots.file import SnapshotMeta
    from orchestrator.checkpoint.storage.info import CheckpointInfo


class PersisterRecord:
    """Keeps ``status``, and reports failing storage to the rank. ``clock`` gives seconds that never go backwards."""

    def __init__(
        self,
        pages: PersisterPages,
        pace: Pace,
        *,
        clock: Callable[[], float],
        on_persisted: Callable[[CheckpointInfo], None] | None,
    ) -> None:
        self.status = PersisterStatus()
        self._pages, self._pace, self._clock, self._on_persisted = pages, pace, clock, on_persisted
        self._retry_at = 0.0

    def is_waiting(self) -> bool:
        """Whether a write failed so recently that it is not tried again yet."""
        return self._clock() < self._retry_at

    def succeeded(self, meta: SnapshotMeta, info: CheckpointInfo | None, seconds: float) -> None:
        """Record a write; ``info`` is the checkpoint, if this write made it complete."""
        self._pages.fail(failing=False)
        self.status = dataclasses.replace(
            self.status,
            step=meta.step,
            attempt=meta.attempt,
            path=self.status.path if info is None else info.path,
            bytes=sum(region.tree_bytes + region.image_bytes for region in meta.parts),
            at=time.time(),
            seconds=seconds,
            persisted=self.status.persisted + 1,
            failure="",
            failure_kind="",
            failures_in_a_row=0,
            failing_since=None,
        )
        if info is not None and self._on_persisted is not None:
            self._on_persisted(info)

    def failed(self, message: str, kind: str) -> None:
        """Record a failure, and delay the next try."""
        self._retry_at = self._clock() + self._pace.retry_seconds
        self._pages.fail(failing=True)
        before = self.status
        self.status = dataclasses.replace(
            before,
            failures=before.failures + 1,
            failure=message,
            failure_kind=kind,
            failures_in_a_row=before.failures_in_a_row + 1,
            failing_since=before.failing_since or time.time(),
        )

    def late(self, steps: list[int], seconds: float) -> None:
        """Record that the snapshots of these steps were not on storage in time."""
        which = f"step {', '.join(map(str, steps))}" if steps else "the newest step"
        why = f": {self.status.failure}" if self.status.failure else ""
        self.failed(f"the snapshot of {which} was not on storage after {seconds:g} s{why}", "late")
