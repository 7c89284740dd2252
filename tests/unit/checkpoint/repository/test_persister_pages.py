"""The shared pages of a rank's persister."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.checkpoint.repository.persister import PersisterPages
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.checkpoint.snapshots.file import StoreState


class FullOnce(SnapshotDirectory):
    """A directory in which the first attempt to make a rank's page fails."""

    failures = 1

    def store_state(self, rank: int) -> StoreState:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        return super().store_state(rank)


def test_pages_that_could_not_all_be_opened_are_opened_again(tmp_path: Path) -> None:
    pages = PersisterPages(FullOnce(tmp_path), 0)
    with pytest.raises(OSError, match="No space left"):
        pages.open()
    pages.open()
    assert SnapshotDirectory(tmp_path).store_state(0).serves


def test_a_rank_is_served_until_the_pages_are_closed(tmp_path: Path) -> None:
    rank = SnapshotDirectory(tmp_path).store_state(1)
    pages = PersisterPages(SnapshotDirectory(tmp_path), 1)
    assert not rank.serves
    pages.open()
    assert rank.takes_all
    pages.fail(failing=True)
    assert rank.serves
    assert not rank.takes_all
    pages.close()
    assert not rank.serves


def test_every_rank_reads_what_rank_0_wants(tmp_path: Path) -> None:
    SnapshotDirectory(tmp_path).store_state(0).publish_wanted([3, 5])
    pages = PersisterPages(SnapshotDirectory(tmp_path), 1)
    assert pages.wanted() == frozenset()
    pages.open()
    assert pages.wanted() == {3, 5}
