"""Ranks that are killed, stopped, faulty or missing: their exit codes, output and results."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_ranks import run, start, wait_until


def result(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("undisturbed")
    for status, out, err in run("resumable.py", place / "out.pt", cwd=place):
        assert status == 0, out + err
    return result(place / "out.pt")


def test_stopped_and_killed_and_gone_on_to_the_bit(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """After SIGTERM to one rank both save the same step and exit with 143; SIGKILL follows; the same command resumes."""
    with start("resumable.py", tmp_path / "out.pt", "--pause", 0.003, cwd=tmp_path) as ranks:
        wait_until(lambda: checkpoints(tmp_path), "the first checkpoint")
        ranks.signal(signal.SIGTERM, 1)
        ended = ranks.wait()
    assert [status for status, _, _ in ended] == [143, 143]
    stopped = json.loads(ended[0][1].splitlines()[-1])
    assert (stopped["event"], stopped["saved"]) == ("train.stop", True)
    assert checkpoints(tmp_path)[-1] == f"step-{stopped['step']:012d}-a1"

    later = f"step-{stopped['step'] // 5 * 5 + 10:012d}-a1"
    with start("resumable.py", tmp_path / "out.pt", "--pause", 0.003, cwd=tmp_path) as ranks:
        wait_until(lambda: later in checkpoints(tmp_path), later)
        ranks.signal(signal.SIGKILL)
        ended = ranks.wait()
    assert json.loads(ended[0][1].splitlines()[0])["resumed_step"] == stopped["step"]

    last = run("resumable.py", tmp_path / "out.pt", cwd=tmp_path)
    assert [status for status, _, _ in last] == [0, 0], last
    assert json.loads(last[0][1].splitlines()[0])["resumed_step"] >= stopped["step"] // 5 * 5 + 10
    found = result(tmp_path / "out.pt")
    assert found["losses"] == undisturbed["losses"]
    for name, value in found["state"].items():
        assert torch.equal(value, undisturbed["state"][name]), name


@pytest.mark.rare
def test_an_error_of_one_rank_is_shown_once_by_rank_0_and_every_rank_ends(tmp_path: Path) -> None:
    """Rank 1 cannot read its first sample, while rank 0 waits in a collective."""
    (first, _, shown), (second, _, hidden) = run("resumable.py", tmp_path / "out.pt", "--fail", "data", cwd=tmp_path)
    assert (first, second) == (1, 1)
    for word in ("DataError", "rank 1: reading batch 0 of epoch 0 failed: OSError: image-", "truncated"):
        assert word in shown.splitlines()[-1]
    assert shown.count("Traceback") == 1
    assert "Error" not in hidden
    assert "Traceback" not in hidden
