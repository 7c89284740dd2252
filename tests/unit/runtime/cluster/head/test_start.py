"""A head that does not start leaves no process that was started beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import psutil
import pytest
from orchestrator.runtime.cluster.agents import AgentMaker
from orchestrator.runtime.cluster.head.embedded import EmbeddedHead
from orchestrator.runtime.cluster.head.processes import Head, write_head
from orchestrator.runtime.cluster.head.start import ClusterError
from orchestrator.runtime.cluster.site import Site

from orchestrator.durable_files import write_whole
from orchestrator.spec.settings import Settings
from orchestrator.spec.token_file import TokenFileError
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


@pytest.mark.parametrize("torn", [b"", b"\0" * 64, b"0123abc"], ids=["empty", "zeros", "half"])
def test_a_torn_token_is_made_anew_where_no_head_can_be_using_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    site = Site(Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths, None)
    path = site.paths.ray / "token"
    path.parent.mkdir()
    write_whole(path, torn)
    head = EmbeddedHead(site, num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    own = psutil.Process()
    write_head(
        site.head_file, Head(gcs_address="127.0.0.1:1", session_dir="s", pids={"raylet": (own.pid, own.create_time())})
    )
    if torn.strip(b"\0"):
        assert head._keep_token() == torn.decode(), "a head that runs has it"
    else:
        with contextlib.suppress(TokenFileError):
            head._keep_token()
        assert path.read_bytes() == torn
    site.head_file.unlink()
    token = head._keep_token()
    assert (len(token), path.stat().st_mode & 0o777) == (64, 0o600)
    assert head._keep_token() == token, "a whole one stays"


@pytest.mark.parametrize("torn", [None, "", "0123"], ids=["none", "empty", "half"])
def test_a_torn_proof_of_the_shared_home_is_made_anew(tmp_path: Path, torn: str | None) -> None:
    site = Site(Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths, None)
    if torn is not None:
        site.home_token.parent.mkdir()
        site.home_token.write_text(torn)
    for _ in range(2):
        AgentMaker(site, 0).keep_home_token()
        assert len(site.home_token.read_text()) == 32
