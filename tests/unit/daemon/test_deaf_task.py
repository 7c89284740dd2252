"""A background task that ignores its cancellation does not keep the daemon from ending."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.stack import PATIENCE_SECONDS

SCRIPT = """
import asyncio, os, sys
from orchestrator.api.launch import ServeOptions
from orchestrator.daemon.bootstrap import build
from orchestrator.daemon.process import serve
from orchestrator.spec.settings import Settings

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

def parts(*args):
    made = build(*args)

    async def start():
        made.background.spawn(deaf())
        await asyncio.sleep(0)
        made.background.failure = ValueError("what it died of")
        made.daemon.stop()

    made.daemon.start, made.background._end_seconds = start, 0.2
    return made

serve.build = parts
sys.exit(serve.serve(Settings.from_environ(os.environ), ServeOptions(read_listen="")))
"""


def test_it_is_named_and_left_behind_and_what_the_daemon_died_of_is_told(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "ORCH_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "daemon.task_does_not_end" in done.stderr
    assert "ValueError: what it died of" in done.stderr
    assert not (home / "run/orch.sock").exists()
