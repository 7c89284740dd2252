"""docs/trackers.md: its examples are valid jobs, and it lists every tracker and every name that is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.analysis.trackers.records import GpuWindow, gpu_values
from orchestrator.spec.job import parse_job

DOCUMENT = (Path(__file__).parents[4] / "docs" / "trackers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_is_a_job_with_trackers(block: str) -> None:
    assert parse_job(block).trackers


def test_every_name_that_is_written_stands_there() -> None:
    window = GpuWindow(utilization=[0.5], memory_bytes=[1.0], watts=[1.0], celsius=[1.0])
    other = GpuWindow(utilization=[0.6], memory_bytes=[2.0], watts=[2.0], celsius=[2.0])
    written = gpu_values([(0, window), (1, other)])
    assert len(written) == 18
    assert [name for name in written if not name.startswith("gpu_1_") and f"`{name}`" not in DOCUMENT] == []


def test_every_tracker_and_its_packages_stand_there() -> None:
    for one in TRACKERS.values():
        assert f"`{one.name}`" in DOCUMENT
        assert all(package in DOCUMENT for package in one.packages.values())
        assert all(f"`{prefix}`" in DOCUMENT for prefix in one.prefixes)
