"""Ages, levels and foreign text."""

from __future__ import annotations

from orchestrator.web import rendering


def test_ages_change_seldom() -> None:
    assert [rendering.age(at) for at in (0.0, 4.0, 7.0, 61.0, 7300.0, 3e5)] == ["0s", "0s", "5s", "60s", "2h", "3d"]


def test_levels() -> None:
    assert [rendering.level(ratio) for ratio in (None, -1.0, 0.0, 0.5, 2.0)] == [None, 0, 0, 4, 8]


def test_foreign_text_is_one_line_that_steers_nothing() -> None:
    assert rendering.clean("a\nb\x1b[0m\u202e") == "a b\ufffd[0m\ufffd"


def test_balance() -> None:
    assert rendering.balance_text(None) == rendering.balance_text({"quantities": {}}) == ""
    both = {"utilization": {"cv": 0.02}, "power": {"cv": 0.16}}
    assert (
        rendering.balance_text({"band": "fair", "quantities": both, "silent": ["x"]}) == "fair (power CV 16%), 1 silent"
    )
