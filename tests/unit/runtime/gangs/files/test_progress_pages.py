"""The daemon reads ranks' pages on its own machine: new reports once, and none that the rank actor must send."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator.runtime.gangs.files.progress_pages import ProgressPages
from orchestrator.runtime.gangs.gang import Gang
from orchestrator.runtime.nodes.directories import page_name
from orchestrator.train.script.progress import ProgressPage
from orchestrator.train.script.progress_reading import PageReader
from tests.unit.core.builders import make_spec, pending, running

JOB = running(pending(make_spec(workers=2)))
SECRETIVE = running(pending(make_spec(workers=2, secrets=("TOKEN",))))


class World:
    """The pages of a gang of two ranks, read in rounds that a test counts."""

    def __init__(self, directory: Path | None) -> None:
        self.taken: list[tuple[int, int | None]] = []
        self.failing = False
        self.gang = Gang(number=1, actors=[])
        self.pages = ProgressPages(directory, self._take, structlog.get_logger(), pause=self._pause)
        self._rounds = 0

    def _take(self, _job_id: Any, _attempt: int, rank: int, snapshot: Any) -> None:
        if self.failing:
            raise ValueError("saved_at is a list")
        self.taken.append((rank, snapshot.step))

    async def _pause(self, _seconds: float) -> None:
        if self._rounds == 0:
            self.gang.gone.update((0, 1))  # the round after the last of the test sees the end
        self._rounds -= 1

    def read(self, rounds: int = 1) -> list[tuple[int, int | None]]:
        """Read the pages in ``rounds`` rounds; return the reports that were taken."""
        self.taken.clear()
        self.gang.gone.clear()
        self._rounds = rounds - 1
        asyncio.run(self.pages.run(JOB, self.gang, 1))
        return self.taken


def page_of(directory: Path, rank: int) -> tuple[PageReader, ProgressPage]:
    path = directory / page_name(JOB.id, rank)
    return PageReader.create(path), ProgressPage.open(path)


def test_each_new_report_is_taken_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, first = page_of(tmp_path, 0)
    _, second = page_of(tmp_path, 1)
    world.pages.open(JOB, world.gang, 0)
    world.pages.open(JOB, world.gang, 1)
    assert world.read() == [], "no rank has reported a step: what the actor finds in the output counts"
    first.write(step=3)
    assert world.read(2) == [(0, 3)]
    first.write(step=4)
    second.write(step=4)
    assert world.read() == [(0, 4), (1, 4)]
    assert world.gang.newest[1].step == 4


def test_a_new_process_has_a_new_page(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, before = page_of(tmp_path, 0)
    world.pages.open(JOB, world.gang, 0)
    before.write(step=9)
    assert world.read() == [(0, 9)]
    _, after = page_of(tmp_path, 0)
    after.write(step=2)
    assert world.read() == [], "the old page is still the one that is open"
    world.pages.open(JOB, world.gang, 0)
    assert world.read() == [(0, 2)]
    world.gang.unwatch()
    assert world.gang.pages == {}


@pytest.mark.parametrize("what", ["missing", "link", "directory"])
def test_a_page_that_is_no_regular_file_is_left_to_the_actor(tmp_path: Path, what: str) -> None:
    world, path = World(tmp_path), tmp_path / page_name(JOB.id, 0)
    if what == "link":
        PageReader.create(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    elif what == "directory":
        path.mkdir()
    world.pages.open(JOB, world.gang, 0)
    assert world.gang.pages == {}


def test_a_report_that_cannot_be_taken_leaves_the_rest_to_the_actor(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, page = page_of(tmp_path, 0)
    world.pages.open(JOB, world.gang, 0)
    page.write(step=1)
    world.failing = True
    assert world.read(2) == []
    assert world.gang.pages == {}


def test_pages_of_jobs_with_secrets_and_of_other_machines_are_not_read(tmp_path: Path) -> None:
    page_of(tmp_path, 0)
    here, elsewhere = World(tmp_path), World(None)
    assert (here.pages.sees(JOB), here.pages.sees(SECRETIVE), elsewhere.pages.sees(JOB)) == (True, False, False)
    here.pages.open(SECRETIVE, here.gang, 0)
    elsewhere.pages.open(JOB, elsewhere.gang, 0)
    assert here.gang.pages == elsewhere.gang.pages == {}
