"""The sign-in page in a real browser: accessible, fits a phone, works by keyboard, and has a message for each refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.integration.page.accessibility import AXE_RULES, excess_width, violations
from tests.support.served_page import DESK, PHONE, ServedPage

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

TOKEN = "a-token-of-forty-characters-for-the-daemon"
LONG_PATH = "/srv/" + "a-directory-with-a-long-name/" * 4 + "token"


@pytest.fixture
def served() -> Iterator[ServedPage]:
    """Yield the page of a daemon with a token."""
    with ServedPage(token=TOKEN).running() as page:
        yield page


@pytest.fixture
def visitor(served: ServedPage, new_page: Callable[..., Page], errors: list[str]) -> Iterator[Callable[..., Page]]:
    """Yield a function that makes a page that is not signed in; refused sign-ins are not errors of the test."""

    def make(**options: object) -> Page:
        page = new_page(**options)
        page.context.clear_cookies()
        page.goto(served.address)
        return page

    yield make
    errors[:] = [one for one in errors if "status of 401" not in one and "status of 429" not in one]


def field(page: Page) -> Locator:
    return page.get_by_label("The daemon's token")


def guess(page: Page, token: str) -> None:
    """Type a token and press Enter; the next page is there once this returns."""
    expect(field(page)).to_be_focused()
    page.keyboard.type(token)
    expect(field(page)).to_have_value(token)
    with page.expect_navigation():
        page.keyboard.press("Enter")


@pytest.mark.rare
@pytest.mark.parametrize(("size", "scheme", "other"), [("desk", "light", "dark"), ("phone", "dark", "light")])
def test_signing_in_has_no_violation_and_fits_the_screen(
    served: ServedPage, visitor: Callable[..., Page], axe: str, size: str, scheme: str, other: str
) -> None:
    page = visitor(color_scheme=scheme, viewport=PHONE if size == "phone" else DESK)

    def check(what: str) -> None:
        page.evaluate(axe)
        assert violations(page, "tag", AXE_RULES) == [], what
        page.emulate_media(color_scheme=other)  # type: ignore[arg-type]  # light or dark
        assert violations(page, "rule", ["color-contrast"]) == [], (what, other)
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # likewise
        assert excess_width(page) <= 0, what

    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    check("the form")
    guess(page, "not-the-token")
    expect(page.get_by_role("alert")).to_contain_text("this is not the daemon's token")
    check("a wrong token")
    page.evaluate("(path) => document.querySelector('[role=alert]').append(path)", LONG_PATH)
    check("a message with a long path")
    page.goto(f"{served.address}/signin?link=used")
    check("a used link")
    guess_right = visitor(viewport=PHONE)
    guess(guess_right, TOKEN)
    with guess_right.expect_navigation():
        guess_right.get_by_role("button", name="Sign out").click()
    expect(guess_right.locator("h1")).to_have_text("Signed out")
    assert excess_width(guess_right) <= 0


def test_the_keyboard_alone_signs_in_after_a_wrong_token(served: ServedPage, visitor: Callable[..., Page]) -> None:
    page = visitor()
    expect(page).to_have_url(f"{served.address}/signin")
    expect(field(page)).to_be_focused()
    guess(page, "wrong")
    alert = page.get_by_role("alert")
    expect(alert).to_have_text("this is not the daemon's token; it is in the file of `--token-file`")
    expect(field(page)).to_be_focused()
    expect(field(page)).to_have_attribute("aria-invalid", "true")
    expect(field(page)).to_have_accessible_description(alert.inner_text())
    guess(page, TOKEN)
    expect(page).to_have_url(f"{served.address}/")
    expect(page.get_by_role("heading", name="Running")).to_be_visible()


@pytest.mark.rare
def test_signing_in_works_without_javascript(served: ServedPage, visitor: Callable[..., Page]) -> None:
    page = visitor(java_script_enabled=False)
    page.get_by_label("The daemon's token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{served.address}/")
