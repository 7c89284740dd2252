"""The one form of numbers, sizes, durations and times."""

from __future__ import annotations

import math
import time

import pytest

from orchestrator.units import age, clock, duration, number, percent, plural, size, spreadsheet


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (99.9, "99s"), (100, "1m"), (5939, "98m"), (5940, "1h"), (172799, "47h"), (172800, "2d")],
)
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (math.inf, ""),
        (-1.0, "0s"),
        (0.4, "400ms"),
        (0.0123, "12.3ms"),
        (0.00041, "0.41ms"),
        (0.9996, "1s"),
        (3.44, "3.4s"),
        (9.97, "10s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (80, "1m20s"),
        (3600, "1h"),
        (90000, "25h"),
        (180000, "2d02h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, ""), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2 * 1024**4, "2.0 TiB")],
)
def test_size(count: float | None, text: str) -> None:
    assert size(count) == text


def test_counts() -> None:
    assert [number(value) for value in (None, 2.0, 0.5, 12480)] == ["", "2", "0.5", "12480"]
    assert [plural(1, "GPU"), plural(0.5, "GPU"), plural(1234567, "entry", "entries")] == [
        "1 GPU",
        "0.5 GPUs",
        "1234567 entries",
    ]
    assert [percent(None), percent(0.416)] == ["", "42%"]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (12345.6, 4, "12346"),
        (9999.6, 4, "10000"),
        (1234.5, 4, "1234"),
        (99.97, 2, "100"),
        (-477.3, 2, "-477"),
        (0.51402, 4, "0.514"),
        (0.00012, 4, "0.00012"),
        (0.00001, 4, "1e-05"),
        (0.0, 4, "0"),
        (float("inf"), 4, "inf"),
        (float("nan"), 4, "nan"),
        (3e20, 4, "3e+20"),
    ],
)
def test_a_number_has_no_exponent_where_digits_show_it(value: float, digits: int, text: str) -> None:
    assert number(value, digits) == text


def test_clock_has_a_date_unless_it_is_today() -> None:
    assert clock(None) == ""
    assert len(clock(time.time())) == len("14:30:00")
    assert clock(0.0).startswith(("1970-01-01", "1969-12-31"))
    assert len(clock(time.time(), seconds=False)) == len("14:30")


def test_clock_shows_milliseconds_where_asked() -> None:
    assert clock(time.time() // 1 + 0.25, fraction=True).endswith(".250")


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    assert [spreadsheet(value) for value in ("=1+1", "-x", "@y", "text", "", -1.5)] == [
        "'=1+1",
        "'-x",
        "'@y",
        "text",
        "",
        -1.5,
    ]
