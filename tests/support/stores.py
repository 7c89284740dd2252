"""Stores for tests that need no disk of their own: on a file system in memory, removed after the test.

They read and write in the caller's thread, so that a test has the same course each time, like a store that answers at once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.store.store import Store, _Request

S = TypeVar("S", bound=Store)

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Parent directory of the homes of stores; None: that of temporary files."""

_open: list[tuple[Store, Path]] = []


def in_this_thread(store: S) -> S:
    """Make the store read and write in the thread of its caller."""
    ask, do, writer = store._ask, store._writer.do, store._writer

    async def ask_now(pool: Any, question: Callable[[], Any]) -> Any:
        return await ask(pool, question) if store._closed else question()

    async def do_now(work: Callable[[Any], Any], *, essential: bool = True, shrinks: bool = False) -> Any:
        if writer._closed:
            return await do(work)
        loop = asyncio.get_running_loop()
        request = _Request(work, essential, shrinks, loop, loop.create_future())
        writer._commit([request])
        if request.error is not None:
            raise request.error
        return request.result

    store._ask = ask_now  # type: ignore[method-assign]
    writer.do = do_now  # type: ignore[method-assign]
    return store


def new_store(kind: type[S] = Store) -> S:  # type: ignore[assignment]  # the default of the bound
    """Return a new store in a directory of its own; ``close_all`` closes and removes it."""
    home = Path(tempfile.mkdtemp(prefix="orch-store-", dir=IN_MEMORY))
    store = in_this_thread(kind.open(home / "store.sqlite3", reserve=None, min_free_bytes=0))
    _open.append((store, home))
    return store


def close_all() -> None:
    """Close the stores that the test has opened, and remove their files."""
    while _open:
        store, home = _open.pop()
        store.close()
        shutil.rmtree(home)
