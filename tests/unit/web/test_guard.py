"""The headers of every answer, and the requests that are refused for every user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.web.guard import MAX_FORM_BYTES
from tests.unit.web.conftest import HOST

if TYPE_CHECKING:
    from tests.unit.web.conftest import Browser

ADDRESSES = ("/", "/jobs", "/jobs/nothing", "/signin", "/nowhere", "/static/x/page.js", "/signout")


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("known", [True, False])
def test_every_answer_is_protected(visitor: Browser, address: str, known: bool) -> None:
    if known:
        visitor.signed_in()
    headers = visitor.get(address).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"


def test_pages_have_no_script_or_style_of_their_own(browser: Browser) -> None:
    job = browser.service.add()
    for address in ("/", "/jobs", f"/jobs/{job.id}", f"/jobs/{job.id}/cancel", "/nowhere"):
        text = browser.get(address).text
        assert text.count("<script") == 1
        assert "<style" not in text
        assert " style=" not in text
        assert " on" not in {part[:3] for part in text.split("<a")}
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("address", ["/", "/jobs", "/jobs/x", "/live/overview", "/jobs/x/cancel"])
def test_without_a_cookie_there_is_nothing_but_the_way_in(visitor: Browser, address: str) -> None:
    visitor.service.add("hidden-name")
    answer = visitor.get(address)
    assert answer.status == 401
    assert "orch ui" in answer.text
    assert "hidden-name" not in answer.text
    assert visitor.post(address).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8270"},
        {"host": "localhost.evil.example:8270"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": f"https://{HOST}"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
    ids=str,
)
def test_no_other_page_can_act(browser: Browser, headers: dict[str, str]) -> None:
    job = browser.service.add(state="RUNNING")
    answer = browser.post(f"/jobs/{job.id}/cancel", headers=headers)
    assert answer.status == 403
    assert browser.service.calls == []


def test_a_link_from_another_site_leads_to_a_page_but_reads_nothing_else(browser: Browser) -> None:
    there = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert browser.get("/jobs", there).status == 200
    assert browser.get("/jobs", {**there, "sec-fetch-mode": "cors"}).status == 403
    assert browser.get("/live/overview", {**there, "sec-fetch-mode": "no-cors"}).status == 403


def test_other_methods_and_bodies_are_refused(browser: Browser) -> None:
    job = browser.service.add(state="RUNNING")
    assert browser.ask("DELETE", f"/jobs/{job.id}", {}, b"").status == 405
    assert browser.post(f"/jobs/{job.id}/cancel", headers={"content-type": "application/json"}).status == 415
    assert browser.post(f"/jobs/{job.id}/cancel", {"x": "y" * MAX_FORM_BYTES}).status == 413
    assert browser.service.calls == []


def test_what_fails_is_a_page_that_says_so(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    async def health() -> object:
        raise RuntimeError("a secret of the daemon")

    monkeypatch.setattr(browser.service, "health", health)
    answer = browser.get("/")
    assert answer.status == 500
    assert "a secret" not in answer.text
    assert answer.headers["x-frame-options"] == "DENY"
