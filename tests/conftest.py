"""Fixtures that several suites share: one daemon with Ray per test session, and one that may be broken.

Files that use the same of them go to the same process of pytest-xdist, so that there is one of each.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from orchestrator.api.errors import OrchError
from tests.support import leftovers
from tests.support.stack import Stack

# Property tests search at random where people work, and try the same cases again where a finding would block somebody else's change.
# Nothing has a deadline: a busy machine is no fault of the code.
settings.register_profile("people", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("people"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")

ROOT = Path(__file__).parents[1]
LONG = (
    "test_ray_cluster.py",
    "test_prometheus_stack.py",
    "test_rules_promtool.py",
    "test_wheel.py",
    "test_trainer_processes.py",
    "test_torchrun_parity.py",
)


SESSION = pytest.StashKey[Path]()
LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session, and the processes of pytest-xdist with it, a temporary directory of its own.

    A shell that starts pytest in the background has it ignore SIGINT, and every script that a test starts with it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.stash[SESSION] = leftovers.begin(os.environ)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session that leaves a process or a file of orch's behind has failed."""
    config = session.config
    if SESSION in config.stash:
        config.stash[LEFT] = leftovers.end(config.stash[SESSION])
        if config.stash[LEFT] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left behind, and, of a session that failed, how to have the same order again."""
    for what in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {what}", red=True)
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        seed = config.getoption("randomly_seed", None)
        terminalreporter.write_line(f"the same order again: -p randomly -p 'randomly_seed={seed}'")


@functools.cache
def shared_daemon(file: str) -> str:
    """Which of the shared daemons the tests and fixtures of a file ask for: "breakable", "stack" or ""."""
    functions = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)]
    asking = [one for one in functions if one.name.startswith("test_") or "fixture" in map(_name, one.decorator_list)]
    asked = {argument.arg for one in asking for argument in one.args.args}
    return next((name for name in ("breakable", "stack") if name in asked), "")


def _name(decorator: ast.expr) -> str:
    """``fixture``, of ``@pytest.fixture`` and ``@pytest.fixture(...)``."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else ""


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
    """What takes minutes comes first, so that nothing long is last: the files of a shared daemon are one thing."""

    def order(item: pytest.Item) -> int:
        shared = shared_daemon(item.nodeid.split("::", 1)[0])
        return ("breakable", "stack").index(shared) if shared else 2 if item.path.name in LONG else 3

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
