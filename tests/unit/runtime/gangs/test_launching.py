"""A rank that has run is not run again in the same attempt, whatever has become of its actor."""

from __future__ import annotations

import asyncio
import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.facts.faults import ActorLost, FilesNotSent
from orchestrator.runtime.gangs.errors import GangLostError, NodeFilesError
from orchestrator.runtime.gangs.launching import Launcher
from orchestrator.runtime.gangs.table import Gang
from orchestrator.spec.paths import Paths
from tests.support.nodes import node_report
from tests.unit.core.builders import after, make_spec, pending, started

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.job.record import Job

WAITING = pending(make_spec(workers=3))
JOB = after(WAITING, started(WAITING))


class LaunchedError(Exception):
    """The ranks would be started."""


class World:
    """A gang with actors that have launched these attempts; the first step of a launch requests the job's files."""

    def __init__(self, tmp_path: Path, *launched: int) -> None:
        self.paths = Paths(home=tmp_path, socket=tmp_path / "s")
        self.launched, self.watched = launched, 0
        self.refused: NodeFilesError | None = None
        self.gang = Gang(JOB.gang, [f"actor {rank}" for rank in range(len(launched))])

    def note_end(self, rank: int, attempt: int = 1) -> None:
        record = self.paths.exit_record(JOB.id, attempt, rank)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("{}")

    def ensure(self) -> None:
        launcher = Launcher(
            SimpleNamespace(paths=self.paths),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            reports=lambda: {JOB.nodes[0]: node_report(hostname="node-of-rank-0")},
            secrets_of=lambda _: {},
            previous_step=lambda _: 0,
            pool=self,  # type: ignore[arg-type]
            post=lambda _: None,
        )
        asyncio.run(launcher.ensure(JOB))

    async def attach(self, _: Job) -> Gang:
        return self.gang

    async def hello(self, _: Job, __: Gang) -> list[Any]:
        return [
            SimpleNamespace(launched=attempt, node_id="a", address="10.0.0.1", gpu_ids=(), pid=7)
            for attempt in self.launched
        ]

    async def run(self, *_: Any) -> None:
        """Lay out no working copy: the job has no archive here."""

    def apart(self, _: Job) -> list[str]:
        if self.refused is None:
            raise LaunchedError
        return [self.refused.node_id]

    async def unable_to_read(self, _: str, __: list[str]) -> list[str]:
        return []

    async def ship(self, _: Job) -> None:
        assert self.refused is not None
        raise self.refused

    def watch(self, _: Job, __: Gang, attempt: int) -> None:
        self.watched = attempt


def test_the_end_of_a_rank_whose_actor_was_made_anew_is_told_instead(tmp_path: Path) -> None:
    world = World(tmp_path, 0, 0, 0)
    world.note_end(1)
    with pytest.raises(GangLostError) as caught:
        world.ensure()
    assert caught.value.cause == ActorLost(rank=1)
    assert world.watched == 0


def test_what_has_not_run_is_launched(tmp_path: Path) -> None:
    world = World(tmp_path, 0, 0, 0)
    with pytest.raises(LaunchedError):
        world.ensure()
    world.note_end(1, attempt=2)
    world.paths.attempt_exits(JOB.id, 1).mkdir()
    with pytest.raises(LaunchedError):
        world.ensure()


def test_a_launch_that_was_cut_off_goes_on_though_a_rank_has_ended_since(tmp_path: Path) -> None:
    world = World(tmp_path, 1, 1, 0)
    world.note_end(0)
    with pytest.raises(LaunchedError):
        world.ensure()


def test_a_node_whose_disk_is_full_loses_the_gang_and_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, 0, 0, 0)
    world.refused = NodeFilesError(JOB.nodes[0], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/ada"))
    with pytest.raises(GangLostError) as caught:
        world.ensure()
    said = "No space left on device: /home/ada"
    assert caught.value.cause == FilesNotSent(rank=0, node=JOB.nodes[0], said=said, host="node-of-rank-0")
    assert not caught.value.node_lost


def test_what_runs_is_watched(tmp_path: Path) -> None:
    world = World(tmp_path, 1, 1, 1)
    world.note_end(0)
    world.ensure()
    assert world.watched == 1
