"""Sign-in by a link that works once, and the cookie that follows."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import UnauthenticatedError
from orchestrator.web.guard import MAX_STREAMS
from orchestrator.web.sign_in import COOKIE_SECONDS, LINK_SECONDS, MAX_LINKS, SignIn, SignOuts
from tests.unit.web.conftest import HOST, OTHER_UID, Browser

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.web.conftest import Clock


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
    payload, mac = cookie.split(".")
    uid, *rest = json.loads(base64.urlsafe_b64decode(payload + "=="))
    other = base64.urlsafe_b64encode(json.dumps([uid + 1, *rest]).encode()).decode().rstrip("=")
    for forged in ("", ".", "...", f"{other}.{mac}", f"{payload}.", payload, f"{payload}.{mac[:-2]}", "é.1.x.y"):
        assert sign_in.user_of(forged) is None
    assert sign_in.user_of(cookie) == 7


def test_unused_links_are_bounded_for_each_user_and_the_newest_works(sign_in: SignIn) -> None:
    theirs = sign_in.new_link(8)
    links = [sign_in.new_link(7) for _ in range(3 * MAX_LINKS)]
    assert sign_in.user_of(sign_in.redeem(theirs)) == 8, "the links of others take no room"
    for link in links[:-MAX_LINKS]:
        with pytest.raises(UnauthenticatedError):
            sign_in.redeem(link)
    for link in links[-MAX_LINKS:]:
        assert sign_in.user_of(sign_in.redeem(link)) == 7


def test_signing_out_ends_every_session_of_the_user_alone(browser: Browser, sign_in: SignIn) -> None:
    kept, theirs = browser.cookie, sign_in.redeem(sign_in.new_link(OTHER_UID))
    answer = browser.post("/signout")
    assert answer.status == 200
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    browser.cookie = kept
    assert browser.get("/").status == 401, "a copy of the cookie is worth nothing"
    assert sign_in.user_of(theirs) == OTHER_UID
    assert browser.signed_in().get("/").status == 200


def test_a_sign_out_outlives_the_daemon(clock: Clock, tmp_path: Path) -> None:
    kept = tmp_path / "page.signed-out"
    first = SignIn(b"a" * 32, clock, sign_outs=SignOuts(kept))
    before = first.redeem(first.new_link(7))
    asyncio.run(first.sign_out(7))
    after = first.redeem(first.new_link(7))
    again = SignIn(b"a" * 32, clock, sign_outs=SignOuts(kept))
    assert (again.user_of(before), again.user_of(after)) == (None, 7)
    assert kept.stat().st_mode & 0o077 == 0


def test_streams_are_bounded_for_each_user_and_end_when_he_signs_out(browser: Browser, sign_in: SignIn) -> None:
    theirs = Browser(browser.service, sign_in)
    theirs.app = browser.app
    theirs.signed_in(OTHER_UID)

    async def story() -> None:
        mine = [asyncio.create_task(browser.call("GET", "/live/overview")) for _ in range(MAX_STREAMS)]
        other = asyncio.create_task(theirs.call("GET", "/live/overview"))
        await asyncio.sleep(0)
        await asyncio.wait([*mine, other], timeout=0)
        assert (await browser.call("GET", "/live/overview")).status == 409
        cookie, form = browser.cookie, {"content-type": "application/x-www-form-urlencoded"}
        assert (await browser.call("POST", "/signout", {"origin": f"http://{HOST}", **form})).status == 200
        assert {answer.status for answer in await asyncio.gather(*mine)} == {200}
        browser.cookie = cookie
        assert (await browser.call("GET", "/live/overview")).status == 401
        assert not other.done()
        other.cancel()
        await asyncio.wait([other])

    asyncio.run(story())
