"""A head that does not start leaves no process that was started beside it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster.head.embedded import EmbeddedHead
from orchestrator.runtime.cluster.head.processes import Head
from orchestrator.runtime.cluster.head.start import ClusterError
from orchestrator.runtime.cluster.site import Site
from orchestrator.spec.settings import Settings
from tests.support.stack import wait_until


def servers(socket: Path) -> list[int]:
    """Return the processes of the fork server at ``socket``, its starter among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(socket) in part for part in process.cmdline()):
                found.append(process.pid)
    return found


class Headless(EmbeddedHead):
    """A head that fails to start after its fork server has started."""

    async def _launch(self) -> Head:
        socket = self._site.fork_socket
        await asyncio.to_thread(wait_until, "the fork server listens", socket.exists)
        assert servers(socket)
        raise ClusterError("the head did not start")


def test_the_fork_server_of_a_head_that_does_not_start_ends(tmp_path: Path) -> None:
    site = Site(Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths, None)
    head = Headless(site, num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    try:
        with pytest.raises(ClusterError, match="did not start"):
            asyncio.run(asyncio.wait_for(head.start(), 300))
        assert not site.fork_socket.exists()
        wait_until("the fork server ends", lambda: not servers(site.fork_socket))
    finally:
        shutil.rmtree(site.node_dir("local").parent, ignore_errors=True)
