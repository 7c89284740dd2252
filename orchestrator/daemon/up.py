"""``orch up``: start ``orch serve`` detached, and wait until it takes jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from orchestrator.api.client import Client
from orchestrator.api.endpoint import Endpoint
from orchestrator.api.errors import DaemonUnreachableError, DeadlineError, OrchError, RefusedError
from orchestrator.api.launch import UpReply, serve_arguments
from orchestrator.store.lock import StoreLock

if TYPE_CHECKING:
    from orchestrator.api.launch import ServeOptions
    from orchestrator.api.views import HealthView
    from orchestrator.spec.settings import Settings

UP_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.05
LOG_LINES: Final = 15


def up(settings: Settings, options: ServeOptions) -> UpReply:
    """Start the daemon unless one answers. Raises RefusedError with the end of its log when it does not come up."""
    began = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    others = False
    while True:
        health = _health(settings)
        if health is not None and health.ready:
            started = process is not None and process.pid == health.pid
            return _reply(settings, health, started=started, began=began)
        if health is None and (process is None or process.poll() is not None):
            if StoreLock.is_held(settings.paths.store):
                others = True  # somebody else's daemon comes up, or goes down: its turn first
            elif process is None or others:
                process, others = _start(settings, options), False
            else:
                raise RefusedError(
                    f"the daemon did not start:\n{_log_tail(settings)}", hint="`orch doctor` looks further"
                )
        if time.monotonic() - began > UP_SECONDS:
            raise RefusedError(
                f"the daemon is not ready after {UP_SECONDS:g} s:\n{_log_tail(settings)}",
                hint="`orch doctor` looks for the reason",
            )
        time.sleep(POLL_SECONDS)


def _start(settings: Settings, options: ServeOptions) -> subprocess.Popen[bytes]:
    settings.paths.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = os.open(settings.paths.daemon_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli.main", "serve", *serve_arguments(options)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "ORCH_HOME": str(settings.home)},
        )
    finally:
        os.close(log)


def _health(settings: Settings) -> HealthView | None:
    try:
        return Client(Endpoint(socket_path=str(settings.socket))).health()
    except (DaemonUnreachableError, DeadlineError):
        return None


def _reply(settings: Settings, health: HealthView, *, started: bool, began: float) -> UpReply:
    return UpReply(
        pid=health.pid,
        started=started,
        seconds=time.monotonic() - began,
        address=str(settings.socket),
        read_address=health.read_address,
        prometheus_url=health.prometheus_url,
        alertmanager_url=health.alertmanager_url,
        log_file=str(settings.paths.daemon_log),
    )


def _log_tail(settings: Settings) -> str:
    try:
        lines = settings.paths.daemon_log.read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(lines[-LOG_LINES:])


__all__ = ["OrchError", "up"]
