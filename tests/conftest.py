"""Fixtures that several suites share. One daemon with Ray per test session; a test that breaks one makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack

LONG = (
    "test_daemon_kills.py",
    "test_prometheus_stack.py",
    "test_ray_cluster.py",
    "test_wheel.py",
    "test_trainer_processes.py",
    "test_trainer_examples.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take a minute or more come first: begun last, they would leave the other process with nothing to do."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The session's daemon, with four simulated GPUs; leave it as you found it."""
    made = Stack(simulate_gpus=4)
    try:
        made.up()
        yield made
    finally:
        made.close()
