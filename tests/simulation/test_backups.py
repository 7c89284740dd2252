"""Backups that are written during a campaign: each contains all jobs acknowledged by then, and opens as a store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from orchestrator.store.backup import restore
from orchestrator.store.sqlite import SqliteStore
from tests.simulation import campaign
from tests.simulation.acts import ACTS, Act
from tests.simulation.history import History

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from tests.simulation.world import World

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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_backup_in_the_middle_of_a_campaign_loses_nothing_acknowledged(seed: int, tmp_path: Path) -> None:
    backups = Backups(tmp_path)
    acts = {**ACTS, "backup": Act(backups.write, WEIGHT)}
    history = campaign.history_of(seed, acts=acts)
    outcome = campaign.run_history(History(seed, True, history.steps), acts=acts)
    assert outcome.failure == ""
    assert backups.held, "no backup was written"
    for target, acknowledged in backups.held.items():
        restored = tmp_path / f"restored-{target.name}"
        restore(target, restored)
        asyncio.run(_holds(restored, acknowledged))


async def _holds(path: Path, acknowledged: dict[JobId, Job]) -> None:
    store = SqliteStore.open(path, reserve=None, min_free_bytes=0)
    try:
        assert await store.verify() == []
        assert {job_id: await store.job(job_id) for job_id in acknowledged} == acknowledged
    finally:
        store.close()
