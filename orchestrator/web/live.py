"""Keeps open pages current: parts of a page as HTML, rendered once for all browsers that show them.

A channel renders only while it has viewers: after a change, at most once in ``pace_seconds``, and at the latest after
``idle_seconds``, because ages and loads of GPUs change. A viewer gets whole parts, those that have changed; a slow
viewer gets the newest of each part and never a backlog.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator.api.errors import OrchError
from orchestrator.runtime.pools import working_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

log = structlog.get_logger("orch.web")

PACE_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 5.0
HEARTBEAT_SECONDS: Final = 10.0
HEARTBEAT: Final = b": \n\n"


class Viewer:
    """Parts that one browser has not received yet."""

    def __init__(self) -> None:
        self.pending: dict[str, str] = {}
        self.ended = False
        self.woken = asyncio.Event()

    def give(self, parts: Mapping[str, str]) -> None:
        """Add parts; a newer one replaces an older."""
        self.pending.update(parts)
        self.woken.set()

    def end(self) -> None:
        """End the stream; the browser connects again."""
        self.ended = True
        self.woken.set()


class Channel:
    """One rendering and its viewers.

    ``version`` returns the change counter. ``wait`` returns once the counter differs from its first argument by a
    change of what is shown, or after the seconds of its second.
    """

    def __init__(
        self,
        render: Callable[[], Awaitable[Mapping[str, str]]],
        version: Callable[[], int],
        wait: Callable[[int, float], Awaitable[object]],
        *,
        pace_seconds: float = PACE_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._render = render
        self._version = version
        self._wait = wait
        self._pace_seconds = pace_seconds
        self._idle_seconds = idle_seconds
        self._viewers: set[Viewer] = set()
        self._latest: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the channel has a viewer."""
        return bool(self._viewers)

    def join(self) -> Viewer:
        """Add a viewer, which gets everything first."""
        viewer = Viewer()
        if self._latest:
            viewer.give(self._latest)
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            with working_for(None):  # one rendering for all viewers
                self._task = asyncio.create_task(self._run(), name="orch-page")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove the viewer; the last one ends the rendering."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._latest = {}

    async def _run(self) -> None:
        try:
            while True:
                version = self._version()  # read first: a change in between is then shown, not lost
                parts = await self._render()
                changed = {name: html for name, html in parts.items() if self._latest.get(name) != html}
                self._latest = dict(parts)
                for viewer in self._viewers if changed else ():
                    viewer.give(changed)
                await asyncio.sleep(self._pace_seconds)
                await self._wait(version, self._idle_seconds)
        except OrchError:
            self._end()  # the job was removed
        except Exception:
            log.exception("web.rendering_failed")
            self._end()

    def _end(self) -> None:
        self._latest = {}
        for viewer in self._viewers:
            viewer.end()


class Channels:
    """Channels by content; those without viewers are dropped."""

    def __init__(self) -> None:
        self._channels: dict[tuple[object, ...], Channel] = {}

    def channel(self, key: tuple[object, ...], make: Callable[[], Channel]) -> Channel:
        """Return the channel of ``key``, created if there is none."""
        self._channels = {known: channel for known, channel in self._channels.items() if channel.is_watched}
        return self._channels.setdefault(key, make())


async def stream(
    channel: Channel, closing: asyncio.Event, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events with the parts of ``channel``, until the daemon stops or the browser disconnects."""
    viewer = channel.join()
    stopped = asyncio.ensure_future(closing.wait())
    woken = asyncio.ensure_future(viewer.woken.wait())
    try:
        while not stopped.done() and not viewer.ended:
            await asyncio.wait([woken, stopped], timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                viewer.woken.clear()
                woken = asyncio.ensure_future(viewer.woken.wait())
            if not viewer.pending:
                yield HEARTBEAT
                continue
            parts, viewer.pending = viewer.pending, {}
            yield event("parts", parts)
    finally:
        woken.cancel()
        stopped.cancel()
        channel.leave(viewer)


async def follow(
    batches: AsyncGenerator[Sequence[Any], None],
    closing: asyncio.Event,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events of a log: ``begin``, then ``lines``, and ``end`` if it is complete."""
    stopped: asyncio.Future[Any] = asyncio.ensure_future(closing.wait())
    following: asyncio.Future[Any] = asyncio.ensure_future(anext(batches))
    try:
        yield event("begin", {})
        while not stopped.done():
            done, _ = await asyncio.wait(
                [following, stopped], timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if following in done:
                yield event("lines", following.result())
                following = asyncio.ensure_future(anext(batches))
            elif not done:
                yield HEARTBEAT
    except StopAsyncIteration:
        yield event("end", {})
    finally:
        for task in (following, stopped):
            task.cancel()
        await asyncio.gather(following, stopped, return_exceptions=True)  # a generator cannot be closed while it runs
        await batches.aclose()


def event(kind: str, value: object) -> bytes:
    """Return one server-sent event; JSON has no line break."""
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
