"""The jobs of the tests of a real GPU, and NVML's own values for a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.stack import Stack

SCRIPTS = Path(__file__).with_name("scripts")
MIB = 2**20


class Memory:
    """Reads a GPU's memory from NVML itself."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def used(self) -> int:
        """Return the bytes in use on the whole GPU."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def total(self) -> int:
        """Return the bytes of the whole GPU."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def pids(self) -> set[int]:
        """Return the processes that have a context on the GPU, except that of the tests."""
        return {each.pid for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)} - {os.getpid()}

    def close(self) -> None:
        """Shut the library down."""
        self._nvml.nvmlShutdown()


def submit(stack: Stack, directory: Path, script: str, *arguments: object, **keys: object) -> str:
    """Submit a script of this folder on one GPU."""
    spec = {
        "version": 1,
        "name": script,
        "entrypoint": " ".join(["python", "train.py", *map(str, arguments)]),
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 1, "cpu": 1}},
        "retry": {"backoff": {"initial": "0s", "max": "0s"}},
        **keys,
    }
    return stack.submit(json.dumps(spec), directory / script, train=(SCRIPTS / f"{script}.py").read_text())
