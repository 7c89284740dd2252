"""WebSocket connections of sessions: uvicorn's protocol on wsproto, within the listener's bounds."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message that a client may send."""

SILENT_PEER_MILLISECONDS: Final = 60_000
"""A peer over TCP that acknowledges nothing for this time is lost; the daemon sends data every few seconds."""


class WebSocketSession(WSProtocol):
    """WebSocket protocol of a session that calls ``release`` when the connection is lost."""

    def __init__(self, *, release: Callable[[], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._release = release

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's declaration
        """Set the timeout by which the kernel detects that a peer over TCP is lost."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MILLISECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another connection."""
        super().connection_lost(exc)
        self._release()
