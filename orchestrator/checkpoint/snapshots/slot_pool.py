"""The slots of a rank: chooses the one that the next snapshot overwrites, and waits until one is free.

It spares the newest snapshot, one that a persister holds and, while storage works, one that must still reach it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orchestrator.checkpoint.snapshots.file import SLOTS, SnapshotSlot, held, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.checkpoint.snapshots.file import SnapshotDirectory

_STORE_POLL_SECONDS = 0.002


class SlotPool:
    """Finds the rank's existing slots, and makes more when they are needed. The caller holds the writer's lock."""

    def __init__(self, directory: SnapshotDirectory, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._hold = directory.hold()
        self._store_state = directory.store_state(rank)
        self._leader = self._store_state if rank == 0 else directory.store_state(0)
        self._slots: dict[int, SnapshotSlot] = {}
        for index in range(SLOTS):
            slot = SnapshotSlot.open(directory.slot_path(rank, index))
            if slot is not None:
                self._slots[index] = slot
        self.waited_seconds = 0.0
        """Seconds that the last save waited for storage to take an earlier one; 0 at the beginning of each save."""
        self.left_out: list[int] = []
        """Steps that were wanted on storage and were dropped because storage failed."""

    @property
    def memory_bytes(self) -> int:
        """The memory that this rank's snapshots take once every slot is in use."""
        return SLOTS * max((len(slot.memory) for slot in self._slots.values()), default=0)

    def holds(self, word: int) -> bool:
        """Whether a slot has the snapshot of this identity."""
        return any(slot.identity() == word for slot in self._slots.values())

    def want_instead(self, word: int, replaced: int) -> None:
        """Require ``word`` on the storage of every rank; ``replaced`` (0: none) need not reach it any more."""
        self._store_state.publish_wanted((self._store_state.wanted() | {word}) - {replaced})
        for slot in self._slots.values() if replaced else ():
            if slot.identity() == replaced:
                slot.want(0)

    def of_size(self, index: int, size: int) -> SnapshotSlot:
        """Return a slot, replaced by a new one unless it has about this size. Raises SnapshotUnavailableError."""
        slot = self._slots.get(index)
        if slot is None or not size <= len(slot.memory) <= 2 * size:
            slot = self._slots[index] = SnapshotSlot.create(self._directory.slot_path(self._rank, index), size)
        return slot

    def choose(self, on_wait: Callable[[], None] | None) -> int:
        """Choose a slot that may be overwritten: not the newest, not one that is held or must still reach storage.

        Prefers a used one to a new one. Waits where there is none and storage works.
        """
        began = time.perf_counter()
        while (index := self._free()) is None:
            if not self._store_state.takes_all:
                return self._given_up()
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(_STORE_POLL_SECONDS)
            self.waited_seconds = time.perf_counter() - began
        return index

    def close(self) -> None:
        """Release the slots; the snapshots in them stay."""
        self._hold.close()
        self._slots.clear()

    def _free(self) -> int | None:
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        wanted = self._leader.wanted()
        keep = self._in_use(identities) | {slot.pending(wanted) for slot in self._slots.values()}
        free = [index for index, found in identities.items() if found == 0 or found not in keep]
        if free:
            return min(free, key=lambda index: identities[index])
        return next((index for index in range(SLOTS) if index not in identities), None)

    def _in_use(self, identities: Mapping[int, int]) -> set[int]:
        return {max(identities.values(), default=0), held(list(identities.values()), self._hold.get())} - {0}

    def _given_up(self) -> int:
        """Return the slot of the oldest snapshot that must reach storage and cannot."""
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        keep = self._in_use(identities)
        index = min((i for i, found in identities.items() if found not in keep), key=lambda i: identities[i])
        lost = version_of(identities[index])
        if self._store_state.serves and lost is not None:
            self.left_out.append(lost.step)
        return index
