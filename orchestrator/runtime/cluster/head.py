"""The embedded Ray head: started by ``head_program.py``, found again after a crash of the daemon, watched, and ended.

Everything that belongs to it is in its own session of processes, whose number is recorded as soon as it runs. So no
daemon, however it ended, leaves a process that the next one does not find.

Ray makes the directories of its session readable by every user, whatever the umask; they are in a directory that only
this user can enter. Makes no call to Ray about nodes or actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Final

import psutil
import structlog

from orchestrator import trees
from orchestrator.durable_files import write_whole
from orchestrator.process_ends import wait_ended
from orchestrator.runtime.deadline import process_ended
from orchestrator.runtime.nodes.directories import RAYLET_PID
from orchestrator.spec import token_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.runtime.nodes.directories import Site

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024  # Ray's minimum is 75 MB; orch sends nothing large
LOOPBACK: Final = "127.0.0.1"
CONNECT_SECONDS: Final = 1.0
VISIBLE_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables with which a shell restricts a program to some GPUs. Ray does not start with more GPUs than they show."""
TOKEN_BYTES: Final = 32
TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the variable's name

RECONNECT_SECONDS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
OF_THE_DRIVER: Final = (RAYLET_PID, RECONNECT_SECONDS)
"""Environment variables that Ray reads in the daemon's process and that no process started by the daemon inherits."""
FOR_EVER_SECONDS: Final = 10**6

HEAD_SECONDS: Final = 60.0
MAX_LOAD: Final = 5.0
START_TRIES: Final = 3
STDERR_LINES: Final = 3
EXEC_SECONDS: Final = 1.0
"""How long to wait for a process during an exec: its environment is set last, and empty before."""
CLEAR_SECONDS: Final = 10.0
"""How long a start removes the logs of earlier heads: the next start continues."""
END_SECONDS: Final = 10.0
"""How long to wait for killed processes to end: one that waits for a disk may take longer."""

SETTINGS: Final = {
    # Ray would answer the first driver only once as many workers as CPUs have registered, and never if one of them is slow.
    "RAY_prestart_worker_first_driver": "0",
    # Idle workers import what a rank actor needs before they get work, and what Ray imports for its first message, where it is installed.
    "RAY_preload_python_modules": ",".join(
        (
            "orchestrator.runtime.ranks.rank_actor",
            *filter(find_spec, ("pydantic", "pyarrow")),
        )
    ),
    # Rank actors watch ranks; on a busy machine they must not wait for the processes that they watch.
    "RAY_worker_niceness": "0",
    # When memory runs out, the kernel must kill ranks. Ray's own score would make its workers the first victims. So
    # would its memory monitor: it measures all memory in use, but attributes it only to what a worker started.
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's own metrics are not read here; collecting them costs every process some time.
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray otherwise replaces the loopback address by the machine's external one, which may not be reachable from
    # inside, and opens its ports to the network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # How long a connection attempt waits for a raylet that has died meanwhile. Ray's default of one minute would delay
    # the recovery by a minute.
    "RAY_gcs_server_request_timeout_seconds": "15",
}
"""Environment variables that Ray reads in the processes of an embedded head, and in the daemon."""

log = structlog.get_logger("orch.ray")


class ClusterError(Exception):
    """Ray cannot be started or reached; the message gives Ray's answer and what to do next."""


def start_seconds() -> float:
    """Return how long a start of Ray may take, in seconds, at the machine's present load."""
    return scaled_to_load(HEAD_SECONDS)


def scaled_to_load(seconds: float) -> float:
    """Return ``seconds``, scaled to the machine's present load."""
    return scaled(seconds, os.getloadavg()[0], os.cpu_count() or 1)


def scaled(seconds: float, load: float, cpus: int) -> float:
    """Return ``seconds`` times the runnable processes per CPU; the factor is at least 1 and at most MAX_LOAD."""
    return seconds * min(max(1.0, load / cpus), MAX_LOAD)


def ray_environment(token: Path) -> dict[str, str]:
    """Return the environment variables that Ray reads in every process of an embedded head."""
    return {"RAY_AUTH_MODE": "token", TOKEN_PATH: str(token), **SETTINGS}


def outlive_raylets() -> None:
    """Keep Ray from ending this process when its raylet dies.

    Ray ends a driver after its raylet has died if the driver's parent is init, as a daemon's is. If RAYLET_PID is set,
    Ray watches that process in place of the parent. Here that is this process itself.
    """
    os.environ[RAYLET_PID] = str(os.getpid())


def outlive_heads() -> None:
    """Keep Ray from ending this process when it calls a dead head: Ray would do so after a minute."""
    os.environ[RECONNECT_SECONDS] = str(FOR_EVER_SECONDS)


# -- its processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An embedded head as its file describes it: ``pids`` are those of its gcs_server and raylet, with their start times.

    A head that is being started has no address and no ``pids``; ``session`` is that of all its processes.
    """

    session: int
    gcs_address: str = ""
    pids: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether each of its processes still runs."""
        return bool(self.pids) and all(is_alive(pid, created) for pid, created in self.pids.values())


def read_head(path: Path) -> Head | None:
    """Return the head that the file describes, whether it runs or not; None without a readable file."""
    try:
        data = json.loads(path.read_text())
        pids = {name: (int(pid), float(created)) for name, (pid, created) in data["pids"].items()}
        return Head(session=int(data["session"]), gcs_address=data["gcs_address"], pids=pids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_head(path: Path, head: Head) -> None:
    """Write the head's file atomically."""
    body = {"session": head.session, "gcs_address": head.gcs_address, "pids": dict(head.pids)}
    write_whole(path, json.dumps(body).encode())


def is_alive(pid: int, created: float) -> bool:
    """Whether the process that started at ``created`` (Unix seconds) still runs; another one with its id does not count."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def of_session(pid: int) -> list[psutil.Process]:
    """List the processes in the session of ``pid``, all those of an embedded head; none once ``pid`` has ended."""
    try:
        return _members(os.getsid(pid))
    except ProcessLookupError:
        return []


def idle_workers(raylet: int) -> int:
    """Return how many workers of a raylet on this machine are idle or starting; 0 when the raylet has ended."""
    count = 0
    for process in of_session(raylet):
        if process.pid == raylet:  # its command line has that of its workers
            continue
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            count += "ray::IDLE" in line or "default_worker.py" in line
    return count


def kill_head(head: Head, token: Path) -> None:
    """Kill what is left of an embedded head with that ``token``; return when all has ended, or after END_SECONDS.

    While the gcs_server or the raylet lives, all of its session is the head's. Later another program may have the session's number:
    then a process must also have the token's path, which no other head has.
    """
    deadline = time.monotonic() + END_SECONDS
    while victims := _victims(head, token):
        _kill(victims, deadline - time.monotonic())
        if time.monotonic() > deadline:
            return


def _victims(head: Head, token: Path) -> list[psutil.Process]:
    living = [pid for pid, created in head.pids.values() if is_alive(pid, created)]
    found = {pid: psutil.Process(pid) for pid in living}
    if head.session != os.getsid(0):  # a test's own
        known = any(_session(pid) == head.session for pid in living)
        found |= {p.pid: p for p in _members(head.session) if known or _has_token(p, token)}
    return list(found.values())


def _members(session: int) -> list[psutil.Process]:
    """List the live processes of a session. 0 is no session: it stands for those of another PID namespace, and the kernel's."""
    found = [process for process in psutil.process_iter() if session and _session(process.pid) == session]
    return [process for process in found if not _has_ended(process)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _has_token(process: psutil.Process, token: Path) -> bool:
    """Whether this user's process reads ``token``. During an exec its environment is empty: wait until it is set."""
    until = time.monotonic() + EXEC_SECONDS
    with contextlib.suppress(psutil.Error):
        if process.uids().real == os.getuid():
            while not (environ := process.environ()) and process.exe() and time.monotonic() < until:
                time.sleep(0.001)
            return environ.get(TOKEN_PATH) == str(token)
    return False


def _kill(victims: Sequence[psutil.Process], seconds: float) -> None:
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
    wait_ended(victims, max(seconds, 0.0))


# -- its start


def start_command(directory: Path, *, num_cpus: int, num_gpus: int, port: int) -> list[str]:
    """Return the command that starts a head at ``port`` of the loopback address, with its logs and sockets in ``directory``."""
    options = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "node_ip_address": LOOPBACK,
        "gcs_server_port": port,
        "temp_dir": str(directory),
    }
    return [sys.executable, "-m", "orchestrator.runtime.cluster.head_program", json.dumps(options)]


async def output_of(
    command: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
    started: Callable[[int], None] = lambda _pid: None,
) -> None:
    """Run a program that uses Ray, in a session of its own; ``started`` gets its process id, which is the session's number.

    Raises TimeoutError; ClusterError with its last lines. Ray can block a process in a way that no Python code of it
    ends: the program is killed after ``seconds``.
    """
    with tempfile.TemporaryFile() as output:
        process = _begin(command, environ, output)
        try:
            started(process.pid)
            async with asyncio.timeout(seconds):
                await process_ended(os.pidfd_open(process.pid))
                process.wait()
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            lines = _lines(output)[-STDERR_LINES:] or [f"it ended with {process.returncode}"]
            raise ClusterError(" | ".join(lines))


def _begin(command: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program; not with asyncio, which warns about an abandoned process when its loop closes."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        cwd="/",
        env=dict(environ),
    )


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class EmbeddedHead:
    """The embedded head. ``on_died`` is called, in the loop's thread, when a process of the head has ended.

    ``command`` returns what starts a head (``start_command``); ``limit`` how many seconds one try may take.
    """

    def __init__(
        self,
        site: Site,
        *,
        num_cpus: int | None,
        simulate_gpus: int,
        on_died: Callable[[], None],
        command: Callable[..., list[str]] = start_command,
        limit: Callable[[], float] = start_seconds,
    ) -> None:
        self._site = site
        self._num_cpus = num_cpus
        self._simulate_gpus = simulate_gpus
        self._on_died = on_died
        self._command = command
        self._limit = limit
        self._head: Head | None = None
        self._began = False  # this process started the head; a failed start of the daemon ends it
        self._handles: list[int] = []

    @property
    def address(self) -> str:
        """Address of the head; empty while there is none."""
        return self._head.gcs_address if self._head else ""

    @property
    def raylet_pid(self) -> int | None:
        """Process id of the raylet of the head's own node."""
        return self._head.pids["raylet"][0] if self._head else None

    @property
    def _token_path(self) -> Path:
        return self._site.paths.ray / "token"

    async def ensure(self) -> str:
        """Find the head or start one, watch it, and return its address. Raises ClusterError, TokenFileError."""
        outlive_heads()
        self.keep_token()
        self._head = await self._find()
        if self._head is None:
            self._began = True
            self._head = await self.start()
        self._watch(self._head)
        return self._head.gcs_address

    def keep_token(self) -> None:
        """Create the token if there is none, or a torn one that no process can be using, and make Ray use it.

        Raises TokenFileError.
        """
        path = self._token_path
        if not path.exists() or (_is_torn(path) and not self._may_be_in_use()):
            write_whole(path, secrets.token_hex(TOKEN_BYTES).encode())
        token_file.read(path)
        os.environ.update(ray_environment(path))

    def _may_be_in_use(self) -> bool:
        head = read_head(self._site.head_file)
        return head is not None and any(is_alive(pid, created) for pid, created in head.pids.values())

    async def _find(self) -> Head | None:
        """Return the head of an earlier daemon; end what is left of one that has died, or is ending and would never answer."""
        head = read_head(self._site.head_file)
        if head is None:
            return None
        if head.is_alive and not await _is_closed(head):
            return head
        await asyncio.to_thread(kill_head, head, self._token_path)
        return None

    async def start(self) -> Head:
        """Start a new head, which ``ensure`` finds. Raises ClusterError with the last reason; no process is left then.

        Ray's start takes longer on a loaded machine: the limits grow with the load, and a failed start is repeated, with
        one line in the log for each try.
        """
        for number in range(1, START_TRIES + 1):
            try:
                return await self._start_once()
            except BaseException as error:
                if (begun := read_head(self._site.head_file)) is not None:
                    await asyncio.to_thread(kill_head, begun, self._token_path)
                if not isinstance(error, ClusterError) or number == START_TRIES:
                    raise
                log.warning("ray.start_failed", reason=str(error), tried=number, of=START_TRIES)
        raise AssertionError("the last try raises")

    async def _start_once(self) -> Head:
        directory, seconds, file = self._site.ray_directory(), self._limit(), self._site.head_file
        await asyncio.to_thread(_clear_logs, directory)
        dropped = {*OF_THE_DRIVER, *VISIBLE_GPUS}  # each rank is told which GPUs it sees
        environ = {name: value for name, value in os.environ.items() if name not in dropped}
        port = _free_port()
        command = self._command(
            directory,
            num_cpus=self._num_cpus or os.cpu_count() or 1,
            num_gpus=await asyncio.to_thread(self._count_gpus),
            port=port,
        )
        sessions: list[int] = []

        def record(pid: int) -> None:
            sessions.append(pid)
            write_head(file, Head(session=pid))

        try:
            await output_of(command, environ, seconds, record)
        except TimeoutError as error:
            raise ClusterError(f"Ray's head did not start within {seconds:.0f} s; see {directory}") from error
        except ClusterError as error:
            raise ClusterError(f"Ray's head did not start: {error}") from error
        head = Head(session=sessions[0], gcs_address=f"{LOOPBACK}:{port}", pids=_pids(sessions[0], directory))
        write_head(file, head)
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
            await asyncio.to_thread(kill_head, head, self._token_path)
        self._site.head_file.unlink(missing_ok=True)

    async def take_back(self) -> None:
        """End the head that a failed start has begun; leave alone an earlier one, on which jobs may run."""
        began, self._began = self._began, False
        if began:
            self._head = read_head(self._site.head_file)
            await self.end()
            await asyncio.to_thread(self._site.remove_node_state)


def _pids(session: int, directory: Path) -> dict[str, tuple[int, float]]:
    """Return the processes of a head that has just started. Raises ClusterError: one has ended already."""
    found: dict[str, tuple[int, float]] = {}
    for process in _members(session):
        with contextlib.suppress(psutil.Error):
            if process.name() in ("gcs_server", "raylet"):
                found[process.name()] = (process.pid, process.create_time())
    if len(found) != 2:
        raise ClusterError(f"Ray's head died at once; see {directory}/session_latest/logs")
    return found


def _clear_logs(directory: Path) -> None:
    """Remove the sessions of earlier heads but the newest one, whose logs may tell why it ended."""
    sessions = sorted(p for p in directory.glob("session_*") if p.is_dir() and not p.is_symlink())
    until = time.monotonic() + CLEAR_SECONDS
    for session in sessions[:-1]:
        trees.remove(session, until=until)


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
