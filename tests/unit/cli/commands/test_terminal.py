"""The terminal's side of a session: the escape key, exit codes, and the reported properties of the terminal."""

from __future__ import annotations

import pytest

from orchestrator.api.errors import BadRequestError
from orchestrator.api.transport.session_stream import End
from orchestrator.cli.commands.sessions import Escape, LeftError, exit_code, parse_ports


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ((b"ls ~\r", b"~/x\r"), b"ls ~\r~/x\r"),
        ((b"~~ x\r",), b"~ x\r"),
        ((b"~", b"a"), b"~a"),
        ((b"a~.",), b"a~."),
        ((b"~",), b""),
    ],
)
def test_keys_pass(typed: tuple[bytes, ...], passed: bytes) -> None:
    escape = Escape()
    assert b"".join(map(escape.passed, typed)) == passed


@pytest.mark.parametrize("typed", [(b"~.",), (b"ls\r~", b"."), (b"x\n~.",)])
def test_the_way_out(typed: tuple[bytes, ...]) -> None:
    escape = Escape()

    def type_all() -> None:
        for part in typed:
            escape.passed(part)

    with pytest.raises(LeftError):
        type_all()


def test_exit_codes_are_a_shell_s() -> None:
    assert exit_code(End("exited", 3, None)) == 3
    assert exit_code(End("exited", None, 15)) == 143
    assert exit_code(End("rank_ended", None, None)) == 137


def test_ports() -> None:
    assert parse_ports("6006") == (6006, 6006)
    assert parse_ports("0:8888") == (0, 8888)
    for text in ("", "x", "0", "1:0", "65536", "1:2:3", "-1", "²"):
        with pytest.raises(BadRequestError, match="is not a port"):
            parse_ports(text)
