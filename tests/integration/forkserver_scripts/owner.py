"""Owner of a process through a lifeline, for a test to kill or freeze; with "stop" it first stops the process."""

import asyncio
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import ForkServerClient

socket, script, folder, order, *arguments = sys.argv[1:]
request = SpawnRequest(
    mode="script",
    target=script,
    args=tuple(arguments),
    cwd=folder,
    env=dict(os.environ),
    exit_record=str(Path(folder) / "exit.json"),
)
with open(os.devnull, "wb") as null:
    client = ForkServerClient(Path(socket))
    spawned = asyncio.run(client.spawn(request, stdout=null.fileno(), stderr=null.fileno()))
(Path(folder) / "keeper").write_text(str(spawned.keeper_pid))
if order == "stop":
    while not (Path(folder) / "ready").exists():
        time.sleep(0.01)
    spawned.lifeline.stop(timedelta(seconds=1))
    (Path(folder) / "stopping").touch()
while True:
    time.sleep(60)
