"""`orch prune` removes what orch keeps of ended jobs, but no checkpoints in a directory that the job's owner chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api.errors import NoSuchJobError
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.stack import Stack, wait_until


def test_checkpoints_where_the_owner_wanted_them_stay(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, own = breakable, tmp_path / "own"
    saves = {"checkpoint": {"storage_path": str(own)}}
    ours = stack.submit(job_spec(ledger, name="ours", steps=6), tmp_path / "work", train=SCRIPT)
    theirs = stack.submit(job_spec(ledger, name="theirs", steps=6, spec=saves), tmp_path / "work", train=SCRIPT)
    until = stack.submit(job_spec(ledger, name="live", until=str(tmp_path / "over")), tmp_path / "work", train=SCRIPT)
    for job_id in (ours, theirs):
        assert stack.wait(job_id).state == "SUCCEEDED"
        wait_until("its last snapshot is on storage", lambda job_id=job_id: stack.client.checkpoints(job_id))
    jobs = stack.settings.paths.jobs
    would = stack.client.prune(older_than_seconds=0, dry_run=True)
    assert {ours, theirs} <= set(would.removed)
    assert (jobs / theirs).is_dir(), "nothing was done yet"
    done = stack.client.prune(older_than_seconds=0)
    assert {ours, theirs} <= set(done.removed)
    assert str(own / theirs) in done.kept, "other tests of this daemon have theirs there too"
    assert not any(ours in kept for kept in done.kept)
    assert done.freed_bytes > 0
    assert not (jobs / ours).exists()
    assert not (jobs / theirs).exists()
    assert list((own / theirs).glob("step-*")), "a checkpoint is there, to begin another job with"
    for job_id in (ours, theirs):
        with pytest.raises(NoSuchJobError):
            stack.job(job_id)
    assert until not in done.removed
    wait_until("the live one steps on", lambda: ledger.last_step(until) > 0)
