"""Holds the daemon's process by a descriptor and waits until it has ended, for `orch down`."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from orchestrator.api.errors import DaemonFrozenError, DaemonUnreachableError, DeadlineError, kill_hint
from orchestrator.api.transport import serving_lock, wire
from orchestrator.api.transport.peer import credentials, is_stopped

if TYPE_CHECKING:
    from orchestrator.api.transport.endpoint import Endpoint

LOOK_SECONDS = 5.0
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.05


class DaemonProcess:
    """The daemon's process, held from before the request to stop, so that its id cannot be reused."""

    def __init__(self, endpoint: Endpoint, pid: int = 0, handle: int | None = None) -> None:
        """Take the process; ``pid`` is 0 if unknown, ``handle`` None if the process cannot be held."""
        self._endpoint, self.pid, self._handle = endpoint, pid, handle
        self._listens = True

    @classmethod
    def listening(cls, endpoint: Endpoint) -> DaemonProcess:
        """Return the process that accepts connections. Raises DaemonUnreachableError if none does."""
        with wire.connect(endpoint, time.monotonic() + CONNECT_SECONDS) as sock:
            peer = credentials(sock)
        if peer is None or peer[0] in {0, os.getpid()}:
            return cls(endpoint)  # on another machine or in another container: only its address is observable
        with contextlib.suppress(ProcessLookupError):
            return cls(endpoint, peer[0], os.pidfd_open(peer[0]))
        return cls(endpoint, peer[0])

    @classmethod
    def ending(cls, endpoint: Endpoint) -> DaemonProcess | None:
        """Return the process that holds the serving lock but does not listen, any more or yet; None without one."""
        pid = serving_lock.holder(endpoint.socket_path) if endpoint.socket_path else None
        if pid is None:
            return None
        process = cls(endpoint, pid)
        process._listens = False
        return process

    def close(self) -> None:
        """Release the process."""
        if self._handle is not None:
            os.close(self._handle)

    def wait_until_gone(self, seconds: float, *, look_seconds: float = LOOK_SECONDS) -> None:
        """Return when the process has ended. Raises DeadlineError, and DaemonFrozenError for one that is stopped.

        The process is checked every ``look_seconds``.
        """
        deadline = time.monotonic() + seconds
        while not self._has_ended(min(look_seconds, max(0.0, deadline - time.monotonic()))):
            if self.pid and is_stopped(self.pid):
                raise DaemonFrozenError.of(self._endpoint.label, self.pid)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the daemon has not ended {seconds:.0f} s after the request to stop"
                    + (f" (process {self.pid})" if self.pid else ""),
                    hint="look at the end of its log; `orch doctor` says where it is"
                    + (f"; to end it now: {kill_hint(self.pid)}" if self.pid else ""),
                )

    def _has_ended(self, seconds: float) -> bool:
        if self._handle is not None:
            return bool(select.select([self._handle], [], [], seconds)[0])
        if not self._listens:
            pid = serving_lock.holder(self._endpoint.socket_path)
            time.sleep(POLL_SECONDS)
            return pid is None or pid != self.pid  # another process is the next daemon
        try:
            wire.connect(self._endpoint, time.monotonic() + CONNECT_SECONDS).close()
        except DaemonUnreachableError:
            return True
        time.sleep(POLL_SECONDS)
        return False
