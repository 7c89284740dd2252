"""Listeners and their connections: deadlines, caps, held requests, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, RefusedError
from orchestrator.api.server import listeners as serve
from orchestrator.api.server.listeners import (
    GUEST_BURST,
    Acceptor,
    Guests,
    address_of,
    bind_tcp,
    host_names,
    is_loopback,
)
from orchestrator.api.server.testing import serve_fake
from orchestrator.daemon.requests.files import LeftFiles
from orchestrator.runtime.pools import Pool
from tests.support.stack import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    wait_until("so many requests are held", lambda: served.do(lambda service: len(service._waiters)) == 2)
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
        wait_until("so many requests are held", lambda: served.do(lambda service: len(service._waiters)) == 1)
    wait_until("so many requests are held", lambda: served.do(lambda service: len(service._waiters)) == 0)


@pytest.mark.parametrize("said", [b"", b"GET /api/v1/jobs HTTP/1.1\r\nX-Slow: "])
def test_a_connection_that_never_finishes_its_head_is_closed(tmp_path: Path, said: bytes) -> None:
    quick = serve.Deadlines(head_seconds=0.1)
    with (
        serve_fake(tmp_path, owner_uid=os.getuid(), deadlines=quick) as served,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(said)
        assert sock.recv(100) == b""


def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid(), body_seconds=0.1) as served, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(
            b"POST /api/v1/prune HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 30\r\n\r\n{"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 504")


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


KEPT = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(path)
        yield sock


def read_answer(sock: socket.socket) -> bytes:
    """Read one whole answer that has a length; return its head."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < length:
        body += sock.recv(65536)
    return head


def test_requests_in_time_are_answered_on_one_connection(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid()) as served, connected(served.endpoint.socket_path) as sock:
        for _ in range(5):
            sock.sendall(KEPT)
            sock.sendall(b"\r\n")
            assert read_answer(sock).startswith(b"HTTP/1.1 200")


class Echo(asyncio.Protocol):
    """Protocol that sends one byte and reports the end of its connection."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"!")

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()


class Listener(socket.socket):
    """A listening socket that can be out of descriptors."""

    exhausted = False
    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def listener(path: Path) -> Listener:
    made = Listener(socket.AF_UNIX)
    made.bind(str(path / "s"))
    made.listen(16)
    return made


def test_connections_over_the_cap_wait_for_room(tmp_path: Path) -> None:
    async def serve_two_at_once() -> list[OSError | None]:
        pauses: list[OSError | None] = []
        paused, taken = asyncio.Event(), 0

        def on_pause(error: OSError | None) -> None:
            pauses.append(error)
            paused.set()

        def make(release: Callable[[], None]) -> Echo:
            nonlocal taken
            taken += 1
            return Echo(release)

        served = Acceptor(listener(tmp_path), make, cap=2, on_pause=on_pause)
        opened = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(3)]
        assert [await reader.read(1) for reader, _ in opened[:2]] == [b"!", b"!"]
        async with asyncio.timeout(300):
            await paused.wait()  # the third connection is pending and is not accepted
            assert taken == 2
            opened[0][1].close()
            assert await opened[2][0].read(1) == b"!"
        for _, writer in opened:
            writer.close()
        served.close()
        await served.wait_closed()
        return pauses

    assert set(asyncio.run(serve_two_at_once())) == {None}


def test_without_descriptors_it_pauses_and_goes_on(tmp_path: Path) -> None:
    async def run_out() -> tuple[int, list[OSError | None]]:
        pauses: list[OSError | None] = []
        often = asyncio.Event()

        def paused(error: OSError | None) -> None:
            pauses.append(error)
            if len(pauses) == 3:
                often.set()

        sock = listener(tmp_path)
        sock.exhausted = True
        served = Acceptor(sock, Echo, cap=10, on_pause=paused, retry_seconds=0.2)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        await often.wait()
        tries = sock.tries
        sock.exhausted = False
        assert await asyncio.wait_for(reader.read(1), 300) == b"!"
        writer.close()
        served.close()
        await served.wait_closed()
        return tries, pauses

    tries, pauses = asyncio.run(run_out())
    assert tries == len(pauses) == 3, "one try for each pause"
    assert all(error is not None and error.errno == errno.EMFILE for error in pauses)


LIMIT = """
import resource
from orchestrator.api.server.listeners import connection_cap, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE), connection_cap())
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(2048, 2048) 512", "(2048, 2048)"]


def test_work_for_a_request_ends_when_its_client_goes(tmp_path: Path) -> None:
    """Two abandoned digests of a file without end take no thread from anyone."""
    with serve_fake(tmp_path, owner_uid=os.getuid()) as served, closing(Pool("files", 2)) as pool:
        job = served.do(lambda service: service.add())
        (tmp_path / "out").mkdir()
        with (tmp_path / "out" / "large").open("wb") as file:
            file.truncate(2**42)  # sparse: it takes no room, and an hour to read
        served.do(lambda service: service.files_of.update({job.id: LeftFiles(job.id, {"out": tmp_path / "out"}, pool)}))
        for request in (f"jobs/{job.id}/files/digest?path=out/large",) * 2:
            with connected(served.endpoint.socket_path) as sock:
                sock.sendall(f"GET /api/v1/{request} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                wait_until("the file is read", lambda: pool.busy)
            wait_until("the thread is free", lambda: not pool.busy)
