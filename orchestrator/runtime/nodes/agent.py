"""The node agent, one detached actor per node: reports the inventory, runs fork servers, confirms that ranks ended, checks the node's health.

Ray restarts it when it dies; ranks are not affected. A new agent finds all state again: fork servers by their sockets,
process trees by the locks that their keepers hold.

The health check is real work (every device multiplies and reduces, the disk returns what was written), in its own process with a deadline:
a driver that hangs delays nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from orchestrator import __version__
from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.faults import (
    DevicesFailed,
    DevicesSilent,
    DeviceWrong,
    DiskDamaged,
    DiskUnwritable,
    DriverProblem,
)
from orchestrator.gpu.drivers.simulated import FILE_NAME, write_assignments
from orchestrator.private_files import PRIVATE_UMASK, make_private, remove_private
from orchestrator.runtime import remote
from orchestrator.runtime.deadline import process_ended
from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.nodes.directories import clear_ended_nodes, clear_pages, fork_socket, raylet_of
from orchestrator.runtime.nodes.files import FAILURES, NodeFiles
from orchestrator.runtime.pools import in_own_thread
from orchestrator.runtime.spawn.client import ForkServerClient, ForkServerError, Hello, start_fork_server
from orchestrator.runtime.spawn.rank_locks import clear_locks, end_tree, lock_is_clear, rank_lock_path
from orchestrator.spec.plain_files import read_plain

PRELOAD = ("orchestrator.train.script.training_context", "safetensors.torch")
NODE_HOME = "ORCH_NODE_HOME"
SERVER_PATIENCE = timedelta(seconds=5)
"""How long a fork server may take to end; one that is stopped, or still warms up, is killed then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """A GPU of a node, as placement needs it."""

    index: int
    uuid: str
    model: str
    simulated: bool
    vendor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Report of a node's agent. ``home`` holds jobs' files on the node: it is the daemon's own where that is shared."""

    node_id: str
    hostname: str
    agent_pid: int
    version: str
    python: str
    node_dir: str
    simulated_node: str
    home_shared: bool
    home: str
    gpus: tuple[NodeGpu, ...]
    problems: tuple[str, ...]


class NodeAgent:
    """The agent of one node. ``home_token`` is a file of the daemon's node; a node that reads it shares the home.

    A node started with ``ORCH_NODE_HOME`` keeps jobs' files there, even if it also sees the daemon's home.
    """

    def __init__(self, *, node_id: str, node_dir: str, simulate_gpus: int, home_token: tuple[str, str]) -> None:
        os.umask(PRIVATE_UMASK)  # an existing cluster may have another umask
        linux.adjust_oom_score(0)  # Ray's own setting, on a cluster that is not orch's, would make it the first victim
        self._node_id = node_id
        self._node_dir = make_private(Path(node_dir))
        self._raylet = raylet_of(self._node_dir)
        self._simulate = simulate_gpus
        self._home_token = home_token
        self._files = NodeFiles(_own_home(self._node_dir))
        self._watched: dict[Path, asyncio.Task[None]] = {}
        # Ray restarts an agent by creating it anew: the new one has no record of the servers to keep alive.
        self._adopting = asyncio.get_running_loop().create_task(self._adopt())

    async def answer(self, method: str, message: bytes) -> bytes:
        """Call a method for the daemon."""
        return await remote.answer(self, method, message)

    async def answer_files(self, method: str, message: bytes) -> bytes:
        """Call a method of this node's ``NodeFiles`` for the daemon."""
        return await remote.answer(self._files, method, message, FAILURES)

    @remote.called
    async def report(self) -> NodeReport:
        """Return the node's inventory. GPUs are enumerated anew each time."""
        gpus, problems = await asyncio.to_thread(self._survey)
        shared = await self.reads(*self._home_token) and not os.environ.get(NODE_HOME)
        return NodeReport(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            agent_pid=os.getpid(),
            version=__version__,
            python=sys.executable,
            node_dir=str(self._node_dir),
            simulated_node=self._simulated_node(),
            home_shared=shared,
            home=str(Path(self._home_token[0]).parents[1] if shared else self._files.paths.home),
            gpus=gpus,
            problems=problems,
        )

    @remote.called
    async def reads(self, path: str, text: str) -> bool:
        """Whether a file with that text exists: then this node shares its directory."""
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(read_plain, Path(path), len(text)) == text.encode()
        return False

    @remote.called
    async def keep_only(self, live: Collection[str], *, shared: bool) -> None:
        """Remove the files on this node of jobs that are not ``live``; not in a home that is ``shared``."""
        await asyncio.to_thread(clear_pages, self._node_dir, live)
        await asyncio.to_thread(clear_locks, self._node_dir, live)
        await asyncio.to_thread(clear_ended_nodes, self._node_dir)
        if not shared:
            await asyncio.to_thread(self._files.keep_only, live)

    @remote.called
    async def check(self) -> tuple[Fact, ...]:
        """Check the node's health: devices compute, the disk stores, the driver answers. See ``check_node``."""
        problems = await check_node(self._node_dir)
        _, driver_problems = await asyncio.to_thread(self._survey)
        return (*problems, *(DriverProblem(said=text) for text in driver_problems))

    def _survey(self) -> tuple[tuple[NodeGpu, ...], tuple[str, ...]]:
        from orchestrator.gpu.drivers.inventory import survey

        found = survey(simulate=self._simulate, node=self._simulated_node() if self._simulate else None)
        try:
            gpus = tuple(
                NodeGpu(index=index, uuid=gpu.uuid, model=gpu.model, simulated=gpu.simulated, vendor=gpu.vendor.value)
                for index, gpu in enumerate(g for g in found.gpus if g.placeable)
            )
            return gpus, found.problems
        finally:
            found.close()

    def _simulated_node(self) -> str:
        """Return the base of simulated GPUs' UUIDs: several nodes of a test cluster may share a host name."""
        return self._node_id[:12]

    @remote.called
    async def assign(self, pids_by_gpu: dict[int, tuple[int, ...]]) -> None:
        """Record, for the simulation, which processes run on which simulated GPU."""
        await asyncio.to_thread(write_assignments, self._node_dir / FILE_NAME, pids_by_gpu)

    @remote.called
    async def fork_server(self, python: str) -> Hello:
        """Return a warm fork server for ``python``; started when missing, and restarted whenever it dies."""
        hello = await (await self._start(python)).hello()
        self._watch(python, hello.pid)
        return hello

    async def _adopt(self) -> None:
        """Keep existing fork servers alive, and that of this interpreter, which may have died with the last agent."""
        for path in (self._node_dir / "fork").glob("*.sock"):
            with contextlib.suppress(ForkServerError):
                hello = await ForkServerClient(path).hello()
                self._watch(hello.executable, hello.pid)
        own = fork_socket(self._node_dir, sys.executable)
        if own.exists() and own not in self._watched:
            with contextlib.suppress(ForkServerError):
                await self.fork_server(sys.executable)

    def _watch(self, python: str, pid: int) -> None:
        path = fork_socket(self._node_dir, python)
        if path not in self._watched or self._watched[path].done():
            self._watched[path] = asyncio.create_task(self._keep_alive(python, pid))

    async def _start(self, python: str) -> ForkServerClient:
        path = fork_socket(self._node_dir, python)
        log = path.with_suffix(".log")
        await asyncio.to_thread(start_fork_server, python, path, log, PRELOAD, of_process=self._raylet)
        return ForkServerClient(path)

    async def _keep_alive(self, python: str, pid: int) -> None:
        while True:
            with contextlib.suppress(ProcessLookupError):
                await process_ended(os.pidfd_open(pid))
            while True:
                try:
                    pid = (await (await self._start(python)).hello()).pid
                    break
                except ForkServerError:
                    await asyncio.sleep(1.0)

    @remote.called
    async def ranks_gone(self, job_id: str, ranks: Sequence[int], seconds: float) -> tuple[int, ...]:
        """Wait until no process tree of those ranks is left on this node; return the ranks that still have one.

        Their actors have ended, so their keepers are ending them. What a killed keeper leaves is ended here.
        """
        gone = await asyncio.gather(*(self._rank_gone(job_id, rank, seconds) for rank in ranks))
        return tuple(rank for rank, is_gone in zip(ranks, gone, strict=True) if not is_gone)

    async def _rank_gone(self, job_id: str, rank: int, seconds: float) -> bool:
        path = rank_lock_path(self._node_dir, job_id, rank)
        if lock_is_clear(path):
            return True
        return await in_own_thread(lambda: end_tree(path, seconds))

    @remote.called
    async def shut_down(self, *, remove: bool) -> None:
        """End the node's fork servers once no job is left, and wait; ``remove`` also removes the node's directories."""
        for task in (self._adopting, *self._watched.values()):
            task.cancel()
        servers = [ForkServerClient(path) for path in (self._node_dir / "fork").glob("*.sock")]
        await asyncio.gather(*(server.end(SERVER_PATIENCE) for server in servers))
        if remove:
            await asyncio.to_thread(remove_private, self._node_dir)


def _own_home(node_dir: Path) -> Path:
    """Return the directory of jobs' files on a node that does not share the daemon's home; one per daemon."""
    base = os.environ.get(NODE_HOME)
    return Path(base) if base else Path.home() / ".orch-node" / node_dir.parent.name


DEADLINE_SECONDS: Final = 120.0
MAX_CHARACTERS: Final = 1000  # of the check's output
_DISK_BYTES: Final = 1024 * 1024
_DEVICES: Final = """
import json, sys, tempfile, torch, torch.distributed as dist
torch.set_num_threads(1)
cuda = torch.cuda.is_available()
devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if cuda else [torch.device("cpu")]
a = torch.randn(512, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
expected = a @ a.T
for device in devices:
    error = ((a.to(device) @ a.T.to(device)).cpu() - expected).abs().max().item()
    if not error < 1e-6:
        print(json.dumps({"device": str(device), "operation": "multiply", "off": error}))
with tempfile.TemporaryDirectory() as folder:
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for device in devices[:1]:
        ones = torch.ones(1024, device=device)
        dist.all_reduce(ones)
        if ones.sum().item() != 1024:
            print(json.dumps({"device": str(device), "operation": "reduce"}))
    dist.destroy_process_group()
print("done")
"""


async def check_node(directory: Path, *, python: str = sys.executable, seconds: float = DEADLINE_SECONDS) -> list[Fact]:
    """Return what is wrong with this node: its devices, and the disk under ``directory``. Empty when nothing is."""
    problems = await asyncio.to_thread(_check_disk, directory)
    return problems + await _check_devices(python, seconds)


def _check_disk(directory: Path) -> list[Fact]:
    data = os.urandom(_DISK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="health-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != data:
                return [DiskDamaged(path=str(directory))]
    except OSError as error:
        return [DiskUnwritable(path=str(directory), said=error.strerror or "")]
    return []


async def _check_devices(python: str, seconds: float) -> list[Fact]:
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", _DEVICES), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        return [DevicesSilent(seconds=seconds)]
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = out.decode(errors="replace").split("\n")
    if process.returncode != 0 or "done" not in lines:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return [DevicesFailed(said=last[0][:MAX_CHARACTERS])]
    return [_failure_in(line) for line in lines if line and line != "done"]


def _failure_in(line: str) -> Fact:
    """Return the failure in one line of the check; output of a library counts as a failure, too."""
    try:
        fields = json.loads(line)
        off = fields.get("off")
        known = isinstance(off, float) and math.isfinite(off)
        return DeviceWrong(device=fields["device"], operation=fields["operation"], off=off if known else None)
    except (ValueError, KeyError, AttributeError):
        return DevicesFailed(said=line[:MAX_CHARACTERS])
