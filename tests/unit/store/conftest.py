"""Stores to test: both kinds for the contract, and SQLite ones in a directory of the test's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from orchestrator.store.memory import MemoryStore
from orchestrator.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from orchestrator.store.port import Store

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
def open_store(path: Path) -> Iterator[Callable[..., SqliteStore]]:
    """Yield a function that opens the store at ``path``; stores that the test leaves open are closed."""
    opened: list[SqliteStore] = []

    def opening(where: Path = path, **options: Any) -> SqliteStore:
        store = SqliteStore.open(where, **{"reserve": None, "min_free_bytes": 0, **options})
        opened.append(store)
        return store

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def sqlite_store(open_store: Callable[..., SqliteStore]) -> SqliteStore:
    """Return a new SQLite store."""
    return open_store()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest) -> Store:
    """Return a new store of either kind."""
    if request.param == "memory":
        return MemoryStore()
    found: SqliteStore = request.getfixturevalue("sqlite_store")
    return found
