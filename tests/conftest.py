"""Fixtures that several suites share: one daemon with Ray per process of pytest-xdist, and one that may be broken."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from orchestrator.api.errors import OrchError
from tests.support import evidence, leftovers, signals, warm
from tests.support.distribution import LongestFirst
from tests.support.running import LongRunning
from tests.support.stack import Stack

# Property tests search at random where people work, and try the same cases again where a finding would block somebody else's change.
# Nothing has a deadline: a busy machine is no fault of the code.
settings.register_profile("people", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("people"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")

# Hundreds of processes of these tests import orch, Ray and torch: each would compile them anew, which takes it seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SESSION = pytest.StashKey[Path]()
LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session, and the processes of pytest-xdist with it, a temporary directory of its own.

    A shell that starts pytest in the background has it ignore SIGINT, and every script that a test starts with it.
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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session that leaves a process or a file of orch's behind has failed."""
    config = session.config
    warm.end()
    if SESSION in config.stash:
        config.stash[LEFT] = leftovers.end(config.stash[SESSION])
        if config.stash[LEFT] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left behind, and how to have the same order again."""
    for what in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {what}", red=True)
    if config.pluginmanager.hasplugin("randomly"):
        terminalreporter.write_line(f"the same order again: --randomly-seed={config.getoption('randomly_seed')}")


def pytest_runtest_setup() -> None:
    """Each test begins with torch in one thread, and with structlog as a process has it that never set it up.

    Threads that wait for each other beside other work take minutes for what takes seconds; and structlog's own
    ``capture_logs`` leaves it set up, by which the lines of a trainer change their form.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    """In place of ``--dist loadfile``'s own."""
    return LongestFirst(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the daemons have said last, and where their processes are."""
    report = yield
    if report.failed:
        report.sections += Stack.last_words
        for stack in Stack.in_use:
            report.sections += evidence.sections(stack)
    Stack.last_words.clear()
    return report


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[Stack]:
    """See ``stack``."""
    made = Stack(simulate_gpus=4)
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """The session's daemon, with four simulated GPUs; leave it as you found it.

    What a test has left running, as one that failed does, would have the next one wait for a place.
    """
    yield shared_stack
    with contextlib.suppress(OrchError):
        end_jobs(shared_stack)


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
    if not shared_breakable.answers():
        shared_breakable.up()
    end_jobs(shared_breakable)  # of a test that has left no daemon behind that could have ended them
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
