"""Reports at once the tests that fail and those that run for long: if a suite is killed, this is its only output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import pytest

LONG_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 20.0


class LongRunning:
    """A plugin of the reporting process: reports a test that runs for ``long`` seconds, and again after every such period."""

    def __init__(self, tell: Callable[[str], None], *, long: float = LONG_SECONDS, look: float = LOOK_SECONDS) -> None:
        self._tell, self._long = tell, long
        self._since: dict[str, float] = {}
        self._told: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(look,), name="long-running", daemon=True)

    def pytest_sessionstart(self) -> None:
        """Start the thread that looks for long tests."""
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins, here or in a process of pytest-xdist."""
        self._since[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record that a test has ended."""
        self._since.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a part of a test that has failed."""
        if report.failed:
            self._tell(f"failed, in its {report.when}: {report.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Stop the thread."""
        self._over.set()

    def _watch(self, look: float) -> None:
        while not self._over.wait(look):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Report the tests that run for long at this moment."""
        for nodeid, since in list(self._since.items()):
            times = int((now - since) / self._long)
            if times > self._told.get(nodeid, 0):
                self._told[nodeid] = times
                self._tell(f"after {now - since:.0f} s still running: {nodeid}")
