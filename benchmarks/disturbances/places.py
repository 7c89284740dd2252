"""Places where jobs are disturbed: a Ray of one node that orch starts, or a cluster of three, each with the processes that can be hit there."""

from __future__ import annotations

import contextlib
import random  # noqa: TC003 - in an annotation that runs
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest

from benchmarks.disturbances.abuses import ABUSES, full_disk, hung_connect
from orchestrator.runtime.cluster.head import of_session
from tests.support.cluster import RayCluster
from tests.support.disks import small_disk
from tests.support.processes import actor_pids, command_line, parent
from tests.support.stack import Stack, process_gone, wait_until

if TYPE_CHECKING:
    import psutil

NODES: Final = 3
DISK_MEBIBYTES: Final = 1024
ORPHANED: Final = 1  # the parent of an orphaned process


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that can be hit. ``carries``: the attempt ends with it, so that a further step of that attempt is no recovery."""

    pid: int
    carries: bool = False


Victims: TypeAlias = Mapping[str, Callable[[], Victim | None]]
"""Functions that find the process of each kind; they return None where there is none at the moment."""


class OneNode:
    """A home that starts Ray itself: orch has to restart every part of it that is killed."""

    only_frozen: Final = frozenset[str]()
    """Kinds of process that are never ended."""

    resources: Mapping[str, Any] = {}
    """Resources that jobs request besides ranks."""

    options: Mapping[str, Any] = {}
    """Options of the script."""

    abuses: Mapping[str, Callable[[Stack, random.Random], None]] = {}
    """What is done to it besides signals."""

    def __init__(self) -> None:
        self._disk = contextlib.ExitStack()
        self.abuses = dict(ABUSES)
        try:  # a disk that can be filled
            parent = Path(self._disk.enter_context(tempfile.TemporaryDirectory(prefix="orch-t-")))
            self.stack = Stack(home=self._disk.enter_context(small_disk(parent, DISK_MEBIBYTES)))
        except pytest.skip.Exception as why:
            print(f"no full disk: {why}", file=sys.stderr)
            del self.abuses["full disk"]
            self.stack = Stack()

    def start(self) -> None:
        """Start a daemon, and wait until it answers."""
        self.stack.up()

    def replace_ended(self, ended: Collection[int]) -> None:
        """Replace those of the ``ended`` processes that orch does not."""

    def victims(self, job_id: str, dice: random.Random) -> Victims:
        """Return the processes that a job depends on."""
        stack = self.stack
        return {
            **_of_job(stack, job_id, dice),
            "agent": lambda: _agent([stack.head_pids()["raylet"]], dice),
            "raylet": lambda: Victim(stack.head_pids()["raylet"], carries=True),
            "control store": lambda: Victim(stack.head_pids()["gcs_server"]),
        }

    def processes(self) -> list[psutil.Process]:
        """Return all processes that belong to it, Ray's included."""
        return self.stack.processes()

    def free_of(self, pids: Collection[int]) -> None:
        """Wait until nothing of these ended processes is left on a GPU."""

    def held_elsewhere(self) -> Mapping[str, float]:
        """Return the resources that its processes hold besides memory of the machine and files."""
        return {}

    def close(self) -> None:
        """End all of it."""
        self.stack.close()
        self._disk.close()


class OneGpu(OneNode):
    """A home with jobs that keep their state on this machine's first NVIDIA GPU, of which each rank has a share."""

    resources: Mapping[str, Any] = {"resources_per_worker": {"gpu": 0.5, "cpu": 0.1}}
    options: Mapping[str, Any] = {"gpu": True}

    def free_of(self, pids: Collection[int]) -> None:
        """Wait until NVML lists none of them."""
        wait_until("the job's memory of the GPU is free", lambda: not gpu_memory().keys() & set(pids))

    def held_elsewhere(self) -> Mapping[str, float]:
        """Return the bytes of the GPU that NVML reports for its processes."""
        mine = {process.pid for process in self.processes()}
        return {"gpu_bytes": sum(held for pid, held in gpu_memory().items() if pid in mine)}


def gpu_memory() -> dict[int, int]:
    """Return the bytes that NVML reports for each process with a context on the first NVIDIA GPU."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {each.pid: each.usedGpuMemory or 0 for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


class ThreeNodes:
    """A daemon in an existing cluster with a head and three nodes, over which it spreads its jobs.

    A node whose raylet has ended is replaced by a new one, as the owner of a cluster would. Without its control store the
    whole cluster ends, so the control store is only frozen.
    """

    only_frozen: Final = frozenset({"control store"})
    resources: Final[Mapping[str, Any]] = {"placement_strategy": "STRICT_SPREAD"}
    options: Final[Mapping[str, Any]] = {}
    abuses: Final[Mapping[str, Callable[[Stack, random.Random], None]]] = {
        name: abuse for name, abuse in ABUSES.items() if abuse not in (full_disk, hung_connect)
    }

    def __init__(self) -> None:
        self.cluster = RayCluster(workers=NODES)
        self.stack = Stack(extra=("--ray-address", self.cluster.address), environ=self.cluster.environ)

    def start(self) -> None:
        """Start a daemon, and wait until it answers and has every node."""
        self.stack.up()
        self._all_known()

    def _all_known(self) -> None:
        wanted = {node.id for node in self.cluster.workers}

        def known() -> bool:
            return wanted <= {node.id for node in self.stack.client.nodes() if node.state == "READY"}

        wait_until("the daemon knows the nodes", known)

    def replace_ended(self, ended: Collection[int]) -> None:
        """Start a node for each whose raylet is among the ``ended`` processes."""
        raylets = [node.raylet for node in self.cluster.workers if node.raylet in ended]
        wait_until("the raylet has ended", lambda: all(map(process_gone, raylets)))
        self.cluster.keep(NODES)
        if raylets:
            self._all_known()

    def victims(self, job_id: str, dice: random.Random) -> Victims:
        """Return the processes that a job depends on."""
        cluster = self.cluster

        def raylet() -> Victim:
            node = dice.choice(cluster.workers)
            return Victim(node.raylet, carries=node.id in _places(self.stack, job_id))

        return {
            **_of_job(self.stack, job_id, dice),
            "agent": lambda: _agent([node.raylet for node in cluster.workers], dice),
            "raylet": raylet,
            "control store": lambda: Victim(next(p.pid for p in cluster.processes() if p.name() == "gcs_server")),
        }

    def processes(self) -> list[psutil.Process]:
        """Return all processes that belong to it, the cluster's included."""
        return list({one.pid: one for one in (*self.stack.processes(), *self.cluster.processes())}.values())

    def free_of(self, pids: Collection[int]) -> None:
        """Do nothing: its jobs have no GPU."""

    def held_elsewhere(self) -> Mapping[str, float]:
        """Return nothing, for the same reason."""
        return {}

    def close(self) -> None:
        """End all of it."""
        try:
            self.stack.close()
        finally:
            self.cluster.close()


Place: TypeAlias = OneNode | ThreeNodes
PLACES: Final[Mapping[str, Callable[[], Place]]] = {"node": OneNode, "gpu": OneGpu, "cluster": ThreeNodes}
"""Places by name."""


def _of_job(stack: Stack, job_id: str, dice: random.Random) -> Victims:
    def rank() -> int:
        return dice.choice([pid for pid in stack.pids(job_id) if pid] or [0])

    def keeper() -> int:
        pid = rank()
        keeper = parent(pid) if pid else 0
        return keeper if keeper != ORPHANED else 0

    return {
        "rank": lambda: _if_there(rank(), carries=True),
        "keeper": lambda: _if_there(keeper()),
        "actor": lambda: Victim(dice.choice(actor_pids(stack, job_id)), carries=True),
        "fork server": lambda: _if_there(dice.choice([p.pid for p in stack.processes() if _is_fork_server(p)] or [0])),
        "daemon": lambda: Victim(stack.daemon_pid()),
    }


def _if_there(pid: int, *, carries: bool = False) -> Victim | None:
    return Victim(pid, carries) if pid else None


def _places(stack: Stack, job_id: str) -> set[str]:
    """Return the nodes of the job's newest gang."""
    placed = [event for event in stack.client.events(job_id) if event.kind == "gang_placed"]
    return {seat["node_id"] for seat in placed[-1].body["seats"]}


def _agent(raylets: Collection[int], dice: random.Random) -> Victim | None:
    """Return the agent of one of these nodes; None where there is none."""
    agents = [process.pid for raylet in raylets for process in of_session(raylet) if _says(process, "NodeAgent")]
    return Victim(dice.choice(agents)) if agents else None


def _is_fork_server(process: psutil.Process) -> bool:
    return _says(process, "forkserver")


def _says(process: psutil.Process, text: str) -> bool:
    return any(text in part for part in command_line(process))
