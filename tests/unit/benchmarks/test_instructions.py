"""Instruction counts: the results that are compared with each other, and that every hot path still runs."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import hot_paths, instructions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", hot_paths.PATHS)
def test_every_hot_path_runs(name: str) -> None:
    hot_paths.main(name, 1)


def test_each_path_has_a_number_of_repeats() -> None:
    assert set(instructions.REPEATS) == set(hot_paths.PATHS)


def test_a_rise_of_more_than_three_percent_is_told() -> None:
    before = {"parse": 1000, "fold": 1000, "write": 1000}
    now = {"parse": 1030, "fold": 1031, "write": 500, "new": 5}
    (line,) = instructions.rises(now, before)
    assert line.startswith("fold: 1,031 instructions, +3.1%")


def test_only_results_of_the_same_counter_and_python_are_compared(tmp_path: Path) -> None:
    def write(date: str, counter: str, python: str, **counts: int) -> None:
        result: dict[str, Any] = {"counter": counter, "machine": {"python": python}, "instructions": counts}
        (tmp_path / f"{date}-instructions.json").write_text(json.dumps(result))

    python = platform.python_version()
    assert instructions.newest("callgrind", tmp_path) is None
    write("2026-01-01", "callgrind", python, parse=1)
    write("2026-01-02", "callgrind", python, parse=2)
    write("2026-01-03", "perf", python, parse=3)
    write("2026-01-04", "callgrind", "2.7.18", parse=4)
    found = instructions.newest("callgrind", tmp_path)
    assert found is not None
    assert found["instructions"] == {"parse": 2}
