"""Fixtures: the page on a service in memory, and a browser that keeps cookies and sends the headers of browsers."""

from __future__ import annotations

import asyncio
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest

from orchestrator.api.server.testing import FakeService
from orchestrator.web.app import create_page_app
from orchestrator.web.sign_in import SignIn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Message

HOST = "127.0.0.1:8270"
OTHER_UID = 54321


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


class Browser:
    """Calls the application as a browser does. ``cookie`` is the one that the last answer set."""

    def __init__(self, service: FakeService, sign_in: SignIn) -> None:
        self.service = service
        self.sign_in = sign_in
        self.app = create_page_app(service, sign_in, asyncio.Event(), owner_uid=os.getuid())
        self.cookie = ""

    def signed_in(self, uid: int | None = None) -> Browser:
        assert self.get(f"/signin?link={self.sign_in.new_link(os.getuid() if uid is None else uid)}").status == 303
        return self

    def get(self, address: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("GET", address, headers or {}, b"")

    def post(
        self, address: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        sent = {"origin": f"http://{HOST}", "content-type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.ask("POST", address, sent, urlencode(form or {}).encode())

    def ask(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        return asyncio.run(self.call(method, address, headers, body))

    async def call(
        self, method: str, address: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b""
    ) -> Answer:
        parts = urlsplit(address)
        sent = {"host": HOST, **({"cookie": self.cookie} if self.cookie else {}), **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items() if value],
            "scheme": "http",
            "server": ("127.0.0.1", 8270),
            "http_version": "1.1",
            "state": {},
        }
        messages: list[Message] = []

        arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not arrived:
                await asyncio.Event().wait()  # the browser stays
            return arrived.pop()

        async def send(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        found = {name.decode().lower(): value.decode() for name, value in messages[0]["headers"]}
        if "set-cookie" in found:
            self.cookie = found["set-cookie"].partition(";")[0]
        text = b"".join(message.get("body", b"") for message in messages[1:]).decode()
        return Answer(messages[0]["status"], found, text)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sign_in(clock: Clock) -> SignIn:
    return SignIn(b"k" * 32, clock)


@pytest.fixture
def visitor(sign_in: SignIn) -> Browser:
    return Browser(FakeService(), sign_in)


@pytest.fixture
def browser(visitor: Browser) -> Browser:
    return visitor.signed_in()
