"""Choice of the slot that the next snapshot overwrites."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, SnapshotDirectory, SnapshotSlot, identity
from orchestrator.checkpoint.snapshots.writer import SlotPool

SIZE = HEADER_BYTES + 4096


def word(step: int) -> int:
    return identity(Version(attempt=1, step=step))


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path / "snapshots")


def put(pool: SlotPool, index: int, step: int, *, wanted: bool = False) -> SnapshotSlot:
    slot = pool.of_size(index, SIZE)
    slot.begin()
    slot.want(word(step) if wanted else 0)
    slot.commit(word(step))
    return slot


def test_a_used_slot_is_chosen_before_a_new_one_and_never_the_newest(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    assert pool.choose(None) == 0
    put(pool, 0, 1)
    assert pool.choose(None) == 1, "the only one is the newest"
    put(pool, 1, 2)
    assert pool.choose(None) == 0, "the older one is used again"
    put(pool, 0, 3)
    assert pool.choose(None) == 1
    pool.close()


def test_a_held_snapshot_is_not_overwritten(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    put(pool, 0, 1)
    put(pool, 1, 2)
    directory.hold().set(word(1))
    assert pool.choose(None) == 2
    pool.close()


def test_a_choice_waits_for_storage_while_it_works_and_says_so_once(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    slots = [put(pool, index, step, wanted=True) for index, step in enumerate((1, 2, 3))]
    directory.store_state(0).serve(serving=True)
    waits: list[int] = []

    def store_the_oldest() -> None:
        waits.append(1)
        slots[0].mark_stored(word(1))

    assert pool.choose(store_the_oldest) == 0
    assert waits == [1]
    assert pool.waited_seconds > 0
    assert pool.left_out == []
    pool.close()


def test_a_choice_gives_the_oldest_up_where_storage_fails(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    for index, step in enumerate((1, 2, 3)):
        put(pool, index, step, wanted=True)
    assert pool.choose(None) == 0
    assert pool.left_out == [], "without a persister nothing was promised"
    state = directory.store_state(0)
    state.serve(serving=True)
    state.fail(failing=True)
    assert pool.choose(None) == 0
    assert pool.left_out == [1]
    assert pool.waited_seconds == 0.0
    pool.close()


def test_what_rank_0_wants_is_kept_by_every_rank_until_it_is_replaced(directory: SnapshotDirectory) -> None:
    leader, other = SlotPool(directory, 0), SlotPool(directory, 1)
    for pool in (leader, other):
        put(pool, 0, 1, wanted=pool is leader)
        put(pool, 1, 2)
    leader.want_instead(word(1), 0)
    assert (leader.choose(None), other.choose(None)) == (2, 2)
    leader.want_instead(word(2), word(1))
    assert directory.store_state(0).wanted() == {word(2)}
    assert (leader.choose(None), other.choose(None)) == (0, 0)
    leader.close()
    other.close()
