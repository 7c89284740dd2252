"""The examples of the wheel are those of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["train.py", "job.yaml"])
def test_the_wheel_carries_the_digits_example_as_it_is(name: str) -> None:
    """`orch demo` runs the same script that the repository shows."""
    carried = ROOT / "orchestrator" / "data" / "digits" / name
    assert carried.read_bytes() == (ROOT / "examples" / "digits" / name).read_bytes()
