"""Fixtures that several suites share: one daemon with Ray per test session, and one that may be broken.

Files that use the same of them go to the same process of pytest-xdist, so that there is one of each.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from orchestrator.api.errors import OrchError
from tests.support.stack import Stack

# Property tests search at random where people work, and try the same cases again where a finding would block somebody else's change.
# Nothing has a deadline: a busy machine is no fault of the code.
settings.register_profile("people", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("people"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")

ROOT = Path(__file__).parents[1]
LONG = (
    "test_prometheus_stack.py",
    "test_ray_cluster.py",
    "test_wheel.py",
    "test_trainer_processes.py",
    "test_torchrun_parity.py",
)


@functools.cache
def shared_daemon(file: str) -> str:
    """Which of the shared daemons the tests of a file ask for: "breakable", "stack" or ""."""
    text = (ROOT / file).read_text()
    return next((name for name in ("breakable", "stack") if f"{name}: Stack" in text), "")


class OneOfEach(LoadScopeScheduling):
    """A file's tests stay together, and with those of the files that share its daemon."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return shared_daemon(file) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """In place of ``--dist loadfile``'s own."""
    return OneOfEach(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes a minute or more comes first, so that nothing long is last."""

    def order(item: pytest.Item) -> int:
        shared = shared_daemon(item.nodeid.split("::", 1)[0])
        return 0 if shared == "breakable" else 1 if item.path.name in LONG else 2 if shared else 3

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the daemon had said last."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Stack):
                report.sections.append((f"{name}: end of the daemon's log", value.daemon_log()))
    return report


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
        running = [job.id for job in shared_breakable.client.jobs().jobs if not job.is_terminal]
        for job_id in running:
            shared_breakable.client.cancel(job_id)
        for job_id in running:
            shared_breakable.client.wait(job_id, timeout_seconds=20)
