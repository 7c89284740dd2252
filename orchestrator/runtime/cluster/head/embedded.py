"""Finds, starts, watches and ends the embedded head, which outlives the daemon that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from typing import TYPE_CHECKING, Final

from orchestrator.durable_files import write_whole
from orchestrator.runtime.cluster.driver_environment import OF_THE_DRIVER, outlive_heads
from orchestrator.runtime.cluster.head.first_fork_server import FirstForkServer
from orchestrator.runtime.cluster.head.processes import (
    Head,
    is_alive,
    kill_session,
    ray_environment,
    read_head,
    write_head,
)
from orchestrator.runtime.cluster.head.start import SYSTEM_CONFIG, launch_head
from orchestrator.spec import token_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.runtime.cluster.site import Site

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024  # Ray's minimum is 75 MB; orch sends nothing large
LOOPBACK: Final = "127.0.0.1"
CONNECT_SECONDS: Final = 1.0
VISIBLE_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables with which a shell restricts a program to some GPUs. Ray does not start with more GPUs than they show."""
TOKEN_BYTES: Final = 32


class EmbeddedHead:
    """The embedded head. ``on_died`` is called, in the loop's thread, when a process of the head has ended."""

    def __init__(self, site: Site, *, num_cpus: int | None, simulate_gpus: int, on_died: Callable[[], None]) -> None:
        self._site = site
        self._num_cpus = num_cpus
        self._simulate_gpus = simulate_gpus
        self._on_died = on_died
        self._fork_server = FirstForkServer(site.fork_socket)
        self._head: Head | None = None
        self._began = False  # this process started the head; a failed start ends it
        self._handles: list[int] = []
        self._proven = ""  # address of the head whose starter has connected to it
        self.token = ""  # authenticates calls to the head

    @property
    def address(self) -> str:
        """Address of the head; empty while there is none."""
        return self._head.gcs_address if self._head else ""

    @property
    def is_proven(self) -> bool:
        """Whether a process has connected to this head since this daemon started it."""
        return bool(self.address) and self.address == self._proven

    @property
    def _token_path(self) -> Path:
        return self._site.paths.ray / "token"

    @property
    def raylet_pid(self) -> int | None:
        """Process id of the raylet of the head's own node."""
        return self._head.pids["raylet"][0] if self._head else None

    async def ensure(self) -> str:
        """Find the head or start one, watch it, and return its address. Raises ClusterError, TokenFileError."""
        outlive_heads()
        self.token = self._keep_token()
        self._head = await self._find()
        if self._head is None:
            self._began = True
            self._head = await self.start()
        self._watch(self._head)
        return self._head.gcs_address

    def _keep_token(self) -> str:
        """Create the token if there is none, or a torn one that no process can be using, and make Ray use it."""
        path = self._token_path
        if not path.exists() or (_is_torn(path) and not self._may_be_in_use()):
            write_whole(path, secrets.token_hex(TOKEN_BYTES).encode())
        token = token_file.read(path)
        os.environ.update(ray_environment(path))
        return token

    def _may_be_in_use(self) -> bool:
        head = read_head(self._site.head_file)
        return head is not None and any(is_alive(pid, created) for pid, created in head.pids.values())

    async def _find(self) -> Head | None:
        """Return the head of an earlier daemon; end what is left of one that has died, or is ending and would never answer."""
        head = read_head(self._site.head_file)
        if head is None:
            return None
        if all(is_alive(pid, created) for pid, created in head.pids.values()) and not await _is_closed(head):
            return head
        await asyncio.to_thread(kill_session, head, self._token_path)
        return None

    async def start(self) -> Head:
        """Start a new head, which ``ensure`` finds. The fork server of its first jobs warms up meanwhile."""
        self._fork_server.begin()
        try:
            head = await self._launch()
        except BaseException:
            await self._fork_server.end()
            raise
        await self._fork_server.begun()
        return head

    async def _launch(self) -> Head:
        directory = self._site.ray_directory()
        options = {
            "num_cpus": self._num_cpus or os.cpu_count() or 1,
            "num_gpus": await asyncio.to_thread(self._count_gpus),
            "resources": {},
            "labels": {},
            "object_store_bytes": OBJECT_STORE_BYTES,
            "address": LOOPBACK,
            "port": 0,
            "temp_dir": str(directory),
            "system_config": SYSTEM_CONFIG,
        }
        dropped = {*OF_THE_DRIVER, *VISIBLE_GPUS}  # each rank is told which GPUs it sees
        environ = {name: value for name, value in os.environ.items() if name not in dropped}
        head = await launch_head(options, directory, environ)
        write_head(self._site.head_file, head)
        self._proven = head.gcs_address
        return head

    def _count_gpus(self) -> int:
        from orchestrator.gpu.drivers.inventory import discover

        return self._simulate_gpus or len(discover())

    def _watch(self, head: Head) -> None:
        loop = asyncio.get_running_loop()
        for pid, _created in head.pids.values():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                loop.call_soon(self._died)
                return
            loop.add_reader(handle, self._died)
            self._handles.append(handle)

    def unwatch(self) -> None:
        """Stop reporting the head's death."""
        loop = asyncio.get_running_loop()
        for handle in self._handles:
            loop.remove_reader(handle)
            os.close(handle)
        self._handles = []

    async def is_ending(self) -> bool:
        """Whether the head's control plane has closed its port although its process still exists."""
        return self._head is not None and await _is_closed(self._head)

    def _died(self) -> None:
        self.unwatch()
        self._on_died()

    async def end(self) -> None:
        """End every process of the head, also those left of a dead one."""
        head, self._head = self._head, None
        if head is not None:
            await asyncio.to_thread(kill_session, head, self._token_path)
        self._site.head_file.unlink(missing_ok=True)

    async def take_back(self) -> None:
        """End the head that a failed start has begun; leave alone an earlier one, on which jobs may run."""
        began, self._began = self._began, False
        if not began:
            return
        await self._fork_server.end()
        self._head = read_head(self._site.head_file)
        await self.end()
        await asyncio.to_thread(self._site.remove_node_state)


def _is_torn(token: Path) -> bool:
    """Whether the file is one of the daemon's own without its content, as a power cut can leave it."""
    try:
        return re.fullmatch(rb"[0-9a-f]{64}", token.read_bytes()) is None
    except OSError:
        return False


async def _is_closed(head: Head) -> bool:
    """Whether nothing listens at the control plane's address.

    After SIGTERM the control plane accepts no connections, and never exits; the raylet takes ten seconds, or waits for it. A control plane
    that is only slow still accepts connections, whatever the load.
    """
    host, _, port = head.gcs_address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
