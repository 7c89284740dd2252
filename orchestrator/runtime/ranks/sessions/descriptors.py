"""Reads and writes a session's descriptors without blocking, with bounded buffers: a slow reader delays only its writer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.sessions.messages import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 64 * 1024


class OutputEnd:
    """Collects the output of ``descriptor``, which it owns; ``woken`` is called at new output, and at its end."""

    def __init__(self, descriptor: int, woken: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._woken = woken
        self._data = bytearray()
        self._reading = False
        self._resume()

    @property
    def over(self) -> bool:
        """Whether all output has arrived."""
        return self._descriptor is None

    def __bool__(self) -> bool:
        return bool(self._data)

    def take(self) -> bytes:
        """Return the collected output once; the writer may continue."""
        data = bytes(self._data)
        self._data.clear()
        self._resume()
        return data

    def close(self) -> None:
        """Stop reading."""
        self._pause()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._woken()

    def _resume(self) -> None:
        if self._descriptor is not None and not self._reading:
            asyncio.get_running_loop().add_reader(self._descriptor, self._ready)
            self._reading = True

    def _pause(self) -> None:
        if self._descriptor is not None and self._reading:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._reading = False

    def _ready(self) -> None:
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose programs have ended
            data = b""
        if not data:
            self.close()
            return
        self._data += data
        if len(self._data) >= READ_BYTES:
            self._pause()
        self._woken()


class InputEnd:
    """Writes to ``descriptor``, which it owns, as fast as the other side reads. One writer at a time."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._waiting: asyncio.Future[None] | None = None

    @property
    def descriptor(self) -> int | None:
        """The descriptor; None once it is closed."""
        return self._descriptor

    async def write(self, data: bytes) -> None:
        """Write all of ``data``; drop what a closed reader does not take."""
        rest = memoryview(data)
        while rest and self._descriptor is not None:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                await self._writable(self._descriptor)
            except OSError:
                self.close()

    def close(self) -> None:
        """Send end of file to the reader."""
        if self._descriptor is None:
            return
        if self._waiting is not None:
            asyncio.get_running_loop().remove_writer(self._descriptor)
            with contextlib.suppress(asyncio.InvalidStateError):
                self._waiting.set_result(None)
        os.close(self._descriptor)
        self._descriptor = None

    async def _writable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        loop.add_writer(descriptor, _resolve, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            if self._descriptor is not None:
                loop.remove_writer(descriptor)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
