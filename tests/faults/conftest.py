"""Fixtures of the fault tests: a ledger for each test, and a random generator whose seed is printed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Return an empty ledger."""
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def dice() -> random.Random:
    """Return a generator of random moments and victims; pytest-randomly prints the seed that repeats them."""
    return random.Random(random.getrandbits(64))
