"""Starts an embedded Ray head in a process of its own, and leaves nothing of one that does not come up.

What Ray needs to start grows with what else the machine does: the limits grow with its load, and a start that fails is
tried again, with one line in the log for each.
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
from typing import IO, TYPE_CHECKING, Any, Final

import psutil
import structlog

from orchestrator.runtime.cluster.head.processes import Head, clear_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

HEAD_SECONDS: Final = 60.0
MOST_LOAD: Final = 5.0
START_TRIES: Final = 3
SAID_LINES: Final = 3
STARTER: Final = (sys.executable, "-m", "orchestrator.runtime.cluster.head.launcher")

log = structlog.get_logger("orch.ray")

SYSTEM_CONFIG: Final = {
    # Idle workers have imported what a rank actor needs, and no more, before one is asked of them.
    "preload_python_modules": ["orchestrator.runtime.cluster.worker_preload"],
    # Rank actors watch and restart; on a busy machine they must not wait behind what they watch.
    "worker_niceness": 0,
    # Ranks are what the kernel kills when memory runs out. Ray would offer it its workers first, and so would its own
    # monitor, which sees how much is used but not by which process that a worker did not start.
    "worker_oom_score_adjustment": 0,
    "memory_monitor_refresh_ms": 0,
    # Ray's own metrics are not read here; collecting them costs every process a little, all the time.
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    # Looks after objects, spilled files, idle workers and an autoscaler's wishes, of which there are next to none here.
    "raylet_check_gc_period_milliseconds": 10_000,
    "object_manager_timer_freq_ms": 1_000,
    "local_fs_monitor_interval_ms": 10_000,
    "kill_idle_workers_interval_ms": 1_000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
}


class ClusterError(Exception):
    """Ray could not be started or reached; the message says what it answered and what to do next."""


def start_seconds() -> float:
    """How long a start of Ray may take on this machine as it is now."""
    return scaled(HEAD_SECONDS, os.getloadavg()[0], os.cpu_count() or 1)


def scaled(seconds: float, load: float, cpus: int) -> float:
    """``seconds``, times the runnable processes per CPU where there are more than one; five times at most."""
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
    """A new head, tried ``tries`` times. Raises ClusterError with the last reason; no process is left then.

    ``starter`` is the command that starts it; ``limit`` says in seconds how long one try may take.
    """
    for number in range(1, tries + 1):
        await asyncio.to_thread(clear_sessions, temp_dir)
        try:
            return await _launch([*starter, json.dumps(options)], temp_dir, environ, limit())
        except BaseException as error:
            await asyncio.to_thread(clear_sessions, temp_dir)
            if not isinstance(error, ClusterError) or number == tries:
                raise
            log.warning("ray.start_failed", reason=str(error), tried=number, of=tries)
    raise AssertionError("the last try raises")


async def _launch(command: Sequence[str], temp_dir: Path, environ: Mapping[str, str], seconds: float) -> Head:
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = _begin(command, environ, stdout, stderr)
        try:
            async with asyncio.timeout(seconds):
                # The head mostly waits for its own processes: this one imports Ray meanwhile, which takes it a second.
                await asyncio.gather(_ended(process), asyncio.to_thread(importlib.import_module, "ray"))
        except TimeoutError as error:
            raise ClusterError(f"Ray's head did not start within {seconds:.0f} s; see {temp_dir}") from error
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = _lines(stdout)
        if process.returncode != 0 or not lines:
            said = _lines(stderr)[-SAID_LINES:] or [f"it ended with {process.returncode}"]
            raise ClusterError(f"Ray's head did not start: {' | '.join(said)}")
    return _head(json.loads(lines[-1]))


def _begin(
    command: Sequence[str], environ: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """The starter's process. Not asyncio's: one of those that is given up complains when its loop is closed."""
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
    """Return when the process has ended; cancelled, nothing of it is left in the event loop."""
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


def _head(told: Mapping[str, Any]) -> Head:
    try:
        pids = {name: (group[0], psutil.Process(group[0]).create_time()) for name, group in told["pids"].items()}
    except psutil.NoSuchProcess as error:
        raise ClusterError(f"Ray's head died at once; see {told['session_dir']}/logs") from error
    return Head(gcs_address=told["gcs_address"], pids=pids, session_dir=told["session_dir"])
