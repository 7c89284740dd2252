"""Long requests: held ones and streamed logs, which must end when the client or the daemon disconnects."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.api.errors import DaemonStoppingError, OrchError
from orchestrator.api.protocol import LOG_END_KEY, LOG_ERROR_KEY, STREAM_HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Sequence

    from starlette.requests import Request

    from orchestrator.api.views import LogLine

Result = TypeVar("Result")


async def until_closing(work: Coroutine[Any, Any, Result], closing: asyncio.Event, request: Request) -> Result:
    """Return the result of ``work``. Raises DaemonStoppingError if the daemon stops or the client disconnects first."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(closing.wait()), asyncio.ensure_future(_disconnect(request))]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DaemonStoppingError("the daemon is stopping")
        return task.result()
    finally:
        await _cancel(task, *others)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def log_stream(
    batches: AsyncGenerator[Sequence[LogLine], None],
    closing: asyncio.Event,
    heartbeat_seconds: float = STREAM_HEARTBEAT_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """Yield the lines as JSON lines; empty lines while there is nothing new; a last line that marks completeness.

    When the daemon stops, the stream ends without that last line, and the client repeats the request later.
    """
    stopped: asyncio.Future[Any] = asyncio.ensure_future(closing.wait())
    following: asyncio.Future[Any] = asyncio.ensure_future(anext(batches))
    try:
        async with aclosing(batches):
            try:
                while not stopped.done():
                    done, _ = await asyncio.wait(
                        [following, stopped], timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED
                    )
                    if following in done:
                        yield b"".join(_line(line.to_json()) for line in following.result())
                        following = asyncio.ensure_future(anext(batches))
                    elif not done:
                        yield b"\n"
            except StopAsyncIteration:
                yield _line({LOG_END_KEY: "complete"})
            except OrchError as error:
                yield _line({LOG_ERROR_KEY: error.to_json()})
            finally:
                await _cancel(following)  # a generator cannot be closed while it runs
    finally:
        with suppress(asyncio.CancelledError):
            await _cancel(stopped)


def _line(value: dict[str, Any]) -> bytes:
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
    )
