"""Both ends of a Unix socket check the other's user: nothing is sent to a server of another user."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.api.transport import wire
from orchestrator.api.transport.endpoint import Endpoint, may_serve
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import ForkServerClient, ForkServerStartError, start_fork_server
from tests.support.users import OTHER, as_root, as_user

VICTIM = 54321


class Impostor:
    """A server that stores what it receives; SO_PEERCRED names the user that it had when it began to listen."""

    def __init__(self, path: Path, uid: int) -> None:
        self.received = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o777)
        os.seteuid(uid)
        try:
            self._socket.listen()
        finally:
            os.seteuid(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    self.received += data

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(300)


@contextmanager
def impostor(path: Path, uid: int = OTHER) -> Iterator[Impostor]:
    server = Impostor(path, uid)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="orch-peer-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@as_root
def test_a_fork_server_of_another_user_is_sent_nothing(place: Path) -> None:
    path = place / "fork.sock"
    client = ForkServerClient(path)
    request = SpawnRequest(mode="command", target="true", cwd="/", env={"TOKEN": "hunter2"})
    null = os.open(os.devnull, os.O_RDWR)

    async def spawn() -> None:
        await client.spawn(request, stdout=null, stderr=null)

    with impostor(path) as server:
        said = as_user(VICTIM, lambda: asyncio.run(spawn()))
        assert said.startswith("ForkServerForeignError: "), said
        assert f"belongs to user {OTHER}" in said
    os.close(null)
    assert not server.received


@as_root
def test_a_fork_server_is_not_started_in_a_directory_of_another_user(place: Path) -> None:
    place.chmod(0o1777)
    theirs = place / "fork"

    def attack() -> None:
        theirs.mkdir()
        theirs.chmod(0o777)
        (theirs / "fork.log").symlink_to(place / "precious")

    as_user(OTHER, attack)
    precious = place / "precious"
    precious.write_text("kept")
    with pytest.raises(ForkServerStartError, match=f"belongs to user {OTHER}"):
        start_fork_server(sys.executable, theirs / "fork.sock", theirs / "fork.log")
    assert precious.read_text() == "kept"


def test_a_fork_server_s_log_and_lock_are_not_written_through_links(place: Path) -> None:
    place.chmod(0o700)
    for name in ("fork.log", "fork.sock.lock"):
        precious = place / "precious"
        precious.write_text("kept")
        (place / name).symlink_to(precious)
        with pytest.raises(ForkServerStartError):
            start_fork_server(sys.executable, place / "fork.sock", place / "fork.log")
        assert precious.read_text() == "kept", name
        (place / name).unlink()


@as_root
def test_a_daemon_of_another_user_in_a_place_open_to_all_is_sent_nothing(place: Path) -> None:
    path = place / "orch.sock"
    os.chown(place, OTHER, OTHER)
    with impostor(path) as server:
        said = as_user(
            VICTIM,
            lambda: wire.call(Endpoint(socket_path=str(path)), "POST", "/v1/jobs", body={"a": 1}, deadline_seconds=300),
        )
    assert said.startswith("NotPermittedError: "), said
    assert f"belongs to user {OTHER}" in said
    assert not server.received


@as_root
def test_a_daemon_that_serves_a_group_is_known_by_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the daemon's home belongs to the daemon's user, and no other user can have made it."""
    home = Path(tempfile.mkdtemp(prefix="orch-peer-", dir=Path.home()))
    try:
        os.chown(home, OTHER, OTHER)
        monkeypatch.setattr(os, "geteuid", lambda: VICTIM)
        assert may_serve(str(home / "orch.sock"), OTHER)
        assert not may_serve(str(home / "orch.sock"), OTHER - 1)
        assert may_serve(str(home / "orch.sock"), VICTIM)
        assert may_serve(str(home / "orch.sock"), 0)
    finally:
        home.rmdir()
