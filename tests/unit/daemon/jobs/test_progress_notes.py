"""Notes that the daemon makes from the progress of a rank."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core import events as ev
from orchestrator.daemon.jobs.progress import ProgressTable
from orchestrator.spec.model import CheckpointSpec
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.unit.core.builders import after, failed, gone, make_spec, pending, running, started


def notes(book: ProgressTable, path: Path, memory_bytes: int | None, **facts: object) -> list[str]:
    job = running(pending(make_spec(memory_bytes=memory_bytes)))
    snapshot = ProgressSnapshot(checkpoint=CheckpointFacts(**facts))  # type: ignore[arg-type]
    return [e.note.sentence() for e in book.take(job, 1, 0, snapshot, path) if isinstance(e, ev.JobNoted)]


def test_snapshots_that_take_more_than_the_job_asks_for_are_told_once(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    assert notes(book, metrics, 8_000_000_000, snapshot_bytes=6_000_000_000) == []
    assert notes(book, metrics, None, snapshot_bytes=9_000_000_000) == [], "it asks for no share of memory"
    (told,) = notes(book, metrics, 8_000_000_000, snapshot_bytes=9_000_000_000)
    assert "take 8.4 GiB of memory" in told
    assert "asks for 8GB" in told
    assert "resources_per_worker.memory" in told
    assert notes(book, metrics, 8_000_000_000, snapshot_bytes=9_000_000_000) == []


def test_how_often_a_job_saves_is_told_with_its_reason_and_again_when_it_is_quite_another(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    told = []
    for steps in (None, 10, 11, 20, 5, 21, 21, 30, 10, 100):
        told += notes(book, metrics, None, interval_steps=steps, interval_reason=f"every {steps} steps: of costs")
    assert told == [f"checkpoint.interval auto: saves every {steps} steps: of costs" for steps in (10, 21, 10, 100)]


def test_how_often_a_job_saves_is_for_rank_0_to_say(tmp_path: Path) -> None:
    job, book = running(pending(make_spec())), ProgressTable()
    snapshot = ProgressSnapshot(checkpoint=CheckpointFacts(interval_steps=3, interval_reason="every 3 steps"))
    assert book.take(job, 1, 1, snapshot, tmp_path / "metrics.jsonl") == []
    assert [e.kind for e in book.take(job, 1, 0, snapshot, tmp_path / "metrics.jsonl")] == ["job_noted"]


def test_waiting_for_storage_is_told_and_again_when_it_has_doubled(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    told = []
    for waits, seconds in ((0, 0.0), (3, 0.1), (9, 0.6), (10, 1.0), (12, 1.3), (40, 2.0), (41, 9.0)):
        told += notes(book, metrics, None, waits=waits, waited_seconds=seconds)
    assert [text.partition(":")[0] for text in told] == [
        "training has waited 600ms for storage, in 9 saves",
        "training has waited 1.3s for storage, in 12 saves",
        "training has waited 9s for storage, in 41 saves",
    ]


def test_checkpoints_that_are_not_on_storage_are_told_each_time_that_there_are_more(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    told = []
    for left_out, step in ((0, None), (1, 5), (1, 5), (4, 8)):
        told += notes(book, metrics, None, left_out=left_out, left_out_step=step)
    assert len(told) == 2
    assert told[0].startswith("1 checkpoint is not on storage")
    assert told[1].endswith("the newest of them is that of step 8")


def test_a_script_that_saves_all_the_time_does_not_fill_the_events_while_storage_fails(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    told = []
    for left_out in (*range(1, 21), 20, 20):
        told += notes(book, metrics, None, left_out=left_out, left_out_step=left_out)
    assert [int(text.split()[0]) for text in told] == [1, 2, 4, 8, 16, 20]


def test_a_failed_save_is_told_once_for_each_cause(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    told = []
    for step, kind in ((1, "ENOSPC"), (2, "ENOSPC"), (3, "EACCES"), (4, ""), (5, ""), (6, "ENOSPC")):
        told += notes(book, metrics, None, failure=f"checkpoint of step {step} not saved", failure_kind=kind)
    assert told == [f"checkpoint of step {step} not saved" for step in (1, 3, 4, 5, 6)], (
        "without a kind the text counts"
    )
    assert notes(book, metrics, None, failure="", failure_kind="") == []
    assert len(notes(book, metrics, None, failure="again", failure_kind="ENOSPC")) == 1


def test_steps_lost_by_a_script_that_saves_by_itself_are_counted_from_what_it_was_given(tmp_path: Path) -> None:
    book, metrics = ProgressTable(), tmp_path / "metrics.jsonl"
    job = running(pending(make_spec(checkpoint=CheckpointSpec(watch="out/ckpt.pt"))))
    book.take(job, 1, 0, ProgressSnapshot(step=320, max_step=320), metrics)
    saved = ev.CheckpointSaved(job_id=job.id, at=5.0, attempt=1, step=300, path="/w/ckpt.pt", digest="d")
    job = after(job, saved, failed(job), gone(job))
    up = ev.AttemptRunning(job_id=job.id, at=9.0, attempt=2, pids=(1,))
    job = after(job, started(job, gang=job.gang), up)
    new = ProgressSnapshot(step=321, max_step=321, new_step=321, new_step_at=10.0)
    (first,) = [e for e in book.take(job, 2, 0, new, metrics) if e.kind == "first_step"]
    assert isinstance(first, ev.FirstStep)
    assert first.steps_lost == 20
