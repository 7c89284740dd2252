"""A node's health check, for real on this machine's devices and disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.faults import DevicesFailed, DevicesSilent, DeviceWrong, DiskUnwritable
from orchestrator.runtime.nodes.agent import check_node


def test_this_machine_is_healthy_and_nothing_is_left_behind(tmp_path: Path) -> None:
    assert asyncio.run(check_node(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "seconds", "problem"),
    [
        ("echo Boom >&2; exit 1", 60, DevicesFailed(said="Boom")),
        (
            """echo '{"device": "cuda:1", "operation": "multiply", "off": 0.5}'; echo done""",
            60,
            DeviceWrong(device="cuda:1", operation="multiply", off=0.5),
        ),
        ("echo something else; echo done", 60, DevicesFailed(said="something else")),
        ("exec sleep 600", 0.5, DevicesSilent(seconds=0.5)),
    ],
)
def test_devices_that_do_not_compute_are_told(tmp_path: Path, script: str, seconds: float, problem: Fact) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert asyncio.run(check_node(tmp_path, python=str(python), seconds=seconds)) == [problem]


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path) -> None:
    done = tmp_path / "python"
    done.write_text("#!/bin/sh\necho done\n")
    done.chmod(0o755)
    (problem,) = asyncio.run(check_node(tmp_path / "gone", python=str(done), seconds=60))
    assert problem == DiskUnwritable(path=str(tmp_path / "gone"), said="No such file or directory")
