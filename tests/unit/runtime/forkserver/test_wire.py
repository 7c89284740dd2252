"""Framing: a message arrives whole, or as an error."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.runtime.forkserver import wire

TEXTS = st.text(st.characters(codec=None), max_size=20)  # surrogates included: an environment is bytes
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
MESSAGES = st.dictionaries(TEXTS, JSON, max_size=4)


@settings(deadline=None)
@given(MESSAGES)
def test_round_trip(message: dict[str, object]) -> None:
    data = wire.encode(message)
    length = wire.body_length(data[: wire.HEADER.size])
    assert length == len(data) - wire.HEADER.size
    assert wire.decode(data[wire.HEADER.size :]) == message


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=4), st.integers(1, 7))
def test_lines_survive_any_cutting(messages: list[dict[str, object]], size: int) -> None:
    data = b"".join(wire.encode_line(message) for message in messages)
    reader = wire.LineReader()
    found = [message for start in range(0, len(data), size) for message in reader.feed(data[start : start + size])]
    assert found == messages


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b"\xff"])
def test_what_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(body)


def test_a_request_is_put_together_from_pieces_with_its_descriptors() -> None:
    message = {"mode": "script", "env": {"A": "x" * 1000}}
    data = wire.encode(message)
    here, there = socket.socketpair()
    reader = wire.RequestReader()
    with here, there, open(os.devnull, "rb") as file:
        socket.send_fds(here, [data[:2]], [file.fileno()])
        assert reader.receive(there) is None
        here.sendall(data[2:50])
        assert reader.receive(there) is None
        here.sendall(data[50:])
        assert reader.receive(there) == message
        (fd,) = reader.take_fds()
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
        os.close(fd)
        assert reader.take_fds() == []
        here.close()
        with pytest.raises(EOFError):
            reader.receive(there)
