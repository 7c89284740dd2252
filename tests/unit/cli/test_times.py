"""Times that people type on the command line."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.errors import BadRequestError
from orchestrator.cli.times import parse_span, parse_span_within, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        (" 1w ", 604800),
        ("0s", 0),
        ("200ms", 0.2),
    ],
)
def test_spans_as_people_type_them(text: str, seconds: float) -> None:
    assert parse_span(text, "--x") == seconds


@pytest.mark.parametrize("text", ["", " ", "h", "5x", "-5m", "1h30", "1..5h", ".", "5 m", "١m", "1e3", "nan", "inf"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(BadRequestError, match="--x") as caught:
        parse_span(text, "--x")
    assert "1h30m" in caught.value.hint


@pytest.mark.parametrize("text", ["1", "0", "1.5"])
def test_a_span_needs_its_unit(text: str) -> None:
    with pytest.raises(BadRequestError, match="has no unit") as caught:
        parse_span(text, "--x")
    assert f"write {text}s" in caught.value.hint


def test_a_span_within_bounds() -> None:
    assert parse_span_within("1m", "--x", least=1.0, most=60.0) == 60.0
    for text in ("500ms", "61s"):
        with pytest.raises(BadRequestError, match="out of range") as caught:
            parse_span_within(text, "--x", least=1.0, most=60.0)
        assert caught.value.hint == "write 1s to 1m"


@given(st.text(max_size=12))
def test_any_text_is_a_span_or_one_error(text: str) -> None:
    try:
        seconds = parse_span(text, "--x")
    except BadRequestError:
        return
    assert math.isfinite(seconds)
    assert seconds >= 0


def test_times() -> None:
    now = 1_800_000_000.0
    assert parse_time("2h", "--since", now) == now - 7200
    assert parse_time("2026-11-20", "--since", now) == time.mktime((2026, 11, 20, 0, 0, 0, 0, 0, -1))
    assert parse_time("2026-11-20T14:30", "--since", now) == time.mktime((2026, 11, 20, 14, 30, 0, 0, 0, -1))
    with pytest.raises(BadRequestError, match="not a time"):
        parse_time("yesterday", "--since", now)
