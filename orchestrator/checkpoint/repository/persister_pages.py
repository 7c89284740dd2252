"""The pages of words by which a rank's persister communicates with its rank and the persisters of the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.checkpoint.snapshots.shared_words import HeldVersion, StoreState
    from orchestrator.checkpoint.snapshots.unmapped import UnmappedDirectory


class PersisterPages:
    """The held version of the job, the state of storage of this rank, and the snapshots that rank 0 requires there."""

    def __init__(self, directory: UnmappedDirectory, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._hold: HeldVersion | None = None
        self._own: StoreState | None = None
        self._leader: StoreState | None = None

    def open(self) -> HeldVersion:
        """Report to the rank that it is served; return the held version. Raises OSError."""
        if self._hold is None:
            own = self._directory.store_state(self._rank)
            self._leader = own if self._rank == 0 else self._directory.store_state(0)
            hold = self._directory.hold()
            own.serve(serving=True)
            self._own, self._hold = own, hold  # both, or the next call tries again
        return self._hold

    def close(self) -> None:
        """Report that the rank is no longer served."""
        if self._own is not None:
            self._own.serve(serving=False)
            self._own = None
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def wanted(self) -> frozenset[int]:
        """Return the identities that every rank of the gang must write to storage."""
        return frozenset() if self._leader is None else self._leader.wanted()

    def fail(self, *, failing: bool) -> None:
        """Report whether the last write to storage failed: the rank waits only while it did not."""
        if self._own is not None:
            self._own.fail(failing=failing)
