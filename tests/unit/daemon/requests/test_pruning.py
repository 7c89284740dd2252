"""What pruning removes, and what it says about a job of which files stay."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator import trees
from orchestrator.core.ids import JobId
from orchestrator.daemon.requests import pruning
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.runtime.pools import Pool
from orchestrator.spec.paths import Paths
from tests.support.deep_trees import MakeDeep
from tests.support.stores import new_store
from tests.unit.core.builders import ID
from tests.unit.store.lives import add, end

OTHER = JobId("other-zzzzzz")


def test_one_bad_tree_stays_with_its_record_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_deep: MakeDeep
) -> None:
    paths = Paths(home=tmp_path, socket=tmp_path / "sock")
    for job_id in (ID, OTHER):
        make_deep(paths.work(job_id) / "out", 1_500)
    really = trees.remove

    def refused(path: Path, *, until: float | None = None) -> trees.Removal:
        if path.name.endswith(ID):  # it is removed under another name
            left = trees.Problems()
            left.add("work/out", PermissionError(1, "no"))
            return trees.Removal(files=0, freed_bytes=0, left=left)
        return really(path, until=until)

    monkeypatch.setattr(pruning.trees, "remove", refused)

    async def prune() -> None:
        store, pool = new_store(), Pool("removals", 1)
        for job_id in (ID, OTHER):
            await end(store, await add(store, job_id))
        pruner = Pruning(store, paths, pool, set, SubmissionsUnderWay(paths, pool))
        would = await pruner.prune(older_than_seconds=0, dry_run=True)
        assert set(would.removed) == {ID, OTHER}
        assert not would.left
        done = await pruner.prune(older_than_seconds=0, dry_run=False)
        assert done.removed == (OTHER,)
        assert done.freed_bytes == 3
        assert [(each.job_id, each.directory) for each in done.left] == [(ID, str(paths.job(ID)))]
        assert done.left[0].reason == "work/out: Operation not permitted"
        assert (await store.job(ID)).id == ID
        monkeypatch.setattr(pruning.trees, "remove", really)
        assert (await pruner.prune(older_than_seconds=0, dry_run=False)).removed == (ID,)
        pool.close()

    asyncio.run(prune())
    assert os.listdir(paths.jobs) == []
