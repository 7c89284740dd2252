"""Terminals: width, colour, encodings, control characters in text; and tables that fit."""

from __future__ import annotations

import io
from operator import itemgetter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.console import Console, clean, clip, display_width, steerless
from orchestrator.cli.render.table import Cell, Column, render_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Terminal(io.TextIOWrapper):
    """A stream that reports itself as a terminal."""

    def __init__(self, encoding: str = "utf-8", *, terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def console(environ: Mapping[str, str] | None = None, stream: Terminal | None = None) -> Console:
    stream = stream or Terminal(terminal=False)
    return Console(environ or {}, out=stream, err=stream)


@pytest.mark.parametrize(
    ("environ", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour_only_where_it_is_wanted(environ: dict[str, str], terminal: bool, colour: bool) -> None:
    found = console(environ, Terminal(terminal=terminal))
    assert found.colour is colour
    assert found.style("x", "red") == ("\x1b[31mx\x1b[0m" if colour else "x")
    assert found.err_style("x", "red") == found.style("x", "red")


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("5", 20), ("0", 10_000), ("wide", 10_000), ("", 10_000)])
def test_width(columns: str, width: int) -> None:
    assert console({"COLUMNS": columns}).width == width


def test_an_encoding_without_our_signs_gets_others() -> None:
    stream = Terminal("ascii")
    found = console({}, stream)
    assert found.glyphs.full == "#"
    found.print("straße …")
    found.print_error("größer")
    assert stream.text() == "stra?e ?\ngr??er\n"


def test_what_utf8_cannot_hold_is_replaced() -> None:
    stream = Terminal()
    console({}, stream).print("a\udcffb")
    assert stream.text() == "a?b\n"


@given(st.text())
def test_clean_leaves_nothing_that_steers_a_terminal(text: str) -> None:
    assert clean(text).isprintable()
    assert len(clean(text)) == len(text)


def test_clip_counts_wide_letters_twice() -> None:
    assert clip("漢字漢字", 5, "…") == "漢字…"
    assert clip("short", 5, "…") == "short"
    assert display_width("e\u0301") == 1


COLUMNS: tuple[Column[Sequence[str]], ...] = (
    Column("NAME", itemgetter(0), weight=100),
    Column("NOTE", itemgetter(1), weight=10),
    Column("EMPTY", itemgetter(2), weight=90),
    Column("COUNT", itemgetter(3), weight=50, right=True),
    Column("WHY", itemgetter(4), weight=80, shrink=True, least=8),
)
ROWS = [
    ["alpha", "n1", "", "7", "because of a long story"],
    ["b", "n2", "", "1234567", "short"],
]


def table(width: int) -> list[str]:
    return render_table(console({"COLUMNS": str(width)}), COLUMNS, ROWS)


def test_a_table_shrinks_then_drops_what_matters_least() -> None:
    assert table(38) == [
        "NAME   NOTE    COUNT  WHY",
        "alpha  n1          7  because of a lo…",
        "b      n2    1234567  short",
    ]
    assert table(28)[1] == "alpha        7  because of…"
    assert table(20)[1] == "alpha  because of a…"


@given(st.integers(20, 120), st.lists(st.lists(st.text(max_size=30), min_size=5, max_size=5), max_size=4))
def test_no_line_is_wider_than_the_terminal(width: int, texts: list[list[str]]) -> None:
    found = console({"COLUMNS": str(width)})
    lines = render_table(found, COLUMNS, texts)
    assert all(display_width(line) <= width for line in lines)


def test_a_cell_shows_values_of_any_kind_on_one_line() -> None:
    column: Column[object] = Column("A", lambda value: value, styles=("bold",))
    assert [column.cell(value) for value in (7, None, "a\n\x1b[31mb")] == [
        Cell("7", ("bold",)),
        Cell("", ("bold",)),
        Cell("a ?[31mb", ("bold",)),
    ]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\x9b31m \u202eevil\u2066 \r over\tend"


def test_text_of_others_does_not_steer_a_terminal() -> None:
    stream = Terminal()
    found = console({}, stream)
    found.print(found.style("ok", "bold", "red") + HOSTILE)
    found.print_error(HOSTILE)
    shown = "^[]0;title^G^[[2J^[[8mhidden<009B>31m <202E>evil<2066> ^M over\tend\n"
    assert stream.text() == "\x1b[1;31mok\x1b[0m" + shown + shown


def test_raw_goes_through_to_a_terminal() -> None:
    stream = Terminal()
    console({}, stream).print(HOSTILE, raw=True)
    assert stream.text() == HOSTILE + "\n"


@given(st.text())
def test_whatever_is_printed_nothing_but_our_styles_is_left(text: str) -> None:
    for keep in (True, False):
        left = steerless(text, keep_styles=keep)
        for style in ("\x1b[1m", "\x1b[31m", "\x1b[0m"):
            left = left.replace(style, "")
        assert "\x1b" not in left
        assert not any(char in left for char in "\r\x07\x08\x7f\x9b\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u200f")
