"""A head that does not start leaves nothing of what was begun beside it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster.cluster import Cluster, ClusterError, ClusterOptions
from orchestrator.runtime.cluster.head_processes import Head
from orchestrator.runtime.nodes.directories import fork_socket
from orchestrator.spec.settings import Settings
from tests.support.stack import wait_until


def servers(socket: Path) -> list[int]:
    """Processes of the fork server at ``socket``, its starter among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(socket) in part for part in process.cmdline()):
                found.append(process.pid)
    return found


class Headless(Cluster):
    """A cluster whose head ends at once, after the fork server was begun."""

    async def _launch_head(self) -> Head:
        socket = fork_socket(self.node_dir("local"), sys.executable)
        await asyncio.to_thread(wait_until, "the fork server listens", socket.exists)
        assert servers(socket)
        raise ClusterError("the head did not start")


def test_the_fork_server_of_a_head_that_does_not_start_ends(tmp_path: Path) -> None:
    cluster = Headless(
        Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths, ClusterOptions(), on_lost=lambda: None
    )
    socket = fork_socket(cluster.node_dir("local"), sys.executable)
    try:
        with pytest.raises(ClusterError, match="did not start"):
            asyncio.run(asyncio.wait_for(cluster._start_head(), 30))
        assert not socket.exists()
        wait_until("the fork server ends", lambda: not servers(socket))
    finally:
        shutil.rmtree(cluster.node_dir("local").parent, ignore_errors=True)
