"""Listeners: TCP sockets and host names, and a shutdown that waits for no client."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, RefusedError
from orchestrator.api.server import listeners as serve
from orchestrator.api.server.listeners import GUEST_BURST, Guests, address_of, bind_tcp, host_names, is_loopback
from orchestrator.api.server.testing import serve_fake
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake


def test_tcp_listeners() -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as sock:
        host, _, port = address_of(sock).rpartition(":")
        assert host == "127.0.0.1"
        with pytest.raises(RefusedError, match="cannot listen"):
            bind_tcp("127.0.0.1", int(port))
        with pytest.raises(RefusedError) as refused:
            bind_tcp("127.0.0.1", int(port), option="--read-listen")
        assert refused.value.hint == "`--read-listen 127.0.0.1:0` takes any free port"
    with pytest.raises(BadRequestError, match="not an address"):
        bind_tcp("no such host.", 0)


def test_names_of_a_listener() -> None:
    assert "gpu-box" in host_names("GPU-box")
    assert "[fe80::1]" in host_names("fe80::1")
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.7")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("gpu-box")


def test_stopping_ends_held_requests_and_followed_logs(served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    client = Client(served.endpoint)
    failures: list[BaseException] = []

    def hold(ask: object) -> None:
        try:
            ask()  # type: ignore[operator]
        except DaemonUnreachableError as error:
            failures.append(error)

    version = client.wait_change(None)
    threads = [
        threading.Thread(target=hold, args=(lambda: client.wait_change(version, timeout_seconds=600),)),
        threading.Thread(target=hold, args=(lambda: list(client.logs(job.id, follow=True)),)),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 2)
    served.stop()
    for thread in threads:
        thread.join(timeout=PATIENCE_SECONDS)
        assert not thread.is_alive(), "it is held no longer"
    assert len(failures) == 2
    served.start()


def test_a_client_that_leaves_frees_what_it_held(served: ServedFake) -> None:
    served.do(lambda service: service.add())
    version = Client(served.endpoint).wait_change(None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(served.endpoint.socket_path)
        sock.sendall(f"GET /api/v1/changes?after={version} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: served.do(lambda service: len(service._waiters)) == 1)
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 0)


def test_a_follower_that_leaves_frees_what_it_held(served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    served.do(lambda service: service.write(job.id, "one"))
    lines = Client(served.endpoint).logs(job.id, follow=True)
    assert next(lines).text == "one"
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 1)
    lines.close()  # type: ignore[attr-defined]
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 0)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 300
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"GET /api/v1/jobs HTTP/1.1\r\nX-Slow: "])
def test_a_connection_that_never_finishes_its_head_is_closed(tmp_path: Path, said: bytes) -> None:
    quick = serve.Deadlines(head_seconds=0.1)
    with (
        serve_fake(tmp_path, owner_uid=os.getuid(), deadlines=quick) as served,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.settimeout(60)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(said)
        assert sock.recv(100) == b""


def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid(), body_seconds=0.1) as served, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(
            b"POST /api/v1/prune HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 30\r\n\r\n{"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 504")


def test_it_can_be_stopped_and_started_again(served: ServedFake) -> None:
    served.stop()
    with pytest.raises(DaemonUnreachableError):
        Client(served.endpoint).health()
    served.start()
    assert Client(served.endpoint).health().ready


def test_connections_of_each_guest_are_bounded_and_those_of_the_owner_are_not() -> None:
    class Connection:
        """A connection, and the protocol that serves it."""

        family = socket.AF_UNIX

        def __init__(self, uid: int) -> None:
            self.uid = uid
            self.released = 0

        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("3i", 1, self.uid, 1)

        def release(self) -> None:
            self.released += 1

    def admit(uid: int) -> Connection | None:
        made: Any = Connection(uid)
        if not guests.admit(made):
            return None
        guests.count(uid, made)
        return cast("Connection", made)

    now = 0.0
    guests = Guests(2, owner_uid=1, clock=lambda: now)
    first = admit(7)
    assert first is not None
    assert [admit(uid) is not None for uid in (7, 7, 8)] == [True, False, True]
    assert all(admit(1) for _ in range(GUEST_BURST + 1))
    first.release()
    assert first.released == 1
    assert admit(7) is not None
    assert admit(7) is None
    # and those that end at once are bounded by their rate
    for _ in range(GUEST_BURST):
        short = admit(9)
        assert short is not None
        short.release()
    assert admit(9) is None
    now = 1.0
    again = [admit(9) for _ in range(2)]
    assert all(again)
