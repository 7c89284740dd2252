"""Numbers, times and foreign text."""

from __future__ import annotations

import math

import pytest

from orchestrator.web import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (math.inf, ""), (-1.0, "0.0s"), (1.25, "1.2s"), (59.6, "1m00s"), (3600.0, "1h00m"), (2e5, "2d07h")],
)
def test_spans(seconds: float | None, text: str) -> None:
    assert words.span(seconds) == text


def test_ages_change_seldom() -> None:
    assert [words.age(at) for at in (0.0, 4.0, 7.0, 61.0, 7300.0, 3e5)] == ["0s", "0s", "5s", "1m", "2h", "3d"]


def test_numbers_and_sizes() -> None:
    assert [
        words.number(value) for value in (None, 3.0, 12480, 98765.4, 0.00027, 2.3127, float("inf"), float("nan"))
    ] == [
        "",
        "3",
        "12,480",
        "98,765",
        "0.00027",
        "2.313",
        "inf",
        "nan",
    ]
    assert [words.size(count) for count in (None, 5, 2048, 3 * 2**30, 2**41)] == [
        "",
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert [words.milliseconds(value) for value in (None, 0.0123, 0.412)] == ["", "12.3 ms", "412 ms"]
    assert [words.level(ratio) for ratio in (None, -1.0, 0.0, 0.5, 2.0)] == [None, 0, 0, 4, 8]


def test_foreign_text_is_one_line_that_steers_nothing() -> None:
    assert words.clean("a\nb\x1b[0m\u202e") == "a b\ufffd[0m\ufffd"


def test_balance() -> None:
    assert words.balance_text(None) == words.balance_text({"quantities": {}}) == ""
    both = {"utilization": {"cv": 0.02}, "power": {"cv": 0.16}}
    assert words.balance_text({"band": "fair", "quantities": both, "silent": ["x"]}) == "fair (power CV 16%), 1 silent"
