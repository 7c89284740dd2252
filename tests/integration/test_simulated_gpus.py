"""Simulated GPUs under a real job: one rank computes, the other waits for it in an all-reduce, as on hardware."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.gpu.drivers.simulated import SimulatedAssignments, open_simulated, write_assignments
from orchestrator.gpu.load import LoadWindow, Quantity, balance

pytestmark = pytest.mark.rare

RANK = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
gradient = torch.ones(1000)
print("up", flush=True)
while True:
    if dist.get_rank() == 0:
        a = torch.randn(300, 300)
        for _ in range(300):
            a = torch.tanh(a @ a)
    dist.all_reduce(gradient)
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, "-c", RANK]
            running.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_a_waiting_rank_is_busy_and_only_power_tells(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    path = tmp_path / "simulated-gpus.json"
    write_assignments(path, {index: [process.pid] for index, process in enumerate(ranks)})
    readers = open_simulated(2, "node", SimulatedAssignments(path))
    windows = {reader.info.uuid: LoadWindow(3.0) for reader in readers}
    try:
        deadline = time.monotonic() + 300
        while True:
            for reader in readers:
                windows[reader.info.uuid].add(reader.read())
            now = time.monotonic()
            loads = {uuid: load for uuid, window in windows.items() if (load := window.load(now)) is not None}
            if len(loads) == 2 and min(load.utilization or 0.0 for load in loads.values()) > 0.85:
                result = balance(loads)
                utilization, power = result.spread(Quantity.UTILIZATION), result.spread(Quantity.POWER)
                assert utilization is not None
                assert power is not None
                assert utilization.cv < 0.1
                if power.cv > 0.2:  # a rank that computes but gets no CPU has low power too
                    break
            assert now < deadline, f"not both busy, one of them with waiting: {loads}"
            time.sleep(0.2)
        watts = [load.power for load in loads.values()]
        assert watts.index(max(watts, key=lambda power: power or 0.0)) == 0
    finally:
        for reader in readers:
            reader.close()
