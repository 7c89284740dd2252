"""Views of jobs: one line each, a few short lines on a narrow terminal, and one job in full."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.api.views import (
    AttemptView,
    CheckpointRef,
    FailureView,
    FindingView,
    JobView,
    PlannedRank,
    PlanReply,
    ProgressView,
    RankView,
    TimingsView,
)
from orchestrator.cli.commands.submit import plan_lines
from orchestrator.cli.console import Console, display_width
from orchestrator.cli.render.jobs import detail_lines, gpus_text, job_lines, progress_text

NOW = 1_000_000.0


def job(**fields: Any) -> JobView:
    values: dict[str, Any] = {
        "id": "digits-k3f9q2",
        "name": "digits",
        "user": "ada",
        "uid": 1000,
        "queue": "default",
        "priority": 50,
        "state": "RUNNING",
        "reason": "every rank is up",
        "submitted_at": NOW - 300,
        "num_workers": 2,
        "resources": {"num_workers": 2, "resources_per_worker": {"gpu": 1.0, "cpu": 2.0, "memory": 8_000_000_000}},
    }
    return JobView(**{**values, **fields})


PROGRESS = ProgressView(step=630, total_steps=1000, fraction=0.63, eta_seconds=80.0)


def console(width: int = 120, **environ: str) -> Console:
    return Console({"COLUMNS": str(width), **environ})


ADVICE = {
    "ranks": 4,
    "certain": False,
    "efficiency": 0.81,
    "compute_ms": 3.0,
    "exposed_ms": 0.7,
    "gradient_bytes": 8_000_000,
}


@pytest.mark.parametrize(
    ("auto", "said"),
    [
        (
            {"min": 1, "max": 8, "advice": ADVICE},
            (
                "4 ranks (not certain), within 1 to 8; each of 4 does 81% of what one does alone; communication of 8 MB adds 0.7 ms "
                "to 3 ms of computation per step"
            ),
        ),
        ({"min": 1, "max": 8, "advice": {"ranks": 1, "certain": True}}, "1 rank (certain), within 1 to 8"),
        (
            {"min": 1, "max": 8, "advice": {"ranks": 1, "certain": True, "compared_ranks": 2, "efficiency": 0.08}},
            "1 rank (certain), within 1 to 8; each of 2 does 8% of what one does alone",
        ),
        (None, "none (`orch submit --advise` asks for it): as many ranks as are free at its first start"),
    ],
)
def test_a_job_with_auto_says_what_was_advised_and_why(auto: Any, said: str) -> None:
    lines = detail_lines(console(300), job(resources={"num_workers": "auto", "auto": auto}), NOW)
    (line,) = [line for line in lines if "advice" in line.split()[0]]
    assert line.split(maxsplit=1)[1] == said


def test_a_line_says_it_all() -> None:
    head, line = job_lines(console(), [job(progress=PROGRESS, restarts=1)], NOW)
    assert head.split() == ["JOB", "STATE", "PROGRESS", "RESTARTS", "GPUS", "AGE", "REASON"]
    assert line.split() == [
        "digits-k3f9q2",
        "RUNNING",
        "██████▎░░░",
        "63%",
        "1m20s",
        "left",
        "1",
        "2",
        "5m",
        *["every", "rank", "is", "up"],
    ]


POOR = {
    "gpus": 2,
    "silent": [],
    "band": "poor",
    "quantities": {
        "utilization": {"cv": 0.01, "min_per_median": 0.99, "mean": 1.0, "band": "excellent"},
        "memory": {"cv": 0.02, "min_per_median": 0.98, "mean": 1e9, "band": "excellent"},
        "power": {"cv": 0.35, "min_per_median": 0.65, "mean": 200.0, "band": "poor"},
    },
}
FOUND = (
    FindingView(kind="no_step", sentence="no step for 40 s", advice="look at it", severity="critical", since=NOW - 90),
    FindingView(kind="gpu_throttled", sentence="the GPU of rank 0 is hot", advice="cool it"),
)


def test_a_badly_balanced_job_says_so_instead_of_that_it_runs() -> None:
    _, line = job_lines(console(180), [job(balance=POOR)], NOW)
    assert line.endswith("balance poor: utilization CV 1%, power CV 35% (min/median 0.65)")
    fair = {**POOR, "band": "fair"}
    assert job_lines(console(180), [job(balance=fair)], NOW)[1].endswith("every rank is up")
    assert job_lines(console(180), [job(balance=POOR, state="DRAINING")], NOW)[1].endswith("every rank is up")


def test_a_job_in_full_shows_its_balance_and_findings() -> None:
    text = "\n".join(detail_lines(console(), job(balance=POOR, findings=FOUND), NOW))
    assert "poor: utilization CV 1%, memory CV 2%, power CV 35% (min/median 0.65)" in text
    first, second = "no step for 40 s; look at it (for 1m30s)", "the GPU of rank 0 is hot; cool it"
    assert text.index(first) < text.index(second)
    assert "balance" not in "\n".join(detail_lines(console(), job(), NOW))


def test_a_narrow_terminal_gets_short_lines() -> None:
    lines = job_lines(
        console(40), [job(progress=PROGRESS, restarts=2, reason="waits for two GPUs on one node, of which")], NOW
    )
    assert lines[0] == "digits-k3f9q2  RUNNING"
    assert lines[1].startswith("  ██████▎░░░  63% 1m20s left · 2 GPUs")
    assert lines[2].endswith("…")
    assert all(display_width(line) <= 40 for line in lines)


def test_a_reason_cannot_steer_the_terminal() -> None:
    text = "\n".join(job_lines(console(), [job(reason="\x1b[2Jgone\nX")], NOW))
    assert "\x1b" not in text
    assert "?[2Jgone X" in text


def test_progress_in_all_its_forms() -> None:
    def shown(**fields: Any) -> str:
        return progress_text(console(), job(**fields))

    assert shown() == ""
    assert shown(progress=ProgressView()) == ""
    assert shown(progress=ProgressView(step=7)) == "step 7"
    assert shown(progress=ProgressView(step=7, phase="warm-up")) == "step 7 warm-up"
    assert shown(progress=ProgressView(fraction=0.5)) == "█████░░░░░  50%"
    assert shown(progress=ProgressView(fraction=0.5, eta_seconds=0.001)) == "█████░░░░░  50% 1s left"
    assert shown(progress=PROGRESS, state="SUCCEEDED") == "██████▎░░░  63%", "what has ended has no time left"
    assert shown(progress=ProgressView(fraction=1.7)) == "██████████ 100%"


def test_gpus_held_or_asked_for() -> None:
    assert gpus_text(job()) == "2"
    held = (RankView(rank=0, node="a", gpu_uuids=("G1", "G2")), RankView(rank=1, node="a", gpu_uuids=("G3", "G4")))
    assert gpus_text(job(gpus=held)) == "4"
    assert gpus_text(job(resources={"resources_per_worker": {"gpu": 0.25}})) == "0.5"
    shared = tuple(RankView(rank=rank, node="a", gpu_uuids=("G1",)) for rank in (0, 1))
    assert gpus_text(job(gpus=shared, resources={"resources_per_worker": {"gpu": 0.25}})) == "0.5"
    assert gpus_text(job(resources={"resources_per_worker": {"gpu": 0}})) == ""
    assert gpus_text(job(resources={})) == ""


def full_job(**fields: Any) -> JobView:
    values: dict[str, Any] = {
        "progress": dataclasses.replace(
            PROGRESS, epoch=3, phase="train", steps_per_second=12.34, metrics={"loss": 0.12345, "acc": None}
        ),
        "restarts": 1,
        "restarts_by_class": {"infra": 1, "user": 0},
        "started_at": NOW - 290,
        "checkpoint": CheckpointRef(step=600, at=NOW - 10, path="/c/600"),
        "gpus": (RankView(rank=0, node="n1", gpu_uuids=("GPU-1",), pid=12), RankView(rank=1, node="n2")),
        "attempts": (
            AttemptView(
                number=1,
                state="FAILED",
                started_at=NOW - 290,
                ended_at=NOW - 200,
                failure_class="infra",
                reason="killed",
            ),
            AttemptView(number=2, state="RUNNING", started_at=NOW - 199),
        ),
        "failure": FailureView(
            failure_class="infra",
            sentence="rank 1 was killed by SIGKILL",
            rank=1,
            log_tail=("one", "two\x1b[1m"),
            advice="look at dmesg",
        ),
        "timings": TimingsView(
            queued_seconds=0.2, submit_to_first_step_seconds=0.25, recovery_seconds=(0.18, 0.2), steps_lost=4
        ),
        "labels": {"team": "vision"},
        "quarantined": ("/c/500",),
        "working_dir": "/w",
        "log_dir": "/l",
    }
    return job(**{**values, **fields})


def facts(lines: list[str]) -> dict[str, str]:
    return {line[2:16].strip(): line[16:] for line in lines[1:] if line.startswith("  ") and len(line) > 16}


def test_a_failure_is_shown_in_the_daemon_s_words() -> None:
    failure = FailureView(failure_class="user", sentence="rank 1: a file is missing", rank=1)
    lines = detail_lines(console(), full_job(state="FAILED", failure=failure), NOW)
    assert "rank 1: a file is missing (user)" in lines


def test_a_job_in_full() -> None:
    lines = detail_lines(console(), full_job(), NOW)
    found = facts(lines)
    assert lines[0] == "digits-k3f9q2  RUNNING  every rank is up"
    assert found["progress"] == "██████▎░░░  63% 1m20s left  step 630/1000  epoch 3  train  12.3 steps/s"
    assert found["metrics"] == "loss 0.1235  acc nan"
    assert found["ranks"] == "2 ranks, each gpu 1, cpu 2, memory 8GB"
    assert found["restarts"] == "1 (1 infra)"
    assert found["checkpoint"].startswith("step 600, ")
    assert found["timings"] == "queued 200ms; first step after 250ms; recovered in 180ms, 200ms; 4 steps done twice"
    assert found["last failure"] == "rank 1 was killed by SIGKILL (infra)"
    assert found["quarantined"] == "/c/500"
    text = "\n".join(lines)
    assert "n2" in text
    assert "killed" in text
    assert "look at dmesg" not in text, "it goes on; the whole story is for a job that failed"


def test_a_failed_job_shows_the_end_of_its_log_and_what_to_do() -> None:
    lines = detail_lines(console(), full_job(state="FAILED", ended_at=NOW, exit_code=137), NOW)
    assert "rank 1 was killed by SIGKILL (infra)" in lines
    assert "  | two?[1m" in lines
    assert "  look at dmesg" in lines
    assert facts(lines)["ended"].endswith("after 4m50s, exit code 137")


def test_many_metrics_and_ranks_are_counted_not_spilled() -> None:
    many = full_job(
        progress=ProgressView(metrics={f"m{i}": 1.0 for i in range(30)}),
        gpus=tuple(RankView(rank=i, node="n") for i in range(40)),
    )
    text = "\n".join(detail_lines(console(), many, NOW))
    assert "and 18 more" in text
    assert "and 24 more; --json has them all" in text


def test_a_plan() -> None:
    plan = PlanReply(
        name="digits",
        queue="default",
        starts="later",
        reason="behind 1 job",
        ahead=("a-222222",),
        python="/p",
        seats=(PlannedRank(rank=0, node="n1", gpus=0.5, cpus=2.0),),
        snapshot_files=3,
        snapshot_bytes=2048,
        notes=("n",),
        secrets=("T",),
    )
    text = "\n".join(plan_lines(console(), plan))
    for part in (
        "digits  would wait: behind 1 job",
        "behind a-222222",
        "3 files, 2.0 KiB",
        "   0  n1     0.5     2",
        "note: n",
    ):
        assert part in text
