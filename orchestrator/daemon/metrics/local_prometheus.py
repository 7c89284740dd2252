"""``orch up --with-prometheus``: a Prometheus and an Alertmanager beside the daemon, started with it and stopped with it.

Processes left by a killed daemon are found by their ids and stopped first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING, Final

import psutil

from orchestrator.process_ends import wait_ended
from orchestrator.runtime.deadline import within
from orchestrator.telemetry.local_prometheus import find_binaries, prepare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.telemetry.local_prometheus import LocalStack

STOP_SECONDS: Final = 10.0


class LocalPrometheus:
    """Owns the two processes. ``folder`` holds their configuration, data and logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []
        self.stack: LocalStack | None = None

    async def start(self, daemon: str, token_file: str = "", docs_url: str = "") -> LocalStack:
        """Start them for the daemon's metrics at ``daemon`` (host:port), read with that token. Raises LocalPrometheusError.

        Alerts link to the documentation at ``docs_url``.
        """
        await asyncio.to_thread(self._stop_earlier)
        self.stack = prepare(
            self._folder,
            daemon=daemon,
            binaries=find_binaries(),
            prometheus_address=_free(9090),
            alertmanager_address=_free(9093),
            token_file=token_file or None,
            docs_url=docs_url,
        )
        for command in self.stack.commands:
            log = os.open(
                self._folder / f"{os.path.basename(command[0])}.log",  # noqa: PTH119 - a command, not a path
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            try:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
            finally:
                os.close(log)
        pids = {str(p.pid): psutil.Process(p.pid).create_time() for p in self._processes}
        (self._folder / "pids.json").write_text(json.dumps(pids))
        return self.stack

    async def stop(self) -> None:
        """Send SIGTERM, so that Prometheus writes its memory to disk; SIGKILL after a while."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes:
            try:
                await within(STOP_SECONDS, process.wait())
            except TimeoutError:
                process.kill()
                await process.wait()
        self._processes.clear()

    def _stop_earlier(self) -> None:
        try:
            pids = json.loads((self._folder / "pids.json").read_text())
        except (OSError, ValueError):
            return
        earlier: Sequence[psutil.Process] = [p for p in (_same(int(pid), at) for pid, at in pids.items()) if p]
        for process in earlier:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        for process in wait_ended(earlier, STOP_SECONDS):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _same(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1.0 else None
    except psutil.Error:
        return None


def _free(port: int) -> str:
    """Return the usual address, or, where it is taken, a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
