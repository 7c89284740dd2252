"""Starts an embedded Ray head in its own process, and leaves no process behind when the start fails.

Ray's start takes longer on a loaded machine: the limits grow with the load, and a failed start is repeated, with one
line in the log for each try.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import psutil
import structlog

from orchestrator.runtime.cluster.head.processes import TOKEN_PATH, Head, clear_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HEAD_SECONDS: Final = 60.0
MOST_LOAD: Final = 5.0
START_TRIES: Final = 3
STDERR_LINES: Final = 3
STARTER: Final = (sys.executable, "-m", "orchestrator.runtime.cluster.head.launcher")

log = structlog.get_logger("orch.ray")

SYSTEM_CONFIG: Final = {
    # Ray would answer the first driver only once as many workers as CPUs have registered, and never if one of them is slow.
    "prestart_worker_first_driver": False,
    # Idle workers import what a rank actor needs, and no more, before they get work.
    "preload_python_modules": ["orchestrator.runtime.cluster.worker_preload"],
    # Rank actors watch ranks; on a busy machine they must not wait for the processes that they watch.
    "worker_niceness": 0,
    # When memory runs out, the kernel must kill ranks. Ray's own score would make its workers the first victims. So
    # would its memory monitor: it measures all memory in use, but attributes it only to what a worker started.
    "worker_oom_score_adjustment": 0,
    "memory_monitor_refresh_ms": 0,
    # Ray's own metrics are not read here; collecting them costs every process some time.
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    # Timers for objects, spilled files, idle workers and an autoscaler's requests, of which there are nearly none here.
    "raylet_check_gc_period_milliseconds": 10_000,
    "object_manager_timer_freq_ms": 1_000,
    "local_fs_monitor_interval_ms": 10_000,
    "kill_idle_workers_interval_ms": 1_000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
}


class ClusterError(Exception):
    """Ray cannot be started or reached; the message gives Ray's answer and what to do next."""


def start_seconds() -> float:
    """Return how long a start of Ray may take, in seconds, at the machine's present load."""
    return scaled_to_load(HEAD_SECONDS)


def scaled_to_load(seconds: float) -> float:
    """Return ``seconds``, scaled to the machine's present load."""
    return scaled(seconds, os.getloadavg()[0], os.cpu_count() or 1)


def scaled(seconds: float, load: float, cpus: int) -> float:
    """Return ``seconds`` times the runnable processes per CPU; the factor is at least 1 and at most MOST_LOAD."""
    return seconds * min(max(1.0, load / cpus), MOST_LOAD)


async def launch_head(
    options: Mapping[str, Any],
    temp_dir: Path,
    environ: Mapping[str, str],
    *,
    starter: Sequence[str] = STARTER,
    tries: int = START_TRIES,
    limit: Callable[[], float] = start_seconds,
) -> Head:
    """Start a new head in at most ``tries`` tries. Raises ClusterError with the last reason; no process is left then.

    ``environ`` includes ``ray_environment``. ``starter`` is the command that starts the head; ``limit`` returns how
    many seconds one try may take.
    """
    token = Path(environ[TOKEN_PATH])
    for number in range(1, tries + 1):
        await asyncio.to_thread(clear_sessions, temp_dir, token)
        try:
            return await _launch([*starter, json.dumps(options)], temp_dir, environ, limit())
        except BaseException as error:
            await asyncio.to_thread(clear_sessions, temp_dir, token)
            if not isinstance(error, ClusterError) or number == tries:
                raise
            log.warning("ray.start_failed", reason=str(error), tried=number, of=tries)
    raise AssertionError("the last try raises")


async def _launch(command: Sequence[str], temp_dir: Path, environ: Mapping[str, str], seconds: float) -> Head:
    try:
        # The head mostly waits for its own processes; this process imports Ray meanwhile, which takes a second.
        lines, _ = await asyncio.gather(
            output_of(command, environ, seconds), asyncio.to_thread(importlib.import_module, "ray")
        )
    except TimeoutError as error:
        raise ClusterError(f"Ray's head did not start within {seconds:.0f} s; see {temp_dir}") from error
    except ClusterError as error:
        raise ClusterError(f"Ray's head did not start: {error}") from error
    return _head(json.loads(lines[-1]))


async def output_of(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> list[str]:
    """Run a program that uses Ray, and return the lines of its output. Raises TimeoutError; ClusterError with its last lines.

    Ray can block a process in a way that no Python code of it ends: the program is killed after ``seconds``.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = _begin(command, environ, stdout, stderr)
        try:
            async with asyncio.timeout(seconds):
                await _ended(process)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = _lines(stdout)
        if process.returncode != 0 or not lines:
            stderr_lines = _lines(stderr)[-STDERR_LINES:] or [f"it ended with {process.returncode}"]
            raise ClusterError(" | ".join(stderr_lines))
    return lines


def _begin(
    command: Sequence[str], environ: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start the starter's process; not with asyncio, which warns about an abandoned process when its loop closes."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        cwd="/",
        env=dict(environ),
    )


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Return when the process has ended; a cancellation leaves nothing in the event loop."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    process.wait()


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _head(reply: Mapping[str, Any]) -> Head:
    try:
        pids = {name: (group[0], psutil.Process(group[0]).create_time()) for name, group in reply["pids"].items()}
    except psutil.NoSuchProcess as error:
        raise ClusterError(f"Ray's head died at once; see {reply['session_dir']}/logs") from error
    return Head(gcs_address=reply["gcs_address"], pids=pids, session_dir=reply["session_dir"])
