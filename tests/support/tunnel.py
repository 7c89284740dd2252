"""A TCP port that forwards to a Unix socket, as ``ssh -L PORT:/path/of/the/socket`` does."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING

from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def tunnel_to(path: str) -> Iterator[str]:
    """Forward for the duration of the block; yields ``127.0.0.1:PORT``."""
    listener = socket.create_server(("127.0.0.1", 0))
    closing, closed = socket.socketpair()
    keeper = threading.Thread(target=_accept, args=(listener, closed, path))
    keeper.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        closing.close()
        keeper.join(timeout=PATIENCE_SECONDS)
        listener.close()
        closed.close()


def _accept(listener: socket.socket, closed: socket.socket, path: str) -> None:
    while True:
        ready, _, _ = select.select([listener, closed], [], [])
        if closed in ready:
            return
        near, _ = listener.accept()
        threading.Thread(target=_carry, args=(near, path), daemon=True).start()


def _carry(near: socket.socket, path: str) -> None:
    """Carry bytes in both directions until both ends have closed."""
    with near, socket.socket(socket.AF_UNIX) as far:
        far.connect(path)
        other = {near: far, far: near}
        while other:
            for one in select.select(list(other), [], [])[0]:
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    data = one.recv(65536)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    if data:
                        other[one].sendall(data)
                        continue
                    other[one].shutdown(socket.SHUT_WR)
                del other[one]
