"""Runs ``orch up``: starts ``orch serve`` detached, and waits until it accepts jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from orchestrator.api.client import Client
from orchestrator.api.errors import (
    DaemonFrozenError,
    DaemonUnreachableError,
    DeadlineError,
    InternalError,
    OrchError,
    RefusedError,
    kill_hint,
)
from orchestrator.api.launch import UpReply, serve_arguments
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.transport.peer import is_stopped
from orchestrator.daemon.process.home import prepare_home, read_failure, refuse_unwritable
from orchestrator.daemon.process.preflight import check_options, check_ports
from orchestrator.private_files import open_private
from orchestrator.runtime.cluster.head import START_TRIES, start_seconds
from orchestrator.store.lock import StoreLock
from orchestrator.units import duration

if TYPE_CHECKING:
    from orchestrator.api.launch import ServeOptions
    from orchestrator.api.views import HealthView
    from orchestrator.spec.settings import Settings

HEALTH_SECONDS: Final = 5.0
FROZEN_SECONDS: Final = 3.0
"""A process stopped for this long is not merely held by a debugger for a moment."""

END_SECONDS: Final = 90.0
POLL_SECONDS: Final = 0.05
LOG_LINES: Final = 15


def up(settings: Settings, options: ServeOptions) -> UpReply:
    """Start the daemon unless one answers.

    Raises RefusedError with the reason when it fails: no process of it is left then. Raises DaemonFrozenError where a
    daemon's process is stopped.
    """
    return _Start(settings, options).run()


class _Start:
    """One call of `orch up`."""

    def __init__(self, settings: Settings, options: ServeOptions) -> None:
        self._settings = settings
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._others = False
        self._log_bytes = 0
        self._stopped_since: float | None = None
        # The time in which the daemon itself may try to start Ray, and that of one more try for everything else.
        self._seconds = (START_TRIES + 1) * start_seconds()

    def run(self) -> UpReply:
        began = time.monotonic()
        try:
            while True:
                health = self._health()
                if health is not None and health.ready:
                    return self._reply(health, began=began)
                if health is None:
                    self._start_or_wait()
                if time.monotonic() - began > self._seconds:
                    pid = self._pid(health)
                    silent = health is None and isinstance(pid, int) and self._process is None
                    raise RefusedError(
                        f"the daemon is not ready after {duration(self._seconds)}"
                        f" (process {pid}): {_reason(health)}\n{self._log_tail()}",
                        hint=kill_hint(int(pid)) if silent else "`orch doctor` looks for the reason",
                    )
                time.sleep(POLL_SECONDS)
        except OrchError:
            self._end()
            raise

    def _health(self) -> HealthView | None:
        try:
            endpoint = Endpoint(socket_path=str(self._settings.socket))
            return Client(endpoint, deadline_seconds=HEALTH_SECONDS).health()
        except DaemonFrozenError:
            raise
        except (DaemonUnreachableError, DeadlineError):
            return None

    def _start_or_wait(self) -> None:
        """Start a daemon when none answers, or wait for one that is starting or stopping."""
        holder = StoreLock.holder(self._settings.paths.store)
        self._refuse_frozen(holder)
        if self._process is not None and self._process.poll() is None:
            return
        if StoreLock.is_held(self._settings.paths.store):
            self._others = True  # another daemon's process: wait for it first
        elif self._process is None or self._others:
            self._start()
            self._others = False
        else:
            raise self._failed(self._process)

    def _refuse_frozen(self, holder: int | None) -> None:
        if holder is None or not is_stopped(holder):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or time.monotonic()
        if time.monotonic() - self._stopped_since > FROZEN_SECONDS:
            raise DaemonFrozenError.of(str(self._settings.socket), holder)

    def _start(self) -> None:
        paths = self._settings.paths
        check_options(self._settings, self._options)
        check_ports(self._options)
        prepare_home(self._settings, traversable=bool(self._options.group))
        try:
            log = open_private(paths.daemon_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            refuse_unwritable(self._settings.home, error)
            raise
        try:
            self._log_bytes = os.fstat(log).st_size
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.cli.main", "serve", *serve_arguments(self._options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={**os.environ, "ORCH_HOME": str(self._settings.home)},
            )
        finally:
            os.close(log)

    def _failed(self, process: subprocess.Popen[bytes]) -> RefusedError:
        """Return the error: the reason first; the log only where the reason is unknown, or a bug."""
        error = read_failure(self._settings.paths, process.pid)
        hint = "`orch doctor` looks further"
        if error is None:
            return RefusedError(
                f"the daemon did not start: it ended with {process.returncode}\n{self._log_tail()}", hint=hint
            )
        details = f"\n{self._log_tail()}" if isinstance(error, InternalError) else ""
        return RefusedError(
            f"the daemon did not start: {error.message}{details}", hint=error.hint or hint, problems=error.problems
        )

    def _end(self) -> None:
        """End the daemon that this call started with all its processes; leave any other daemon alone."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a process that is stopped handles nothing
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _pid(self, health: HealthView | None) -> int | str:
        if health is not None:
            return health.pid
        return StoreLock.holder(self._settings.paths.store) or (self._process.pid if self._process else "unknown")

    def _reply(self, health: HealthView, *, began: float) -> UpReply:
        return UpReply(
            pid=health.pid,
            started=self._process is not None and self._process.pid == health.pid,
            seconds=time.monotonic() - began,
            address=str(self._settings.socket),
            read_address=health.read_address,
            prometheus_url=health.prometheus_url,
            alertmanager_url=health.alertmanager_url,
            prometheus_password_file=health.prometheus_password_file,
            page_address=health.page_address,
            log_file=str(self._settings.paths.daemon_log),
        )

    def _log_tail(self) -> str:
        """Return the last log lines since this call started the daemon."""
        try:
            with self._settings.paths.daemon_log.open("rb") as file:
                file.seek(self._log_bytes)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-LOG_LINES:])


def _reason(health: HealthView | None) -> str:
    if health is None:
        return "it does not answer"
    return "; ".join(health.problems) or "it is still starting"


__all__ = ["OrchError", "up"]
