"""A training process dies: the failure is classified, the job resumes in its budget, the first failed rank is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import kill_each
from tests.support.stack import Stack, wait_until

BUDGETS = {"max_restarts": {"user": 1, "infra": 1}, "exit_codes": {"retry": [75]}}


def submit(stack: Stack, spec: str, directory: Path) -> str:
    return stack.submit(spec, directory, train=SCRIPT)


def failures(stack: Stack, job_id: str) -> list[dict[str, object]]:
    """Return the failure of each failed attempt, as its event records it."""
    return [e.body["failure"] for e in stack.client.events(job_id) if e.kind == "attempt_failed"]


@pytest.mark.parametrize(
    ("kind", "rank", "failure_class", "sentence"),
    [
        ("sigkill", 0, "infra", "was killed by SIGKILL"),
        ("exception", 1, "user", "raised ValueError: a fault of the schedule"),
        pytest.param("sigsegv", 1, "infra", "was killed by SIGSEGV", marks=pytest.mark.rare),
        pytest.param("exit", 1, "user", "ended with exit code 1", marks=pytest.mark.rare),
        pytest.param("tempfail", 0, "infra", "requested a retry (exit code 75", marks=pytest.mark.rare),
    ],
)
def test_either_rank_is_named_retried_and_resumed(
    stack: Stack, ledger: Ledger, tmp_path: Path, kind: str, rank: int, failure_class: str, sentence: str
) -> None:
    faults = [{"rank": rank, "attempt": 1, "step": 8, "kind": kind}]
    spec = job_spec(ledger, name=kind, ranks=2, steps=12, collective=True, faults=faults, spec={"retry": BUDGETS})
    job_id = submit(stack, spec, tmp_path / "work")
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert job.restarts_by_class == {failure_class: 1}
    (failure,) = failures(stack, job_id)
    assert failure["rank"] == rank
    assert str(failure["sentence"]).startswith(f"rank {rank} {sentence}")
    assert f"rank {rank} suffers {kind} before step 8" in failure["log_tail"]  # type: ignore[operator]
    resumed = {line.step for line in ledger.lines(job_id) if line.attempt == 2 and line.what == "resume"}
    assert resumed == {5}
    ledger.check(job_id)


def test_each_class_of_failure_has_a_budget_of_its_own(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    faults = [
        {"attempt": 1, "step": 6, "kind": "sigkill"},
        {"attempt": 2, "step": 11, "kind": "exception"},
        {"attempt": 3, "step": 16, "kind": "tempfail"},
    ]
    spec = job_spec(ledger, steps=20, faults=faults, spec={"retry": BUDGETS})
    job = stack.wait(submit(stack, spec, tmp_path / "work"))
    assert job.state == "FAILED"
    assert job.exit_code == 75
    assert job.restarts_by_class == {"infra": 1, "user": 1}
    assert job.failure is not None
    assert "1 of 1 infra restarts used" in job.failure.sentence
    assert [a.failure_class for a in job.attempts] == ["infra", "user", "infra"]
    ledger.check(job.id)


@pytest.mark.rare
def test_kills_at_random_moments_of_either_rank(
    stack: Stack, ledger: Ledger, tmp_path: Path, dice: random.Random
) -> None:
    kills, done = 4, tmp_path / "done"
    retry = {"max_restarts": {"infra": 20}, "max_no_progress": 20, "backoff": {"initial": "50ms", "max": "50ms"}}
    spec = job_spec(ledger, ranks=2, until=str(done), save_every=2, collective=True, spec={"retry": retry})
    job_id = submit(stack, spec, tmp_path / "work")
    killed: list[int] = []
    for number in range(1, kills + 1):
        victim = dice.randrange(2)
        # Moments from the script's first line, through its imports and rendezvous, to its steps and saves.
        lines = dice.choice([1, 2, 3, 4, 8, 12])

        def is_there(attempt: int = number, rank: int = victim, lines: int = lines) -> int | None:
            mine = [line for line in ledger.lines(job_id) if (line.attempt, line.rank) == (attempt, rank)]
            return mine[0].pid if len(mine) >= lines else None

        pid = wait_until(f"attempt {number} has done {lines} things", is_there, interval=0.001)
        kill_each(pid)
        killed.append(victim)
    wait_until("the last attempt steps", lambda: ledger.attempts(job_id)[-1] == kills + 1)
    done.touch()
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert [f["sentence"] for f in failures(stack, job_id)] == [f"rank {rank} was killed by SIGKILL" for rank in killed]
    ledger.check(job_id)
