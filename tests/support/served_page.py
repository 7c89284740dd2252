"""The page of a service in memory, on a real port, with an event loop in a thread of its own; and a browser for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from orchestrator.api.server.listeners import ApiServer, address_of, bind_tcp
from orchestrator.api.server.testing import FakeService
from orchestrator.web.serving import LazyPage
from orchestrator.web.sign_in import SignIn
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHONE: Final = {"width": 390, "height": 844}
DESK: Final = {"width": 1280, "height": 900}


class ServedPage:
    """One daemon's page. ``restart`` does the same as a daemon that stops and starts: links are lost, cookies are not."""

    def __init__(self, service: FakeService | None = None, *, token: str = "") -> None:
        self.service = service or FakeService("ada")
        self._token = token
        self._key = os.urandom(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served-page", daemon=True)
        self._port = 0

    @property
    def address(self) -> str:
        """Address of the page, without a slash at its end."""
        return f"http://127.0.0.1:{self._port}"

    def link(self, uid: int | None = None) -> str:
        """Return a link that signs in once, by default the daemon's owner."""
        return f"{self.address}/signin?link={self._sign_in.new_link(os.getuid() if uid is None else uid)}"

    def do(self, work: Callable[[FakeService], Any]) -> Any:
        """Run ``work`` on the service, in its thread; return its result."""

        async def inside() -> Any:
            return work(self.service)

        return self._run(inside())

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._run(self._start())

    def stop(self) -> None:
        """Stop listening; open streams end."""
        self._run(self._stop())

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=PATIENCE_SECONDS)

    async def _start(self) -> None:
        self._closing = asyncio.Event()
        self._sign_in = SignIn(self._key, time.time, token=self._token, owner_uid=os.getuid())
        sock = bind_tcp("127.0.0.1", self._port)
        self._port = int(address_of(sock).rpartition(":")[2])
        self._server = ApiServer(LazyPage(self.service, self._sign_in, self._closing), [sock])
        await self._server.start()

    async def _stop(self) -> None:
        self._closing.set()
        await self._server.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @contextmanager
    def running(self) -> Iterator[ServedPage]:
        """Serve for the duration of the block."""
        self._thread.start()
        try:
            self.start()
            yield self
        finally:
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=PATIENCE_SECONDS)
            self._loop.close()


@contextmanager
def started_chromium() -> Iterator[Browser]:
    """Start Debian's chromium, without a window. Skips the test where it is missing."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is missing: .ci/install-test-tools installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()
