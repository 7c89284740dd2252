"""Fixtures: one browser for a module's tests (it may not outlive them: its event loop runs in their thread); each test has a page of its own daemon, and fails on the browser's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.integration import npm
from tests.support.served_page import DESK, ServedPage, started_chromium
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

AXE = "axe-core@4.14.1"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Yield the browser; its expectations wait long enough for a machine that runs ten other programs."""
    expect.set_options(timeout=1000 * PATIENCE_SECONDS)
    with started_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe-core, installed from npm for the tests alone."""
    folder = npm.installed([AXE], tmp_path_factory.mktemp("axe"))
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.fixture
def served() -> Iterator[ServedPage]:
    """Yield the page of a service in memory."""
    with ServedPage().running() as page:
        yield page


@pytest.fixture
def errors() -> list[str]:
    """Return the list of errors in the test's browsers: scripts, the console, dialogs. A test that expects some clears it."""
    return []


@pytest.fixture
def new_page(chromium: Browser, served: ServedPage, errors: list[str]) -> Iterator[Callable[..., Page]]:
    """Yield a function that makes a signed-in page, of a user ``uid`` or with other options of a browser's context."""
    contexts: list[BrowserContext] = []

    def make(uid: int | None = None, **options: object) -> Page:
        context = chromium.new_context(**{"viewport": DESK, **options})  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(f"script: {error}"))
        page.on("console", lambda told: errors.append(f"console: {told.text}") if told.type == "error" else None)
        page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(served.link(uid))
        return page

    yield make
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """Return a browser page of the daemon's owner, signed in."""
    return new_page()
