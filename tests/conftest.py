"""Fixtures of several suites: one daemon with Ray per process of pytest-xdist, and one that tests may break."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from orchestrator import trees
from orchestrator.api.errors import OrchError
from tests.support import deep_trees, evidence, leftovers, signals, warm
from tests.support.distribution import LongestFirst
from tests.support.running import LongRunning
from tests.support.stack import Stack

# Property tests search at random on developers' machines, and repeat the same cases in CI, where a finding would block an unrelated
# change. No test has a deadline: a busy machine is not a fault of the code.
settings.register_profile("people", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("people"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")

# Hundreds of processes of these tests import orch, Ray and torch: each would compile them again, which takes seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SESSION = pytest.StashKey[Path]()
LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session, and the processes of pytest-xdist with it, a temporary directory of its own.

    A shell that starts pytest in the background makes it ignore SIGINT, and every script that a test starts as well.
    """
    signals.guard()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("CI") and not config.pluginmanager.hasplugin("randomly"):
        raise pytest.UsageError("tests run in random order here: install pytest-randomly, and leave out -p no:randomly")
    if not hasattr(config, "workerinput"):
        config.stash[SESSION] = leftovers.begin(os.environ)
        config.pluginmanager.register(LongRunning(lambda line: _say(config, line)))


def _say(config: pytest.Config, line: str) -> None:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(line)
        reporter.flush()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: a million objects are made that stay. Every later garbage collection leaves them out."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves a process or a file of orch behind."""
    config = session.config
    warm.end()
    if SESSION in config.stash:
        config.stash[LEFT] = leftovers.end(config.stash[SESSION])
        if config.stash[LEFT] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was left behind, and how to repeat the same order."""
    for what in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {what}", red=True)
    if config.pluginmanager.hasplugin("randomly"):
        terminalreporter.write_line(f"the same order again: --randomly-seed={config.getoption('randomly_seed')}")


def pytest_runtest_setup() -> None:
    """Set torch to one thread, and reset structlog to its defaults, before each test.

    On a busy machine, threads that wait for each other take minutes instead of seconds; and structlog's own
    ``capture_logs`` leaves structlog configured, which changes the form of a trainer's lines.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


def pytest_runtest_teardown() -> None:
    """Close the stores that the test has opened."""
    if (stores := sys.modules.get("tests.support.stores")) is not None:
        stores.close_all()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    """Return the scheduler that replaces the one of ``--dist loadfile``; None for other modes."""
    return LongestFirst(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the daemons' logs and their processes' stacks to a failure's report."""
    report = yield
    if report.failed:
        report.sections += Stack.last_words
        for stack in Stack.in_use:
            report.sections += evidence.sections(stack)
    Stack.last_words.clear()
    return report


@pytest.fixture
def make_deep() -> Iterator[Callable[[Path, int], None]]:
    """Return a function that makes a tree of any depth. It is removed afterwards: pytest's own removal recurses."""
    made: list[Path] = []

    def make(top: Path, levels: int) -> None:
        made.append(top)
        deep_trees.make_deep(top, levels)

    yield make
    for top in made:
        trees.remove(top)


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[Stack]:
    """Yield the daemon of ``stack``."""
    made = Stack(simulate_gpus=4)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """Yield the session's daemon, with four simulated GPUs; a test must leave it as it was.

    Jobs that a failed test has left running are cancelled: the next test would wait for their GPUs.
    """
    yield shared_stack
    with contextlib.suppress(OrchError):
        end_jobs(shared_stack)


@pytest.fixture(scope="session")
def shared_breakable() -> Iterator[Stack]:
    """Yield the stack of ``breakable``, which starts its daemon."""
    made = Stack()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def breakable(shared_breakable: Stack) -> Iterator[Stack]:
    """Yield a daemon without GPUs; tests may kill its processes. Jobs and damage of one test do not affect the next."""
    if not shared_breakable.answers():
        shared_breakable.up()
    end_jobs(shared_breakable)  # of a test that left no daemon to cancel them
    yield shared_breakable
    with contextlib.suppress(OrchError):
        end_jobs(shared_breakable)


def end_jobs(stack: Stack) -> None:
    """Cancel every job, and wait until they have ended."""
    running = [job.id for job in stack.client.jobs().jobs if not job.is_terminal]
    for job_id in running:
        stack.client.cancel(job_id)
    for job_id in running:
        stack.wait(job_id)
