"""A start of Ray that fails is tried again with a line for each, within limits that grow with the machine's load."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from orchestrator.runtime.cluster.head.processes import ray_environment
from orchestrator.runtime.cluster.head.start import START_TRIES, ClusterError, launch_head, scaled
from structlog.testing import capture_logs

from tests.support.processes import all_gone

if TYPE_CHECKING:
    from pathlib import Path

STARTER = """
import json, os, subprocess, sys, time
options = json.loads(sys.argv[1])
with open(options["tries"], "a") as file:
    file.write("x")
tries = os.path.getsize(options["tries"])
sleep = [sys.executable, "-c", "import time; time.sleep(1000)", options["session"] + "/socket"]
process = subprocess.Popen(sleep, start_new_session=True)
with open(options["pids"], "a") as file:
    file.write(f"{process.pid}\\n")
if tries <= options["fails"]:
    print("some traceback", file=sys.stderr)
    sys.exit("the port is taken")
if options["hangs"]:
    time.sleep(1000)
print(json.dumps({"gcs_address": "127.0.0.1:1", "session_dir": options["session"], "pids": {"gcs_server": [process.pid]}}))
"""


class Starter:
    """A stand-in for Ray's starter, with one process in a session of its own."""

    def __init__(self, folder: Path, *, fails: int = 0, hangs: bool = False) -> None:
        self.temp_dir = folder / "s"
        self.temp_dir.mkdir()
        self.pids_file = folder / "pids"
        self.environ = ray_environment(folder / "token")
        self.options = {
            "tries": str(folder / "tries"),
            "pids": str(self.pids_file),
            "session": str(self.temp_dir / "session_1"),
            "fails": fails,
            "hangs": hangs,
        }

    def launch(self, **options: Any) -> str:
        starter = (sys.executable, "-c", STARTER)
        launched = launch_head(self.options, self.temp_dir, os.environ | self.environ, starter=starter, **options)
        return asyncio.run(launched).gcs_address

    def pids(self) -> list[int]:
        return [int(line) for line in self.pids_file.read_text().split()]


def test_a_start_that_fails_is_tried_again_and_told_in_one_line(tmp_path: Path) -> None:
    starter = Starter(tmp_path, fails=START_TRIES - 1)
    try:
        with capture_logs() as lines:
            assert starter.launch() == "127.0.0.1:1"
        assert [line["tried"] for line in lines] == list(range(1, START_TRIES))
        assert all("the port is taken" in line["reason"] and "exc_info" not in line for line in lines)
        *failed, kept = starter.pids()
        all_gone("what failed starts began", failed)
        assert psutil.pid_exists(kept)
    finally:
        for pid in starter.pids():
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()


def test_a_start_that_never_works_leaves_no_process(tmp_path: Path) -> None:
    starter = Starter(tmp_path, fails=1000)
    with pytest.raises(ClusterError, match="the port is taken"):
        starter.launch()
    assert len(starter.pids()) == START_TRIES
    all_gone("what failed starts began", starter.pids())


def test_a_start_that_hangs_is_given_up_without_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    starter = Starter(tmp_path, hangs=True)
    with pytest.raises(ClusterError, match="did not start within 3 s"):
        starter.launch(tries=1, limit=lambda: 3.0)
    gc.collect()
    all_gone("what the start began", starter.pids())
    assert "Event loop is closed" not in capfd.readouterr().err


def test_limits_grow_with_the_load() -> None:
    assert scaled(60.0, load=0.1, cpus=2) == 60.0
    assert scaled(60.0, load=2.0, cpus=2) == 60.0
    assert scaled(60.0, load=6.0, cpus=2) == 180.0
    assert scaled(60.0, load=1000.0, cpus=2) == 300.0
