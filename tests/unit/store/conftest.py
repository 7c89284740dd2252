"""Stores to test, in a directory of the test's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from orchestrator.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from orchestrator.store.store import Store

T = TypeVar("T")


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """Yield a function that runs a coroutine on the test's loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the test's store."""
    return tmp_path / "orch.db"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., Store]]:
    """Yield a function that opens the store at ``path``; stores that the test leaves open are closed."""
    opened: list[Store] = []

    def opening(where: Path = path, **options: Any) -> Store:
        store = Store.open(where, **{"reserve": None, "min_free_bytes": 0, **options})
        opened.append(store)
        return store

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    """Return a new store."""
    return open_store()
