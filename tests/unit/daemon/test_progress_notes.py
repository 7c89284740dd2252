"""What the progress of a rank makes the daemon note down."""

from __future__ import annotations

from pathlib import Path

from orchestrator.daemon.progress import ProgressBook
from orchestrator.train.progress import CheckpointFacts, ProgressSnapshot
from tests.unit.core.builders import make_spec, pending, running


def notes(book: ProgressBook, path: Path, memory_bytes: int | None, **facts: object) -> list[str]:
    job = running(pending(make_spec(memory_bytes=memory_bytes)))
    snapshot = ProgressSnapshot(checkpoint=CheckpointFacts(**facts))  # type: ignore[arg-type]
    return [getattr(e, "message", "") for e in book.take(job, 1, 0, snapshot, path) if e.kind == "job_noted"]


def test_snapshots_that_take_more_than_the_job_asks_for_are_told_once(tmp_path: Path) -> None:
    book, metrics = ProgressBook(), tmp_path / "metrics.jsonl"
    assert notes(book, metrics, 8_000_000_000, snapshot_bytes=6_000_000_000) == []
    assert notes(book, metrics, None, snapshot_bytes=9_000_000_000) == [], "it asks for no share of memory"
    (told,) = notes(book, metrics, 8_000_000_000, snapshot_bytes=9_000_000_000)
    assert "take 9.0 GB of memory" in told
    assert "asks for 8.0 GB" in told
    assert "resources_per_worker.memory" in told
    assert notes(book, metrics, 8_000_000_000, snapshot_bytes=9_000_000_000) == []


def test_why_there_are_no_snapshots_is_told_once(tmp_path: Path) -> None:
    book, metrics = ProgressBook(), tmp_path / "metrics.jsonl"
    assert notes(book, metrics, None, snapshots_off="no room") == ["no room"]
    assert notes(book, metrics, None, snapshots_off="no room") == []
