"""Processes that a rank depends on are stopped (SIGSTOP), or killed together with those that clean up after them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orchestrator.core.states import JobState
from tests.faults.test_actors_and_services import finish, fork_servers, running
from tests.support.ledger import Ledger
from tests.support.processes import actor_pids, all_gone, kill_each, node_agents, of_cwd, parent, tree
from tests.support.stack import Stack, process_gone, wait_until


def lock_files(stack: Stack, job_id: str) -> list[Path]:
    return list(stack.node_root.glob(f"*/ranks/{job_id}.*.lock"))


def test_a_stopped_actor_is_ended_and_its_job_recovers(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    job_id = running(stack, ledger, tmp_path)
    actor = actor_pids(stack, job_id)[1]
    trees = tree(parent(ledger.pids(job_id, 1)[1]))
    os.kill(actor, signal.SIGSTOP)
    wait_until("the actor is ended", lambda: process_gone(actor))
    all_gone("what it had started", trees)
    finish(stack, ledger, job_id, tmp_path, attempts=2)
    assert stack.job(job_id).restarts_by_class == {"infra": 1}


def test_cancel_ends_a_job_whose_actors_and_keepers_are_stopped(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    job_id = running(stack, ledger, tmp_path)
    ranks = ledger.pids(job_id, 1)
    trees = tree(*(parent(pid) for pid in ranks.values()))
    for pid in (*actor_pids(stack, job_id), parent(ranks[0])):
        os.kill(pid, signal.SIGSTOP)
    stack.client.cancel(job_id)
    wait_until("the job is cancelled", lambda: stack.job(job_id).state == JobState.CANCELLED)
    assert [rank for rank, pid in ranks.items() if not process_gone(pid)] == []
    wait_until("their keepers have ended too", lambda: all(map(process_gone, trees)))
    assert of_cwd(Path(stack.job(job_id).working_dir)) == []
    wait_until("its lock files are gone", lambda: lock_files(stack, job_id) == [])


def test_a_stopped_agent_is_replaced(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    before = node_agents(stack)
    assert len(before) == 1
    os.kill(before[0], signal.SIGSTOP)
    wait_until("the agent is replaced", lambda: node_agents(stack) not in ([], before))
    finish(stack, ledger, running(stack, ledger, tmp_path), tmp_path, attempts=1)


def test_a_stopped_fork_server_is_replaced_when_a_job_needs_it(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    before = wait_until("there is a fork server", lambda: fork_servers(stack))
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    job_id = running(stack, ledger, tmp_path)
    assert set(fork_servers(stack)).isdisjoint(before)
    finish(stack, ledger, job_id, tmp_path, attempts=1)
    wait_until("its lock files are gone", lambda: lock_files(stack, job_id) == [])


def test_a_keeper_and_its_fork_server_that_die_together_leave_nothing(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    job_id = running(stack, ledger, tmp_path)
    keeper = parent(ledger.pids(job_id, 1)[0])
    trees = tree(keeper)
    kill_each(parent(keeper), keeper)
    all_gone("what the keeper kept", trees)
    finish(stack, ledger, job_id, tmp_path, attempts=2)


def test_an_actor_its_keeper_and_the_fork_server_that_die_together_leave_nothing(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    job_id = running(stack, ledger, tmp_path)
    keeper = parent(ledger.pids(job_id, 1)[0])
    trees = tree(keeper)
    kill_each(actor_pids(stack, job_id)[0], parent(keeper), keeper)
    finish(stack, ledger, job_id, tmp_path, attempts=2)
    assert [pid for pid in trees if not process_gone(pid)] == []


def test_orchs_own_processes_are_not_the_first_that_the_kernel_would_kill(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    job_id = running(stack, ledger, tmp_path)
    ranks = ledger.pids(job_id, 1)
    own = [*actor_pids(stack, job_id), *node_agents(stack), *fork_servers(stack), *stack.head_pids().values()]
    scores = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (*own, *ranks.values())}
    assert {scores[pid] for pid in ranks.values()} == {1000}
    assert max(scores[pid] for pid in own) <= 0
    finish(stack, ledger, job_id, tmp_path, attempts=1)
