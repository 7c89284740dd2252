"""Calls of actors: bytes both ways, checked where they arrive, and no error or value is unpickled."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from orchestrator.core.codec import Count, Message
from orchestrator.runtime import remote
from orchestrator.runtime.remote import ActorFailedError, InvalidMessageError


class BusyError(Exception):
    """The target refuses."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.what, self.number = what, number


class Point(Message):
    """A value with a range."""

    x: Count


class Target:
    """What an actor does."""

    @remote.called
    async def shift(self, point: Point, *, by: int = 1) -> Point:
        """Return another point."""
        return Point(x=point.x + by)

    @remote.called
    def names(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the texts."""
        return texts

    @remote.called
    async def fail(self, kind: str) -> None:
        """Fail."""
        if kind == "known":
            raise BusyError("a lock", 7)
        if kind == "file":
            raise FileNotFoundError(2, "No such file or directory", "/x")
        raise ZeroDivisionError("no number")

    async def private(self) -> None:
        """No message."""


FAILURES = (BusyError, OSError)


def stub(reply: bytes | None = None) -> Target:
    """Return a stub of a target; ``reply`` is what its actor answers in place of its own."""

    async def answer(method: str, message: bytes) -> Any:
        return await remote.answer(Target(), method, message, FAILURES) if reply is None else reply

    return remote.stub(Target, SimpleNamespace(answer=SimpleNamespace(remote=answer)), failures=FAILURES)


def test_a_call_is_made_with_its_arguments_and_defaults() -> None:
    assert asyncio.run(stub().shift(Point(x=3))) == Point(x=4)
    assert asyncio.run(stub().shift(Point(x=3), by=2)) == Point(x=5)


def test_texts_that_are_no_utf8_arrive() -> None:
    assert asyncio.run(stub().names(("a", "\udcff"))) == ("a", "\udcff")  # type: ignore[arg-type]  # a stub's methods are awaited


def test_declared_errors_arrive_as_they_were_raised() -> None:
    with pytest.raises(BusyError) as raised:
        asyncio.run(stub().fail("known"))
    assert (raised.value.what, raised.value.number) == ("a lock", 7)
    with pytest.raises(FileNotFoundError) as missing:
        asyncio.run(stub().fail("file"))
    assert (missing.value.errno, missing.value.filename) == (2, "/x")


def test_any_other_error_arrives_as_text_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ActorFailedError, match="ZeroDivisionError: no number") as raised:
        asyncio.run(stub().fail("unknown"))
    assert "in fail" in raised.value.__notes__[0]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_arguments_are_checked_where_they_arrive() -> None:
    with pytest.raises(ActorFailedError, match="x"):
        asyncio.run(stub().shift(Point(x=-1)))


def test_only_marked_methods_are_called() -> None:
    with pytest.raises(AttributeError, match="not called from other processes"):
        asyncio.run(stub().private())
    answer = msgspec.msgpack.decode(asyncio.run(remote.answer(Target(), "private", b"\x80")))
    assert answer["failure"]["values"] == ["AttributeError: Target.private is not called from other processes"]


class Trap:
    """Fails when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x80",
        pickle.dumps(Trap()),
        msgspec.msgpack.encode({"value": {"x": -1}}),
        msgspec.msgpack.encode({"value": {"x": 2**64 - 1}}),
        msgspec.msgpack.encode({"failure": {"kind": "BusyError", "values": [], "said": ""}}),
        msgspec.msgpack.encode({"failure": {"kind": "BusyError", "values": [{}], "said": ""}}),
        b"\x91" * 100_000,
        Trap(),
    ],
)
def test_a_reply_of_anything_else_is_refused(reply: Any) -> None:
    with pytest.raises(InvalidMessageError):
        asyncio.run(stub(reply).shift(Point(x=3)))
