"""Sign-in by a link that works once, and the cookie that follows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import RefusedError, UnauthenticatedError
from orchestrator.web.sign_in import COOKIE_SECONDS, LINK_SECONDS, MOST_LINKS, SignIn

if TYPE_CHECKING:
    from tests.unit.web.conftest import Browser, Clock


def test_a_link_becomes_a_strict_cookie_that_scripts_cannot_read(visitor: Browser) -> None:
    answer = visitor.get(f"/signin?link={visitor.sign_in.new_link(os.getuid())}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert visitor.get("/").status == 200


def test_a_link_works_once(visitor: Browser) -> None:
    address = f"/signin?link={visitor.sign_in.new_link(os.getuid())}"
    assert visitor.get(address).status == 303
    visitor.cookie = ""
    again = visitor.get(address)
    assert again.status == 401
    assert "used already" in again.text
    assert "orch ui" in again.text
    assert "set-cookie" not in again.headers


def test_a_link_that_is_too_old_is_refused(visitor: Browser, clock: Clock) -> None:
    address = f"/signin?link={visitor.sign_in.new_link(os.getuid())}"
    clock.now += LINK_SECONDS
    assert visitor.get(address).status == 401


@pytest.mark.parametrize("address", ["/signin", "/signin?link=", "/signin?link=%ff%fe", "/signin?link=guess"])
def test_a_link_that_was_not_made_is_refused(visitor: Browser, address: str) -> None:
    assert visitor.get(address).status == 401


def test_a_page_of_another_site_cannot_sign_a_browser_in(visitor: Browser) -> None:
    address = f"/signin?link={visitor.sign_in.new_link(os.getuid())}"
    for site in ("cross-site", "same-site"):
        answer = visitor.get(address, {"sec-fetch-site": site, "sec-fetch-mode": "navigate"})
        assert answer.status == 403
        assert "set-cookie" not in answer.headers
    assert visitor.get(address, {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}).status == 303


def test_a_cookie_ends(browser: Browser, clock: Clock) -> None:
    clock.now += COOKIE_SECONDS - 1
    assert browser.get("/").status == 200
    clock.now += 2
    assert browser.get("/").status == 401


def test_a_cookie_outlives_the_daemon_and_is_no_other_daemon_s(clock: Clock) -> None:
    first = SignIn(b"a" * 32, clock)
    cookie = first.redeem(first.new_link(7))
    assert SignIn(b"a" * 32, clock).user_of(cookie) == 7
    other = SignIn(b"b" * 32, clock)
    assert other.user_of(cookie) is None
    assert other.cookie_name != first.cookie_name


def test_a_changed_cookie_is_refused(sign_in: SignIn) -> None:
    cookie = sign_in.redeem(sign_in.new_link(7))
    user, until, nonce, mac = cookie.split(".")
    for forged in (
        "",
        ".",
        "...",
        f"8.{until}.{nonce}.{mac}",
        f"7.9{until}.{nonce}.{mac}",
        f"{user}.{until}.{nonce}.",
        "é.1.x.y",
    ):
        assert sign_in.user_of(forged) is None
    assert sign_in.user_of(cookie) == 7


def test_unused_links_are_bounded(sign_in: SignIn, clock: Clock) -> None:
    for _ in range(MOST_LINKS):
        sign_in.new_link(7)
    with pytest.raises(RefusedError, match="unused"):
        sign_in.new_link(7)
    clock.now += LINK_SECONDS
    sign_in.redeem(sign_in.new_link(7))
    with pytest.raises(UnauthenticatedError):
        sign_in.redeem("guess")


def test_signing_out(browser: Browser) -> None:
    answer = browser.post("/signout")
    assert answer.status == 200
    assert "max-age=0" in answer.headers["set-cookie"].lower()
