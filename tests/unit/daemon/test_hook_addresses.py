"""Addresses of web hooks: those that hand out a machine's credentials are refused, in every notation."""

from __future__ import annotations

import asyncio
import socket

import pytest

from orchestrator.daemon import web_hooks
from orchestrator.daemon.web_hooks import HookError, post

REFUSED = [
    "169.254.169.254",
    "169.254.170.2",
    "fe80::1",
    "fe80::1%lo",
    "febf::1",
    "::ffff:169.254.169.254",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::169.254.169.254",
    "64:ff9b:1:a9fe:a9:fe00::",
    "2002:a9fe:a9fe::1",
    "2001:0:a9fe:a9fe::1",
    "2001:0:1:1:0:0:5601:5601",
    "100.100.100.200",
    "::ffff:100.100.100.200",
    "64:ff9b::100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
    "0.0.0.0",
    "::",
    "::ffff:0.0.0.0",
    "224.0.0.1",
    "ff02::1",
]
ALLOWED = [
    "127.0.0.1",
    "::1",
    "::ffff:127.0.0.1",
    "10.0.0.7",
    "192.168.1.1",
    "172.16.0.1",
    "fd12:3456::1",
    "93.184.216.34",
    "2606:2800:220:1::1",
    "64:ff9b::93.184.216.34",
    "2002:5db8:d822::1",
]


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_of_credentials_is_refused_by_name(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the name server is checked, and the connection goes to that same answer."""
    assert web_hooks.is_refused(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    asked = []

    async def answer(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        return [(family, socket.SOCK_STREAM, 6, "", (address, port))]

    async def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection was made")

    async def send() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
        monkeypatch.setattr(web_hooks.asyncio, "open_connection", connect)
        await post("http://hooks.example/x", b"{}", {})

    with pytest.raises(HookError, match="web hooks may not use") as caught:
        asyncio.run(send())
    assert caught.value.final
    assert asked == ["hooks.example"], "asked once: a second answer could be another one"


@pytest.mark.parametrize("address", ALLOWED)
def test_other_addresses_are_allowed(address: str) -> None:
    assert not web_hooks.is_refused(address)


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518"])
def test_other_spellings_of_an_ipv4_address_are_refused_too(host: str) -> None:
    with pytest.raises(HookError, match=r"169\.254\.169\.254|169\.254\.169\.254, an address") as caught:
        asyncio.run(post(f"http://{host}/latest/meta-data", b"{}", {}, seconds=20))
    assert caught.value.final
