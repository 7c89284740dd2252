"""A connection to a TCP port of a running rank's node, such as TensorBoard or Jupyter."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from orchestrator.runtime.ranks.sessions.messages import (
    READ_BYTES,
    EndReason,
    PortRequest,
    SessionEnd,
    SessionOutput,
    SessionRefusedError,
)

_CONNECT_SECONDS: Final = 5.0


class PortSession:
    """Bytes from and to an open connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._reason: EndReason | None = None
        self._closing = asyncio.Event()

    @classmethod
    async def start(cls, request: PortRequest) -> PortSession:
        """Connect. Raises SessionRefusedError where nothing listens."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection("localhost", request.port, limit=READ_BYTES)
        except OSError as error:  # TimeoutError is one
            raise SessionRefusedError(
                f"nothing answers on port {request.port} of the rank's node ({error.strerror or 'no answer in time'})",
                "does the job listen there, on localhost, and on the node of this rank (--rank)?",
            ) from error
        return cls(reader, writer)

    async def read(self, seconds: float) -> SessionOutput:
        """Return received bytes; wait for at most ``seconds`` until there are some."""
        reading = asyncio.ensure_future(self._reader.read(READ_BYTES))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait([reading, closing], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._reason is not None:
                return SessionOutput(end=SessionEnd(reason=self._reason))
            if not reading.done():
                return SessionOutput()  # a cancelled StreamReader.read loses nothing
            data = b"" if reading.exception() else reading.result()
            return SessionOutput(stdout=data, end=None if data else SessionEnd(reason=EndReason.EXITED))
        finally:
            for task in (reading, closing):
                task.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)

    async def write(self, data: bytes) -> None:
        """Send bytes; return when the other side takes them."""
        with contextlib.suppress(OSError):  # the reader gets the end
            self._writer.write(data)
            await self._writer.drain()

    async def end_input(self) -> None:
        """End this side's stream; the other side may still answer."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def resize(self, rows: int, columns: int) -> None:
        """Do nothing: there is no terminal."""

    def signal(self, number: int) -> None:
        """Do nothing: there is no process."""

    async def close(self, reason: EndReason) -> None:
        """Close the connection."""
        self._reason = self._reason or reason
        self._closing.set()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._writer.wait_closed()
