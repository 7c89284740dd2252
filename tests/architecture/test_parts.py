"""The program that runs the parts of the suite: groups in order, every part despite failures, and a list at the end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import PATIENCE_SECONDS, wait_until

PARTS = Path(__file__).parents[2] / ".ci" / "parts"
MAKE = """#!/usr/bin/env bash
case $2 in
  bad) echo "FAILED tests/test_one.py::test_it - broken"; exit 2 ;;
  first) until [[ -e {folder}/second ]]; do sleep 0.01; done ;;
  second) touch {folder}/second ;;
  endless) trap 'touch {folder}/ended; exit 1' INT; touch {folder}/begun; while :; do sleep 0.01; done ;;
esac
echo "made $2"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    make = tmp_path / "make"
    make.write_text(MAKE.format(folder=tmp_path))
    make.chmod(0o700)
    return {**os.environ, "MAKE": str(make)}


def run(environ: dict[str, str], *groups: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PARTS, *groups], env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )


def test_parts_of_a_group_are_made_at_the_same_time_and_shown_one_after_the_other(environ: dict[str, str]) -> None:
    done = run(environ, "one", "first+second")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("made ")] == [
        "made one", "made second", "made first"
    ]  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["== all parts: one first second", "nothing failed"]


@pytest.mark.parametrize("groups", [("bad", "one"), ("bad+one",), ("one+bad",)])
def test_what_failed_is_listed_at_the_end_and_stops_no_other_part(
    environ: dict[str, str], groups: tuple[str, ...]
) -> None:
    done = run(environ, *groups)
    assert done.returncode == 1
    assert "made one" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["bad FAILED", "  FAILED tests/test_one.py::test_it - broken"]


def test_an_interruption_reaches_what_runs_beside_the_last_part(environ: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(
        [PARTS, "endless+first"], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as parts:
        wait_until("it runs", (tmp_path / "begun").exists)
        parts.send_signal(signal.SIGTERM)
        (tmp_path / "second").touch()  # the shell handles a signal when the part that it waits for has ended
        assert parts.wait(timeout=PATIENCE_SECONDS) == 128 + signal.SIGTERM
    assert (tmp_path / "ended").exists()
