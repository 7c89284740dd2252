"""Fixtures that several suites share. One daemon with Ray per test session; a test that breaks one makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The session's daemon, with four simulated GPUs; leave it as you found it."""
    made = Stack(simulate_gpus=4)
    try:
        made.up()
        yield made
    finally:
        made.close()
