"""Whatever a rank reports, its job and the others continue, and the daemon starts again."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.notes import DroppedFact, LastOfItsKind, SaveFailed, UnusableValues
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Job
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.progress import MAX_NOTES, ProgressTable
from orchestrator.daemon.jobs.views import job_view
from orchestrator.daemon.loop import Loop
from orchestrator.store.store import Store
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.support.records import replace
from tests.support.stack import PATIENCE_SECONDS
from tests.support.stores import new_store
from tests.unit.core.builders import ID, T0, make_spec, pending, running, submission

ODD: list[Any] = [(1,), math.inf, math.nan, "x", -1, 2**80, True, {"a": 1}]


async def loop_with(
    *jobs: str, store: Store | None = None, on_event: Callable[[Job, ev.Event], None] = lambda *_: None
) -> tuple[Loop, Store]:
    store = store or new_store()
    loop = Loop(
        store=store,
        runtime=lambda: None,
        on_change=lambda _: None,
        on_end=lambda _: None,
        on_event=on_event,
        log=structlog.get_logger(),
    )
    for name in jobs:
        job, _ = await store.submit(submission(make_spec(), job_id=name))
        loop.add(job)
    return loop, store


async def take(loop: Loop, *events: ev.Event) -> None:
    """Let the loop process the events; return after the answer to a command that follows them."""
    rounds = asyncio.create_task(loop.run())
    loop.post(events)
    command = asyncio.create_task(loop.command(list))
    await asyncio.wait([rounds, command], timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert not rounds.done(), rounds.exception()
    rounds.cancel()


def noted(job_id: str, message: str) -> ev.JobNoted:
    return ev.JobNoted(job_id=JobId(job_id), at=T0, note=fact_from(message))


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", ["at", "step", "path"])
def test_a_fact_that_cannot_be_folded_is_left_out_and_told_on_its_job_alone(name: str, value: Any) -> None:
    async def run() -> None:
        loop, store = await loop_with("one", "two")
        fact = ev.CheckpointSaved(job_id=JobId("one"), at=T0, attempt=0, step=1, path="/c")
        await take(loop, replace(fact, **{name: value}), noted("two", "goes on"))
        assert loop.jobs[JobId("two")].notes == (fact_from("goes on"),)
        if (name, value) in (("path", "x"), ("step", -1)):  # a page's step is checked where the page is read
            return
        (told,) = (await store.job(JobId("one"))).notes
        assert told == DroppedFact(event="checkpoint_saved", fields=(name,))

    asyncio.run(run())


def test_a_fact_whose_fold_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fold raises: a defect of it affects one job only."""
    real = Loop._fold

    def failing(self: Loop, event: ev.Event, batch: list[Any]) -> None:
        if event.kind == "first_step":
            raise ZeroDivisionError
        real(self, event, batch)

    monkeypatch.setattr(Loop, "_fold", failing)

    async def run() -> None:
        loop, _ = await loop_with("one", "two")
        bad = ev.FirstStep(job_id=JobId("one"), at=T0, attempt=1, step=1, step_at=T0, steps_lost=0)
        await take(loop, bad, bad, noted("two", "goes on"))
        assert loop.jobs[JobId("one")].notes == (DroppedFact(event="first_step", error_type="ZeroDivisionError"),)
        assert loop.jobs[JobId("two")].notes == (fact_from("goes on"),)

    asyncio.run(run())


def test_what_only_counts_cannot_stop_the_loop() -> None:
    def failing(_job: Job, _event: ev.Event) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        loop, _ = await loop_with("one", on_event=failing)
        await take(loop, noted("one", "goes on"))
        assert loop.jobs[JobId("one")].notes == (fact_from("goes on"),)

    asyncio.run(run())


# -- progress


def test_what_a_rank_reports_and_cannot_be_used_is_told_once(tmp_path: Path) -> None:
    book, job = ProgressTable(), running(pending(make_spec()))
    snapshot = ProgressSnapshot(step=1, unusable=("epoch", "checkpoint.saved_at"))
    (told,) = book.take(job, 1, 1, snapshot, tmp_path / "m")
    assert isinstance(told, ev.JobNoted)
    assert told.note == UnusableValues(rank=1, fields=("epoch", "checkpoint.saved_at"))
    assert told.note.code == "unusable_report"
    assert book.take(job, 1, 1, snapshot, tmp_path / "m") == []


def test_a_script_cannot_fill_the_store_with_notes(tmp_path: Path) -> None:
    book, job = ProgressTable(), running(pending(make_spec()))
    made = []
    for number in range(3 * MAX_NOTES):
        facts = CheckpointFacts(failure=f"f{number}", quarantined=(f"q{number}",))
        made += book.take(job, 1, 0, ProgressSnapshot(checkpoint=facts), tmp_path / "m")
    assert len(made) == 2 * MAX_NOTES
    last = made[-1]
    assert isinstance(last, ev.JobNoted)
    assert last.note == LastOfItsKind(note=SaveFailed(said=f"f{MAX_NOTES - 1}"), most=MAX_NOTES)


def test_metrics_of_a_diverged_run_are_json(tmp_path: Path) -> None:
    book, job = ProgressTable(), running(pending(make_spec()))
    book.take(job, 1, 0, ProgressSnapshot(step=1, metrics={"loss": math.nan, "lr": 0.5}), tmp_path / "m")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"loss": None, "lr": 0.5}


def test_a_metrics_file_that_is_a_fifo_or_a_link_is_left_alone(tmp_path: Path) -> None:
    book, job = ProgressTable(), running(pending(make_spec()))
    (tmp_path / "other").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for number, name in enumerate(("link", "fifo")):
            book.take(job, 1 + number, 0, ProgressSnapshot(step=1 + number), tmp_path / name)
        assert (tmp_path / "other").read_text() == "mine"
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)


FLOATS = st.none() | st.floats(min_value=0, max_value=1e9)
COUNTS = st.none() | st.integers(0, 2**63 - 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    step=COUNTS,
    total=COUNTS,
    epoch=FLOATS,
    seconds=FLOATS,
    metrics=st.dictionaries(st.text(max_size=4), st.floats(), max_size=3),
)
def test_every_report_can_be_shown(
    step: int | None, total: int | None, epoch: float | None, seconds: float | None, metrics: dict[str, float]
) -> None:
    book, job = ProgressTable(), running(pending(make_spec()))
    snapshot = ProgressSnapshot(
        step=step, max_step=step, total_steps=total, epoch=epoch, step_seconds=seconds, metrics=metrics
    )
    book.take(job, 1, 0, snapshot, Path("/dev/null/none"))
    view = job_view(job, book.of(job.id), None, "")
    json.dumps(view.to_json(), allow_nan=False)
    assert job.id == ID
    assert job.state is JobState.RUNNING
