"""The address of the page, and its data that outlives a daemon."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import BadRequestError, OrchError, RefusedError
from orchestrator.api.launch import ServeOptions
from orchestrator.api.server.listeners import address_of
from orchestrator.api.server.testing import FakeService
from orchestrator.api.service import Caller
from orchestrator.spec.paths import PageFiles
from orchestrator.web.serving import LazyPage, PageLinkMaker, bind_page, sign_in_of

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Message


def test_the_port_is_that_of_the_last_time_while_it_is_free(tmp_path: Path) -> None:
    files = PageFiles.of(tmp_path)
    options = ServeOptions()
    with bind_page(options, files) as first:
        address = address_of(first)
    with bind_page(options, files) as again:
        assert address_of(again) == address
        with bind_page(options, files) as other:
            assert address_of(other) != address
    files.port.write_text("no port\n")
    bind_page(options, files).close()
    assert files.port.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("listen", "more", "error"),
    [
        ("0.0.0.0:0", {}, RefusedError),
        ("[::]:8265", {"token_file": "t"}, RefusedError),
        ("192.0.2.1:8265", {"page_plain": True}, RefusedError),
        ("192.0.2.1:8265", {"page_cert": "c", "page_key": "k"}, RefusedError),
        ("127.0.0.1:0", {"page_cert": "c"}, BadRequestError),
        ("127.0.0.1:0", {"page_key": "k"}, BadRequestError),
        ("127.0.0.1", {}, BadRequestError),
        ("127.0.0.1:x", {}, BadRequestError),
        (":1", {}, BadRequestError),
        ("127.0.0.1:99999", {}, BadRequestError),
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, listen: str, more: dict[str, Any], error: type[OrchError]) -> None:
    with pytest.raises(error) as caught:
        bind_page(ServeOptions(page_listen=listen, **more), PageFiles.of(tmp_path))
    assert caught.value.hint


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    files = PageFiles.of(tmp_path)
    first = sign_in_of(files)
    cookie = first.redeem(first.new_link(7))
    assert sign_in_of(files).user_of(cookie) == 7
    assert files.key.stat().st_mode & 0o077 == 0
    files.key.write_bytes(b"short")
    assert sign_in_of(files).user_of(cookie) is None


def test_a_link_signs_in_the_user_that_asked_for_it(tmp_path: Path) -> None:
    sign_in = sign_in_of(PageFiles.of(tmp_path))
    caller = Caller(uid=7, gid=7, user="grace", is_owner=False)
    reply = PageLinkMaker(sign_in, "http://127.0.0.1:8270/").link(caller)
    assert reply.url.startswith("http://127.0.0.1:8270/signin?link=")
    assert reply.address == "http://127.0.0.1:8270/"
    assert sign_in.user_of(sign_in.redeem(reply.url.partition("=")[2])) == 7


def test_the_page_is_made_when_the_first_browser_comes(tmp_path: Path) -> None:
    page = LazyPage(FakeService(), sign_in_of(PageFiles.of(tmp_path)), asyncio.Event())
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"host", b"localhost")]}
    for _ in range(2):
        asyncio.run(page(scope, receive, send))
    assert [message["status"] for message in messages[::2]] == [401, 401]
    assert os.path.exists(tmp_path / "page.key")
