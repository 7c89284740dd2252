"""What the fault tests share: a ledger for each test, and a seed that is told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """An empty ledger."""
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def dice() -> random.Random:
    """Random moments and victims; pytest-randomly prints the seed that repeats them."""
    return random.Random(random.getrandbits(64))
