"""Resources that a process holds beyond those that it held before."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from orchestrator.runtime.ranks.process.footprint import MOST_GROWN_BYTES, Footprint


def test_what_was_there_before_does_not_count() -> None:
    before = Footprint.now()
    assert before.grown() == ()


def test_files_pipes_and_processes_are_named(tmp_path: Path) -> None:
    before = Footprint.now()
    read_end, write_end = os.pipe()
    with (tmp_path / "log").open("wb"):
        assert set(before.grown()) == {str(tmp_path / "log"), os.readlink(f"/proc/self/fd/{read_end}")}
    os.close(read_end)
    os.close(write_end)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert f"process {child.pid}" in before.grown()
        child.communicate(b"\n")
    assert before.grown() == ()


def test_memory_counts_beyond_a_limit() -> None:
    now = Footprint.now()
    less = replace(now, memory_bytes=now.memory_bytes - 2 * MOST_GROWN_BYTES)
    (found,) = less.grown()
    assert found.endswith(" bytes")
