"""Processes that a rank depends on are killed together with those that clean up after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_actors_and_services import finish, fork_servers, running
from tests.support.ledger import Ledger
from tests.support.processes import actor_pids, all_gone, kill_each, node_agents, parent, tree
from tests.support.stack import Stack, process_gone

pytestmark = pytest.mark.rare


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
