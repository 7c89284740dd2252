"""The checkpoints of a rank: those from its snapshots, and those that its script writes by itself. Outlives attempts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.checkpoint.external.external_checkpoints import FileWatcher
from orchestrator.checkpoint.repository.persister import SnapshotPersister
from orchestrator.core.diagnosis.observation import StorageSeen
from orchestrator.private_files import make_private
from orchestrator.runtime.ranks.rank_events import masked_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.repository.persister import PersisterStatus
    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.launch_spec import RankPlan

LAST_LOOK_SECONDS: Final = 10.0


class RankCheckpoints:
    """A rank's checkpoints. ``newest`` is the last one reported, ``number`` counts the news.

    ``reported`` returns the time and the number of the rank's newest step, and whether it is a guess.
    """

    def __init__(self, reported: Callable[[], tuple[float, int, bool] | None]) -> None:
        self._reported = reported
        self._persister: SnapshotPersister | None = None
        self._files: FileWatcher | None = None
        self._last_statuses: list[PersisterStatus | None] = [None, None]
        self.newest: PersisterStatus | None = None
        self.number = 0

    def begin(self, plan: RankPlan) -> None:
        """Follow a new attempt."""
        self._keep_snapshots(plan)
        if plan.watch is not None:
            if self._files is None:
                self._files = FileWatcher(plan.watch, reported=self._reported)
            self._files.start(plan.attempt)

    def _keep_snapshots(self, plan: RankPlan) -> None:
        if self._persister is not None:
            self._persister.hold_lease(plan.attempt)
        if plan.snapshots is None or self._persister is not None:
            return
        make_private(Path(plan.snapshots.directory))
        self._persister = SnapshotPersister(plan.snapshots.directory, rank=plan.rank, settings=plan.snapshots.settings)
        self._persister.hold_lease(plan.attempt)
        self._persister.start()

    def look(self, masker: Masker) -> None:
        """Set ``newest`` to the changed status of one source, if there is one, and increase ``number``."""
        for index, source in enumerate((self._persister, self._files)):
            status = source.status if source else None
            if status is not None and (status.persisted or status.failures) and status != self._last_statuses[index]:
                self._last_statuses[index] = status
                self.newest = masked_status(status, masker)
                self.number += 1
                break  # the other source's news is next

    def storage(self, masker: Masker) -> StorageSeen | None:
        """Return the state of the snapshots' storage: failures, writes, free bytes; None without snapshots."""
        if self._persister is None:
            return None
        status, gauge = self._persister.status, self._persister.gauge
        return StorageSeen(
            failures=status.failures_in_a_row,
            failing_since=status.failing_since,
            cause=status.failure_kind,
            said=masker.text(status.failure),
            writes=status.persisted,
            written_bytes=status.bytes,
            seconds=status.seconds,
            busy_seconds=gauge.busy_seconds,
            free_bytes=gauge.free_bytes,
        )

    async def flush(self, seconds: float, masker: Masker) -> PersisterStatus | None:
        """Write the newest snapshot to storage; return the result, or None where there are no snapshots."""
        persister, files = self._persister, self._files
        if files is not None:
            await asyncio.to_thread(files.look)
            if files.status.persisted:
                return masked_status(files.status, masker)
        if persister is None:
            return None
        await asyncio.to_thread(persister.flush, seconds)
        return masked_status(persister.status, masker)

    async def ended(self, *, well: bool) -> None:
        """Count the checkpoints that the script wrote before its end: progress decides about the next attempt."""
        files = self._files
        if files is None:
            return
        files.ended(well=well)
        with contextlib.suppress(TimeoutError):  # the look continues; its result is reported later
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                await asyncio.shield(asyncio.to_thread(files.look))
