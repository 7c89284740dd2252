"""Instruction counts: the results that are compared with each other, and that every hot path still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import hot_paths

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize("name", hot_paths.PATHS)
def test_every_hot_path_runs(name: str) -> None:
    hot_paths.main(name, 1)
