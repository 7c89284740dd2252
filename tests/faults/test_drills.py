"""`orch drill` on real jobs: what it does, what it measures, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.errors import EXIT_INTERRUPTED, EXIT_REFUSED, DiskFullError
from orchestrator.cli.drills.drills import DiskFiller
from tests.support import disks
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.stack import ORCH, PATIENCE_SECONDS, Stack, wait_until

pytestmark = pytest.mark.rare


@pytest.fixture
def job_id(breakable: Stack, ledger: Ledger, tmp_path: Path) -> str:
    """Return a running job of two ranks, past its first two checkpoints, that runs until the file ``over`` exists."""
    spec = job_spec(ledger, name="drilled", ranks=2, until=str(tmp_path / "over"))
    job_id = breakable.submit(spec, tmp_path / "work", train=SCRIPT)
    breakable.wait_step(job_id, 12)
    return job_id


def drill(stack: Stack, job_id: str, *options: str) -> dict[str, Any]:
    done = stack.orch("drill", job_id, *options, "--yes", "--json", "--timeout", f"{PATIENCE_SECONDS:.0f}s")
    assert done.returncode == 0, (done.stdout, done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["intact"], report
    return report


def test_ranks_that_are_killed_or_stopped_actors_and_a_torn_checkpoint(breakable: Stack, job_id: str) -> None:
    """Drills run one after the other on the same job: each makes it start another attempt."""
    rank = drill(breakable, job_id, "--kill", "rank", "--rank", "1")
    assert (rank["attempt_before"], rank["attempt_after"]) == (1, 2)
    assert 0 <= rank["detection_seconds"] <= rank["recovery_seconds"]
    assert rank["steps_lost"] >= 0
    actor = drill(breakable, job_id, "--kill", "actor")
    assert (actor["attempt_before"], actor["attempt_after"]) == (2, 3)
    assert 0 <= actor["detection_seconds"] <= actor["recovery_seconds"]
    assert breakable.job(job_id).state == "RUNNING"

    hang = drill(breakable, job_id, "--hang", "--rank", "1")
    assert hang["did"].startswith("stopped rank 1")
    assert (hang["attempt_before"], hang["attempt_after"]) == (3, 4)
    assert 1 < hang["detection_seconds"] < hang["recovery_seconds"]
    assert breakable.job(job_id).restarts_by_class == {"infra": 2, "hang": 1}

    def two() -> bool:
        return sum(bool(c.valid) for c in breakable.client.checkpoints(job_id, verify=True)) >= 2

    wait_until("two good checkpoints", two)
    torn = drill(breakable, job_id, "--tear-checkpoint")
    assert torn["attempt_after"] == 5
    assert torn["did"].startswith("tore ")
    assert torn["checkpoint_step"] is not None


def test_what_is_refused_and_what_costs_a_running_job_nothing(breakable: Stack, job_id: str) -> None:
    for options, words in (
        (("--kill", "rank"), "not confirmed (no terminal)"),
        (("--fill-disk", "--yes"), "which other programs need"),
        (("--kill", "rank", "--rank", "9", "--yes"), "has ranks 0 to 1"),
    ):
        done = breakable.orch("drill", job_id, *options)
        assert done.returncode == EXIT_REFUSED, done.stderr
        assert words in done.stderr
    assert "which drill?" in breakable.orch("drill", job_id).stderr

    agent = drill(breakable, job_id, "--kill", "agent")
    assert (agent["attempt_before"], agent["attempt_after"], agent["steps_lost"]) == (1, 1, 0)
    assert 0 < agent["detection_seconds"] <= agent["recovery_seconds"]

    before = breakable.daemon_pid()
    daemon = drill(breakable, job_id, "--kill", "daemon")
    assert breakable.daemon_pid() != before
    assert (daemon["attempt_before"], daemon["attempt_after"], daemon["steps_lost"]) == (1, 1, 0)


def test_rays_head_is_killed_and_the_job_resumes(breakable: Stack, job_id: str) -> None:
    head = breakable.head_pids()
    report = drill(breakable, job_id, "--kill", "ray")
    assert (report["attempt_before"], report["attempt_after"]) == (1, 2)
    assert 0 <= report["detection_seconds"] <= report["recovery_seconds"]
    assert report["steps_lost"] >= 0
    assert set(breakable.head_pids().values()).isdisjoint(head.values())


KILLS = 4
"""Number of kills: enough that one recovery uses reserved disk space, and a later one finds it reserved again."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 16 MiB."""
    with disks.small_disk(tmp_path, 16) as where:
        yield where


def test_a_full_disk_costs_saves_and_nothing_else(
    breakable: Stack, ledger: Ledger, tmp_path: Path, small_disk: Path
) -> None:
    saves = {"checkpoint": {"storage_path": str(small_disk)}}
    spec = job_spec(ledger, name="drilled", until=str(tmp_path / "over"), spec=saves)
    job_id = breakable.submit(spec, tmp_path / "work", train=SCRIPT)
    wait_until("a checkpoint", lambda: breakable.client.checkpoints(job_id))
    free = disks.free_bytes(small_disk)
    report = drill(breakable, job_id, "--fill-disk")
    assert (report["attempt_before"], report["attempt_after"], report["steps_lost"]) == (1, 1, 0)
    assert report["detection_seconds"] >= 0
    assert report["recovery_seconds"] >= 0
    assert any(e.body.get("code") == "save_failed" for e in breakable.client.events(job_id))
    assert disks.free_bytes(small_disk) > free // 2, "the room is given back"
    breakable.client.cancel(job_id)
    assert breakable.wait(job_id).is_terminal  # nothing writes there any more


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_job_recovers_again_and_again_though_the_disk_is_full(
    breakable: Stack, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    """The note by which ranks agree on a checkpoint is in memory, and so is the snapshot."""
    with disks.small_disk(tmp_path, 16, kind=kind) as disk:
        keys = {"checkpoint": {"storage_path": str(disk)}, "retry": {"max_restarts": {"infra": KILLS}}}
        spec = job_spec(ledger, name="full", ranks=2, until=str(tmp_path / "over"), spec=keys)
        job_id = breakable.submit(spec, tmp_path / "work", train=SCRIPT)
        wait_until("a checkpoint", lambda: breakable.client.checkpoints(job_id))
        kill_again_and_again(breakable, ledger, job_id, disk)
        (tmp_path / "over").touch()
        job = breakable.wait(job_id)
        assert (job.state, job.attempt) == ("SUCCEEDED", KILLS + 1), job.failure
        ledger.check(job_id)


def test_jobs_recover_again_and_again_though_the_disk_under_the_home_is_full(ledger: Ledger, tmp_path: Path) -> None:
    """Transitions, exit records and the next attempt's files are always written; the daemon is killed half-way."""
    with disks.small_disk(tmp_path, 400, kind="ext4") as disk:
        stack = Stack(home=disk / "home")
        stack.home.mkdir(mode=0o700)
        try:
            stack.up()
            keys = {"retry": {"max_restarts": {"infra": KILLS}}}
            spec = job_spec(ledger, name="home", ranks=2, until=str(tmp_path / "over"), spec=keys)
            job_id = stack.submit(spec, tmp_path / "work", train=SCRIPT)
            wait_until("a checkpoint", lambda: stack.client.checkpoints(job_id))
            new_jobs_alone_are_refused(stack, ledger, tmp_path, job_id)
            kill_again_and_again(stack, ledger, job_id, disk, daemon_in=KILLS // 2)
            for attempt in (KILLS, KILLS + 1):
                records = stack.settings.paths.exit_record(job_id, attempt, 0).parent
                assert records.is_dir(), "of the last two attempts"
            disks.fill(disk)
            (tmp_path / "over").touch()
            job = stack.wait(job_id)
            assert (job.state, job.attempt) == ("SUCCEEDED", KILLS + 1), job.failure
            ledger.check(job_id)
        finally:
            stack.close()


def new_jobs_alone_are_refused(stack: Stack, ledger: Ledger, directory: Path, running: str) -> None:
    """Check that a full disk refuses new jobs only: what happens to the running job is still written."""
    work, spec = directory / "work", job_spec(ledger, name="new", steps=1)

    def accepted() -> str | None:
        try:
            return stack.submit(spec, work, train=SCRIPT)
        except DiskFullError:
            return None

    with DiskFiller(stack.home) as filler:
        filler.fill()
        with pytest.raises(DiskFullError) as refused:
            stack.submit(spec, work, train=SCRIPT)
        assert "orch prune" in f"{refused.value} {refused.value.hint}"
        (work / "job.yaml").write_text(spec)
        assert stack.orch("submit", "job.yaml", cwd=work).returncode == EXIT_REFUSED
        seen = ledger.last_step(running)
        wait_until("it steps on", lambda: ledger.last_step(running) > seen + 3)
        told = stack.orch("update", running, "--priority", "60")
        assert told.returncode == 0, told.stderr
        assert stack.job(running).priority == 60
    after = wait_until("new jobs are taken again", accepted)
    assert stack.wait(after).state == "SUCCEEDED"


def kill_again_and_again(stack: Stack, ledger: Ledger, job_id: str, disk: Path, *, daemon_in: int = 0) -> None:
    """Kill a rank in every attempt, with no byte free on the disk before, between and after.

    In the attempt ``daemon_in`` the daemon is killed too, and another one is started.
    """
    for attempt in range(2, KILLS + 2):
        disks.fill(disk)
        if attempt - 1 == daemon_in:
            stack.kill_daemon()
            disks.fill(disk)
            stack.up()
        before = ledger.last_step(job_id)
        wait_until("it has saved since", lambda before=before: ledger.last_step(job_id) > before + 10)
        disks.fill(disk)
        os.kill(ledger.pids(job_id, attempt - 1)[attempt % 2], signal.SIGKILL)
        wait_until(
            "it goes on",
            lambda attempt=attempt: (
                {line.rank for line in ledger.lines(job_id) if (line.attempt, line.what) == (attempt, "resume")}
                == {0, 1}
            ),
        )
        assert ledger.resumed(job_id, attempt) > before, "from the snapshot in memory"
        stack.wait_state(job_id, "RUNNING")
        assert stack.job(job_id).attempt == attempt


def test_a_campaign_of_drills_leaves_the_result_intact(
    breakable: Stack, ledger: Ledger, tmp_path: Path, job_id: str
) -> None:
    page = tmp_path / "report.html"
    kinds = "rank,actor,daemon,agent"
    done = breakable.orch(
        *(
            "drill",
            job_id,
            "--campaign",
            "15s",
            "--kinds",
            kinds,
            "--seed",
            "5",
            "--html",
            str(page),
            "--yes",
            "--json",
        ),
        *("--timeout", f"{PATIENCE_SECONDS:.0f}s"),
        seconds=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    report = json.loads(done.stdout)
    assert report["intact"]
    assert report["done"] > 0
    for round_ in report["rounds"]:
        assert round_["intact"] or round_["refused"], round_
    assert sum(figures["done"] for figures in report["figures"]) == report["done"]
    assert job_id in page.read_text()
    (tmp_path / "over").touch()
    assert breakable.wait(job_id).state == "SUCCEEDED"
    ledger.check(job_id)


def test_a_campaign_that_is_interrupted_reports_and_leaves_nothing_stopped(breakable: Stack, job_id: str) -> None:
    campaign = subprocess.Popen(
        [*ORCH, "drill", job_id, "--campaign", "10m", "--kinds", "hang,daemon", "--yes"],
        env=breakable.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with campaign:
        assert campaign.stderr is not None
        first = campaign.stderr.readline()
        assert job_id in first, first
        campaign.send_signal(signal.SIGTERM)
        out, _ = campaign.communicate(timeout=2 * PATIENCE_SECONDS)
    assert "interrupted" in out
    assert campaign.returncode == EXIT_INTERRUPTED
    step = breakable.job(job_id).progress
    breakable.wait_step(job_id, (step.step or 0 if step else 0) + 3)
