"""Helpers of several commands: a command that receives SIGTERM cleans up before it ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from orchestrator.bench.processes import RankProcesses
from orchestrator.cli.commands.shared import ended_in_order

if TYPE_CHECKING:
    from pathlib import Path


def test_sigterm_removes_the_temporary_files_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)

    def benchmark() -> None:
        with ended_in_order(), RankProcesses(tmp_path / "logs", {}):
            assert [path.name.startswith("orch-bench-") for path in tmp_path.iterdir()] == [True]
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        benchmark()
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
