"""`orch drill` on real jobs: what it does, what it measures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.errors import EXIT_REFUSED
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.stack import Stack, wait_until


@pytest.fixture
def job_id(breakable: Stack, ledger: Ledger, tmp_path: Path) -> str:
    """A job of two ranks that runs until it is cancelled, past its first two checkpoints."""
    spec = job_spec(ledger, name="drilled", ranks=2, until=str(tmp_path / "over"))
    job_id = breakable.submit(spec, tmp_path / "work", train=SCRIPT)
    breakable.wait_step(job_id, 12)
    return job_id


def drill(stack: Stack, job_id: str, *options: str) -> dict[str, Any]:
    done = stack.orch("drill", job_id, *options, "--yes", "--json", "--timeout", "60", seconds=90)
    assert done.returncode == 0, (done.stdout, done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["intact"], report
    return report


def test_ranks_and_actors_that_are_killed(breakable: Stack, job_id: str) -> None:
    rank = drill(breakable, job_id, "--kill", "rank", "--rank", "1")
    assert (rank["attempt_before"], rank["attempt_after"]) == (1, 2)
    assert 0 <= rank["detection_seconds"] <= rank["recovery_seconds"] < 30
    assert rank["steps_lost"] >= 0
    actor = drill(breakable, job_id, "--kill", "actor")
    assert (actor["attempt_before"], actor["attempt_after"]) == (2, 3)
    assert 0 <= actor["detection_seconds"] <= actor["recovery_seconds"] < 60
    assert breakable.job(job_id).state == "RUNNING"


def test_a_rank_that_is_stopped_is_found_and_the_job_goes_on(breakable: Stack, job_id: str) -> None:
    report = drill(breakable, job_id, "--hang", "--rank", "1")
    assert report["did"].startswith("stopped rank 1")
    assert (report["attempt_before"], report["attempt_after"]) == (1, 2)
    assert 1 < report["detection_seconds"] < report["recovery_seconds"] < 30
    assert breakable.job(job_id).restarts_by_class == {"hang": 1}


def test_a_torn_checkpoint_is_not_used(breakable: Stack, job_id: str) -> None:
    def two() -> bool:
        return sum(bool(c.valid) for c in breakable.client.checkpoints(job_id, verify=True)) >= 2

    wait_until("two good checkpoints", two)
    report = drill(breakable, job_id, "--tear-checkpoint")
    assert report["attempt_after"] == 2
    assert report["did"].startswith("tore ")
    assert report["checkpoint_step"] is not None


def test_a_daemon_that_is_killed_costs_no_step(breakable: Stack, job_id: str) -> None:
    before = breakable.daemon_pid()
    report = drill(breakable, job_id, "--kill", "daemon")
    assert breakable.daemon_pid() != before
    assert (report["attempt_before"], report["attempt_after"], report["steps_lost"]) == (1, 1, 0)


def test_what_is_refused(breakable: Stack, job_id: str) -> None:
    for options, words in (
        (("--kill", "rank"), "nobody was asked"),
        (("--kill", "ray", "--yes"), "killing Ray is not built yet"),
        (("--kill", "rank", "--rank", "9", "--yes"), "has ranks 0 to 1"),
    ):
        done = breakable.orch("drill", job_id, *options)
        assert done.returncode == EXIT_REFUSED, done.stderr
        assert words in done.stderr
    assert breakable.job(job_id).attempt == 1
    assert "which drill?" in breakable.orch("drill", job_id).stderr
