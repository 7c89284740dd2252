"""The shared pages of a rank's persister."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.checkpoint.repository.persister import PersisterPages
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory

if TYPE_CHECKING:
    from pathlib import Path


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
