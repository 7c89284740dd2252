"""Limits for clients: deadlines for heads and bodies, a cap of connections, and no busy loop without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from orchestrator.api.server.listeners import Acceptor, Deadlines
from orchestrator.api.server.testing import serve_fake
from orchestrator.daemon.requests.files import LeftFiles
from orchestrator.runtime.pools import Pool
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEPT = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        yield sock


@contextlib.contextmanager
def serving(directory: Path, **seconds: float) -> Iterator[str]:
    """Serve a daemon's control socket with these deadlines; yield its path."""
    with serve_fake(directory, owner_uid=os.getuid(), deadlines=Deadlines(**seconds)) as served:
        yield served.endpoint.socket_path


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


def is_closed(sock: socket.socket) -> bool:
    """Return whether the server closes the connection; raise TimeoutError if it does not."""
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(65536) == b""
    return True


def test_the_next_head_on_a_kept_connection_has_a_deadline_too(tmp_path: Path) -> None:
    with serving(tmp_path, head_seconds=0.3) as path, connected(path) as sock:
        sock.sendall(KEPT + b"\r\n")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /api/v1/health HTTP/1.1\r\nX-Slow: ")
        assert is_closed(sock)


def test_a_body_that_no_route_reads_has_a_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, body_seconds=0.3) as path, connected(path) as sock:
        sock.sendall(KEPT + b"Content-Length: 100\r\n\r\nx")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        sock.sendall(b"y")
        assert is_closed(sock)


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
