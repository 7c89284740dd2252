"""The tree of processes in `orch top`, against real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli.top.frames import ProcessLine, ProcessTree
from tests.unit.gpu.support import wait_for
from tests.unit.gpu.test_top import row

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def rank() -> Iterator[int]:
    """Start a process with one child, as a rank with a data loader; yield its process id."""
    with subprocess.Popen([sys.executable, "-c", LOADER], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


def test_children_follow_their_parent_and_ranks_are_named(rank: int) -> None:
    tree = ProcessTree("node1")
    rows = (row(0, processes=({"pid": rank, "memory_bytes": 8 << 30},)),)

    def looked() -> list[ProcessLine]:
        lines = list(tree.lines(rows, {rank: "digits-k3f9q2:0"}))
        return lines if lines[-1].pid != rank and lines[-1].command else []

    lines = wait_for(looked, "the child to be there")
    pids = [line.pid for line in lines]
    assert os.getpid() in pids, "the parent stands above"
    here = pids.index(rank)
    assert pids.index(os.getpid()) < here
    parent, child = lines[here], lines[here + 1]
    assert (parent.owner, parent.gpu, parent.memory_bytes) == ("digits-k3f9q2:0", 0, 8 << 30)
    assert parent.gpu_share == pytest.approx(0.1)
    assert parent.utilization == 0.0, "alone on the GPU: its load is the process's"
    assert (child.gpu, child.owner) == (None, "")
    assert len(child.branch) > len(parent.branch)
    assert child.branch.endswith("└─ ")
    assert child.resident_bytes is not None
    assert child.cpu_percent is not None


def test_a_rank_without_a_gpu_is_shown_and_other_nodes_come_after(rank: int) -> None:
    tree = ProcessTree("node1")
    away = row(3, node="node2", processes=({"pid": rank, "memory_bytes": None},))
    lines = tree.lines((away,), {rank: "cpu-000001:0"})
    here = next(line for line in lines if line.pid == rank and line.node == "node1")
    assert (here.gpu, here.owner) == (None, "cpu-000001:0")
    last = lines[-1]
    assert (last.node, last.gpu, last.command) == ("node2", 3, ""), "another node's process has no host values here"


def test_a_process_on_two_gpus_has_a_line_for_each_and_one_that_ended_has_one() -> None:
    tree = ProcessTree("node1")
    mine = os.getpid()
    rows = tuple(
        row(i, processes=({"pid": mine, "memory_bytes": 1}, {"pid": 2**30, "memory_bytes": 2})) for i in (0, 1)
    )
    lines = tree.lines(rows, {})
    assert [line.gpu for line in lines if line.pid == mine] == [0, 1]
    gone = [line for line in lines if line.pid == 2**30]
    assert [(line.gpu, line.command, line.utilization) for line in gone] == [(0, "", None), (1, "", None)]
