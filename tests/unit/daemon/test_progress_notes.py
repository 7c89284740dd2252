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


def test_how_often_a_job_saves_is_told_with_its_reason_and_again_when_it_is_quite_another(tmp_path: Path) -> None:
    book, metrics = ProgressBook(), tmp_path / "metrics.jsonl"
    told = []
    for steps in (None, 10, 11, 20, 5, 21, 21, 30, 10, 100):
        told += notes(book, metrics, None, interval_steps=steps, interval_reason=f"every {steps} steps: of costs")
    assert told == [f"checkpoint.interval auto: saves every {steps} steps: of costs" for steps in (10, 21, 10, 100)]


def test_how_often_a_job_saves_is_for_rank_0_to_say(tmp_path: Path) -> None:
    job, book = running(pending(make_spec())), ProgressBook()
    snapshot = ProgressSnapshot(checkpoint=CheckpointFacts(interval_steps=3, interval_reason="every 3 steps"))
    assert book.take(job, 1, 1, snapshot, tmp_path / "metrics.jsonl") == []
    assert [e.kind for e in book.take(job, 1, 0, snapshot, tmp_path / "metrics.jsonl")] == ["job_noted"]


def test_why_there_are_no_snapshots_is_told_once(tmp_path: Path) -> None:
    book, metrics = ProgressBook(), tmp_path / "metrics.jsonl"
    assert notes(book, metrics, None, snapshots_off="no room") == ["no room"]
    assert notes(book, metrics, None, snapshots_off="no room") == []
