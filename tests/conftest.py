"""Fixtures that several suites share: one daemon with Ray per test session, and one that may be broken.

Files that use the same of them go to the same process of pytest-xdist (``--dist loadgroup``), so that there is one of each.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import pytest

from orchestrator.api.errors import OrchError
from tests.support.stack import Stack

LONG = (
    "test_prometheus_stack.py",
    "test_ray_cluster.py",
    "test_wheel.py",
    "test_trainer_processes.py",
    "test_torchrun_parity.py",
)
SHARED = ("breakable", "stack")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Group files by the daemon that they share; what takes a minute or more comes first, so that nothing long is last."""
    used: dict[str, set[str]] = defaultdict(set)
    for item in items:
        used[item.path.name].update(getattr(item, "fixturenames", ()))
    order: dict[str, int] = {}
    for item in items:
        name = item.path.name
        shared = next((fixture for fixture in SHARED if fixture in used[name]), None)
        item.add_marker(pytest.mark.xdist_group(shared or str(item.path)))
        order[name] = 0 if shared == "breakable" else 1 if name in LONG else 2 if shared else 3
    yield  # xdist reads the marks, others shuffle
    items.sort(key=lambda item: order[item.path.name])


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The session's daemon, with four simulated GPUs; leave it as you found it."""
    made = Stack(simulate_gpus=4)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def shared_breakable() -> Iterator[Stack]:
    """See ``breakable``, which starts it."""
    made = Stack()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def breakable(shared_breakable: Stack) -> Iterator[Stack]:
    """A daemon without GPUs whose processes tests may kill; what a test has left broken or running is no matter of the next."""
    shared_breakable.up()
    yield shared_breakable
    with contextlib.suppress(OrchError):
        for job in shared_breakable.client.jobs().jobs:
            if not job.is_terminal:
                shared_breakable.client.cancel(job.id)
