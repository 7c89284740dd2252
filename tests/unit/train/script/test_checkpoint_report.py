"""A rank's report of its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.checkpoint.storage.directory import CheckpointInfo, CheckpointStatus
from orchestrator.train.script.progress_reading import CheckpointFacts
from orchestrator.train.script.saving import CheckpointReport, CheckpointWarning


class Page:
    """Records every write."""

    def __init__(self) -> None:
        self.facts: list[CheckpointFacts] = []
        self.calls: list[tuple[Any, ...]] = []

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        self.facts.append(CheckpointFacts(**facts))

    def write_saving(self) -> None:
        self.calls.append(("saving",))

    def write_saved(self, seconds: float, *, snapshot_step: int | None, counts: bool) -> None:
        self.calls.append(("saved", seconds, snapshot_step, counts))


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def report(page: Page) -> CheckpointReport:
    return CheckpointReport(page)  # type: ignore[arg-type]


def test_the_times_of_a_save_are_on_the_page(report: CheckpointReport, page: Page) -> None:
    report.stalled()
    report.returned(0.5, snapshot_step=3, counts=True)
    assert page.calls == [("saving",), ("saved", 0.5, 3, True)]


def test_a_failure_is_told_until_a_checkpoint_is_stored(report: CheckpointReport, page: Page) -> None:
    for step in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report.failed(step, OSError(28, "No space left on device"))
        assert [one.category for one in caught] == [CheckpointWarning] * (step == 1), "once until it succeeds"
    assert (page.facts[-1].failed_saves, page.facts[-1].failed_at is None) == (2, False)
    assert "checkpoint of step 2 not saved" in page.facts[-1].failure
    report.stored(CheckpointInfo(name="x", path="/x", step=3, attempt=1, status=CheckpointStatus.COMPLETE, bytes=7))
    told = page.facts[-1]
    assert (told.saved_step, told.saved_path, told.saved_bytes, told.failure, told.failed_at) == (3, "/x", 7, "", None)
    with pytest.warns(CheckpointWarning, match="step 4 not saved"):
        report.failed(4, OSError(28, "No space left on device"))


def test_a_warning_that_is_an_error_is_not_raised(report: CheckpointReport) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.warn("save", "no room")


def test_facts_about_snapshots_are_published_when_they_change(report: CheckpointReport, page: Page) -> None:
    report.snapshots_on(100)
    report.snapshots_on(100)
    assert [told.snapshot_bytes for told in page.facts] == [100]
    with pytest.warns(CheckpointWarning, match="no room"):
        report.snapshots_off("no room")
    report.snapshots_off("no room")
    assert [told.snapshots_off for told in page.facts] == ["", "no room"]
    report.snapshots_on(100)
    assert page.facts[-1].snapshots_off == ""


def test_a_backlog_is_summed_and_dropped_saves_are_told_once(report: CheckpointReport, page: Page) -> None:
    slots: Any = SimpleNamespace(waited_seconds=0.0, left_out=[])
    report.backlog(slots)
    assert page.facts == []
    slots.waited_seconds, slots.left_out = 2.0, [4, 5]
    report.backlog(slots)
    report.backlog(slots)
    told = page.facts[-1]
    assert (told.waits, told.waited_seconds, told.left_out, told.left_out_step) == (2, 4.0, 2, 5)
    assert slots.left_out == []


def test_a_forked_child_and_a_rank_without_a_page_write_nothing(report: CheckpointReport, page: Page) -> None:
    report.leave()
    for one in (report, CheckpointReport(None)):
        one.stalled()
        one.returned(0.5, counts=True)
        one.publish(saved_step=1)
    assert (page.calls, page.facts) == ([], [])
