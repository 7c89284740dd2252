"""The contract of runtimes, run on Ray in a process of its own: Ray reads its settings from the environment once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rare

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(700)  # a suite of its own
def test_the_runtime_on_ray_holds_the_contract_of_runtimes() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "tests/contract/test_ray.py",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as session:
        try:
            told, _ = session.communicate(timeout=680)
        except subprocess.TimeoutExpired:
            os.killpg(session.pid, signal.SIGINT)  # its fixtures end what they have started
            told, _ = session.communicate()
    assert session.returncode == 0, told[-20_000:]
