"""Forwards connections to local ports to a running job's node: a thread and a session for each connection."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING, Final, Self

from orchestrator.api.errors import BadRequestError, OrchError, RefusedError
from orchestrator.api.transport.session_stream import MAX_WAITING_BYTES, End
from orchestrator.api.views import TERMINAL_STATES

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.api.transport.session_stream import SessionStream
    from orchestrator.cli.console import Console

_MOST_CONNECTIONS: Final = 100


class Forwarding:
    """Forwards ports to the node of ``rank``. Errors of single connections are printed; the others continue."""

    def __init__(self, client: Client, job_id: str, rank: int, console: Console) -> None:
        self._client, self._job_id, self._rank = client, job_id, rank
        self._console = console
        self._listeners: dict[int, tuple[socket.socket, int]] = {}
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._version: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener, _remote in self._listeners.values():
            listener.close()

    def listen(self, address: str, local: int, remote: int) -> str:
        """Listen on a port for the node's ``remote``; return ``host:port``. Raises BadRequestError, RefusedError."""
        try:
            family, kind, proto, _, where = socket.getaddrinfo(address, local, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise BadRequestError(f"--address {address}: {error.strerror}", hint="write one like 127.0.0.1") from error
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"cannot listen on {address}:{local}: {error.strerror}", hint=f"another port here: 0:{remote} takes any"
            ) from error
        self._listeners[listener.fileno()] = (listener, remote)
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self) -> None:
        """Accept connections until the job has ended."""
        poll = select.poll()
        for descriptor in self._listeners:
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = poll.poll(_LOOK_SECONDS * 1000)
            for descriptor, _ in ready:
                listener, remote = self._listeners[descriptor]
                self._take(listener, remote)
            if not ready and self._has_ended():
                return

    def _has_ended(self) -> bool:
        try:
            job = self._client.job(self._job_id)
        except OrchError:  # the daemon restarts: each connection reports its own error
            return False
        if job.state in TERMINAL_STATES:
            self._console.note(f"{job.id} is {job.state}")
            return True
        return False

    def _take(self, listener: socket.socket, remote: int) -> None:
        connection, _ = listener.accept()
        if not self._room.acquire(blocking=False):
            connection.close()
            self._console.print_error(f"orch: a connection was refused: {_MOST_CONNECTIONS} are open")
            return
        threading.Thread(target=self._serve, args=(connection, remote), daemon=True).start()

    def _serve(self, connection: socket.socket, remote: int) -> None:
        try:
            with (
                connection,
                contextlib.closing(self._client.session(self._job_id, rank=self._rank, port=remote)) as stream,
            ):
                carry(connection, stream)
        except OrchError as error:
            self._console.print_error(f"orch: {error.message}" + (f" ({error.hint})" if error.hint else ""))
        except OSError:
            pass  # the local program has closed its connection
        finally:
            self._room.release()


def carry(connection: socket.socket, stream: SessionStream) -> None:
    """Pass bytes on in both directions until one side closes; each side may close its half first."""
    reading = True
    while True:
        for found in stream.receive():
            if isinstance(found, End):
                return
            connection.sendall(found.data)
        poll = select.poll()
        poll.register(stream, select.POLLIN | (select.POLLOUT if stream.waiting else 0))
        if reading and stream.waiting < MAX_WAITING_BYTES:
            poll.register(connection, select.POLLIN)
        ready = dict(poll.poll(0 if stream.ready else _LOOK_SECONDS * 1000))
        if stream.waiting:
            stream.flush()
        if connection.fileno() in ready:
            data = connection.recv(_READ_BYTES)
            reading = bool(data)
            if data:
                stream.write(data)
            else:
                stream.end_input()
