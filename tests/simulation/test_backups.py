"""Backups that are written during a campaign: each contains all jobs acknowledged by then, and opens as a store."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from orchestrator.runtime.memory.cluster import Processes
from orchestrator.runtime.memory.faults import HeadLost
from orchestrator.store.backup import restore
from orchestrator.store.store import Store
from tests.simulation import campaign
from tests.simulation.acts import ACTS, Act
from tests.simulation.world import Promise, World

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.memory.cluster import Process

SEEDS = range(6)
WEIGHT = 8  # about five of a history's steps


class Backups:
    """An act that writes a backup, and the jobs that were acknowledged before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[Path, dict[JobId, Job]] = {}

    def write(self, world: World, dice: random.Random) -> str:
        target = self.folder / f"backup-{len(self.held)}.sqlite3"
        acknowledged = {job_id: world.run(world.store.job(job_id)) for job_id in world.truth.promises}
        world.run(world.store.backup(target))
        self.held[target] = acknowledged
        return target.name


def test_a_backup_in_the_middle_of_a_campaign_loses_nothing_acknowledged(tmp_path: Path) -> None:
    written = 0
    for seed in SEEDS:
        backups = Backups(tmp_path / str(seed))
        backups.folder.mkdir()
        acts = {**ACTS, "backup": Act(backups.write, WEIGHT)}
        history = campaign.history_of(seed, acts=acts)
        outcome = campaign.run_history(history, acts=acts)
        assert outcome.failure == "", seed
        written += len(backups.held)
        for target, acknowledged in backups.held.items():
            restored = backups.folder / f"restored-{target.name}"
            restore(target, restored)
            asyncio.run(_holds(restored, acknowledged))
    assert written >= len(SEEDS)


async def _holds(path: Path, acknowledged: dict[JobId, Job]) -> None:
    store = Store.open(path, reserve=None, min_free_bytes=0)
    try:
        assert await store.verify() == []
        assert {job_id: await store.job(job_id) for job_id in acknowledged} == acknowledged
    finally:
        store.close()


RESTORES = range(12)


@pytest.mark.parametrize("seed", RESTORES)
def test_after_a_restore_nothing_that_the_record_does_not_know_goes_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is killed, and its store replaced by an older copy; Ray and all ranks run on, or have ended with it."""
    # A home keeps the exit records of ended jobs until they are pruned; the cluster in memory drops them, to stay small.
    monkeypatch.setattr(Processes, "forget", lambda _processes, _job_id: None)
    history, dice = campaign.history_of(seed, length=80), random.Random(seed)
    world = World()
    try:
        began: Counter[tuple[str, int, int]] = Counter()
        on_start = world.cluster.processes.on_start

        def started(process: Process) -> float:
            began[process.job_id, process.attempt, process.rank] += 1
            return on_start(process)

        world.cluster.processes.on_start = started
        copy = world.home / "copy.db"
        copied_at = dice.randrange(5, 60)
        for number, step in enumerate(history.steps):
            ACTS[step.act].do(world, step.choices())
            if number == copied_at:
                world.run(world.store.backup(copy))
        if dice.random() < 0.3:
            HeadLost().inject(world.cluster)
        world.restore(copy)
        world.crash()
        world.truth.first_up.clear()
        known = set(world.jobs)
        world.round()
        assert {gang.job_id for gang in world.cluster.gangs.values()} <= known, "gangs of no job are left"
        _until_all_have_ended(world)
        assert not world.cluster.gangs
        assert not list(world.cluster.processes)
        assert max(began.values(), default=0) <= 1, "the number of an attempt was used in both lives"
        assert world.run(world.store.verify()) == []
    finally:
        world.close()


def _until_all_have_ended(world: World) -> None:
    world.truth.promises = {job_id: Promise() for job_id in world.jobs}
    campaign.settle(world, lambda _: None)
