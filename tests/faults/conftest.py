"""What the fault tests share: a ledger for each test, a seed that is told, and a daemon that may be broken."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.api.errors import OrchError
from tests.support.ledger import Ledger
from tests.support.stack import Stack


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """An empty ledger."""
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def dice() -> random.Random:
    """Random moments and victims; pytest-randomly prints the seed that repeats them."""
    return random.Random(random.getrandbits(64))


@pytest.fixture(scope="session")
def shared_breakable() -> Iterator[Stack]:
    made = Stack()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def breakable(shared_breakable: Stack) -> Iterator[Stack]:
    """A daemon with a Ray that tests may kill; what one test has left broken or running is no matter of the next."""
    shared_breakable.up()
    yield shared_breakable
    with contextlib.suppress(OrchError):
        for job in shared_breakable.client.jobs().jobs:
            if not job.is_terminal:
                shared_breakable.client.cancel(job.id)
