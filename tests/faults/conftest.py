"""What the fault tests share: a ledger for each test, a seed that is told, and a daemon that may be broken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def breakable() -> Iterator[Stack]:
    """A daemon of this module's own, which its tests may kill, and must leave running."""
    made = Stack()
    try:
        made.up()
        yield made
    finally:
        made.close()
