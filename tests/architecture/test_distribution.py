"""Distribution of the suite's files: a process continues with the daemon that it has, and long files come first."""

from __future__ import annotations

from pathlib import Path

from tests.support.distribution import SECONDS

TESTS = Path(__file__).parents[1]


def test_every_file_that_is_called_long_is_there() -> None:
    assert SECONDS.keys() <= {path.name for path in TESTS.rglob("test_*.py")}
