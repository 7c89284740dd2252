"""Processes that a rank depends on die: its actor, its keeper, the node agent, the fork server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import (
    actor_pids,
    all_gone,
    kill_each,
    node_agents,
    of_cwd,
    parent,
    tree,
)
from tests.support.stack import Stack, process_gone, wait_until

# A grandchild that ignores signals, and one that has left its session and its parent.
CHILDREN = [
    "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
    "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(600)",
]


def running(stack: Stack, ledger: Ledger, directory: Path, *, ranks: int = 2, until: Path | None = None) -> str:
    """Submit a job that steps until ``until`` exists, and wait until every rank steps."""
    budget = {"retry": {"backoff": {"initial": "100ms", "max": "200ms"}}}
    spec = job_spec(ledger, ranks=ranks, until=str(until or directory / "done"), children=CHILDREN, spec=budget)
    job_id = stack.submit(spec, directory / "work", train=SCRIPT)
    stack.wait_state(job_id, "RUNNING")
    wait_until("every rank steps", lambda: all(ledger.last_step(job_id, rank) >= 6 for rank in range(ranks)))
    return job_id


def finish(stack: Stack, ledger: Ledger, job_id: str, directory: Path, attempts: int) -> None:
    """Wait until the attempt steps, end the job, and check that it succeeded and left no process."""
    wait_until(
        f"attempt {attempts} steps",
        lambda: any(line.attempt == attempts and line.what == "step" for line in ledger.lines(job_id)),
    )
    (directory / "done").touch()
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert job.attempt == attempts
    ledger.check(job_id)
    assert of_cwd(Path(job.working_dir)) == []


def test_an_actor_or_a_keeper_takes_its_whole_tree_along_and_the_job_recovers(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    """Actors and keepers of one job are killed one by one, then all its actors at once: each loss costs one restart."""
    job_id = running(stack, ledger, tmp_path)
    victims = [("actor", 0), ("keeper", 1), ("actor", 1), ("keeper", 0)]
    for attempt, (what, rank) in enumerate(victims, 1):
        keeper = parent(ledger.pids(job_id, attempt)[rank])
        trees = tree(keeper)
        assert len(trees) >= 4, "keeper, rank, and two grandchildren"
        os.kill(keeper if what == "keeper" else actor_pids(stack, job_id)[rank], signal.SIGKILL)
        all_gone(f"what the {what} had started", trees)
        stepping_again(ledger, job_id, attempt + 1)
    kill_each(*actor_pids(stack, job_id))
    finish(stack, ledger, job_id, tmp_path, attempts=len(victims) + 2)
    job = stack.job(job_id)
    assert job.restarts_by_class == {"infra": len(victims) + 1}
    for attempt, (_, rank) in zip(job.attempts, victims, strict=False):
        assert f"rank {rank}" in attempt.reason


def stepping_again(ledger: Ledger, job_id: str, attempt: int) -> None:
    """Wait until both ranks have done some steps, and saved, in this attempt."""

    def steps() -> bool:
        lines = [line for line in ledger.lines(job_id) if line.attempt == attempt]
        return all(sum((line.rank, line.what) == (rank, "step") for line in lines) >= 6 for rank in (0, 1))

    wait_until(f"attempt {attempt} steps", steps)


def test_a_fork_server_is_replaced_and_a_running_job_does_not_notice(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    job_id = running(stack, ledger, tmp_path)
    server = parent(parent(ledger.pids(job_id, 1)[0]))
    os.kill(server, signal.SIGKILL)
    seen = ledger.last_step(job_id)
    wait_until("the job steps on", lambda: ledger.last_step(job_id) > seen + 5)
    finish(stack, ledger, job_id, tmp_path, attempts=1)
    later = tmp_path / "later"
    later.mkdir()
    second = running(stack, ledger, later)
    assert parent(parent(ledger.pids(second, 1)[0])) not in (server, 1)
    finish(stack, ledger, second, later, attempts=1)


@pytest.mark.rare
def test_a_fork_server_that_dies_while_jobs_start_costs_them_nothing(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    first = stack.wait(stack.submit(job_spec(ledger, steps=1), tmp_path / "work", train=SCRIPT))
    assert first.state == "SUCCEEDED"
    for number in range(2):
        jobs = [
            stack.submit(job_spec(ledger, name=f"j{number}-{i}", steps=2, ranks=2), tmp_path / "work", train=SCRIPT)
            for i in range(2)
        ]
        servers = wait_until("there is a fork server", lambda: fork_servers(stack))  # another test may have ended it
        kill_each(*servers)
        for job_id in jobs:
            job = stack.wait(job_id)
            assert job.state == "SUCCEEDED", job.failure
            ledger.check(job_id)


def fork_servers(stack: Stack) -> list[int]:
    """Return the process ids of the home's fork servers."""
    marker = str(stack.node_root)
    return [
        p.pid
        for p in psutil.process_iter(["name", "cmdline"])
        if p.info["name"] == "orch-forkserver"
        and any(marker in part for part in p.info["cmdline"] or ())
        and not process_gone(p.pid)
    ]


def test_a_node_agent_is_replaced_and_a_running_job_does_not_notice(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    job_id = running(stack, ledger, tmp_path)
    agents = node_agents(stack)
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGKILL)
    seen = ledger.last_step(job_id)
    wait_until("the job steps on", lambda: ledger.last_step(job_id) > seen + 5)
    wait_until("there is another agent", lambda: node_agents(stack) not in ([], agents))
    finish(stack, ledger, job_id, tmp_path, attempts=1)
    later = tmp_path / "later"
    later.mkdir()
    finish(stack, ledger, running(stack, ledger, later), later, attempts=1)


@pytest.mark.rare
def test_a_new_agent_still_replaces_fork_servers(stack: Stack) -> None:
    before = wait_until("there is a fork server", lambda: fork_servers(stack))
    kill_each(*node_agents(stack))
    wait_until("the agent is replaced", lambda: node_agents(stack))
    kill_each(*before)
    wait_until("the fork server is replaced", lambda: set(fork_servers(stack)) - set(before))
