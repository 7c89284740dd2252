"""Counts Xid events of one NVIDIA GPU in a thread that blocks in the driver.

NVML delivers each event to a waiting caller once and keeps no history, so the counts begin with the watch. The thread
opens the library itself and dies with its process; a driver that hangs blocks only this thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Final

from orchestrator.gpu.drivers.nvidia.library import SUCCESS, TIMEOUT, Call, Library
from orchestrator.gpu.reader import GpuReadError
from orchestrator.gpu.sample import XidCount

_XID_CRITICAL: Final = 0x8
_WAIT_MILLISECONDS: Final = 1000
_RETRY_SECONDS: Final = 1.0


class XidWatch:
    """Counts a GPU's Xid events from now on."""

    def __init__(self, uuid: str) -> None:
        """Start watching the GPU of that UUID. A driver without events leaves the counts empty."""
        self._uuid = uuid
        self._counts: dict[int, XidCount] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._armed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"orch-xid-{uuid}", daemon=True)
        self._thread.start()

    def counts(self) -> tuple[XidCount, ...]:
        """Return the number of events so far, by code."""
        with self._lock:
            return tuple(self._counts[code] for code in sorted(self._counts))

    def wait_until_armed(self, timeout: float) -> bool:
        """Whether events are being counted by now; waits up to `timeout` seconds for it."""
        return self._armed.wait(timeout)

    def close(self) -> None:
        """Stop watching; wait for the thread at most as long as one wait in a healthy driver takes."""
        self._stop.set()
        self._thread.join(2 * _WAIT_MILLISECONDS / 1e3)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                library = Library()
            except GpuReadError:
                self._stop.wait(_RETRY_SECONDS)
                continue
            try:
                self._watch(library)
            finally:
                self._armed.clear()
                library.close()

    def _watch(self, library: Library) -> None:
        """Wait for events until stopped or until the driver fails."""
        event_set = library.types.c_nvmlEventSet_t()
        create = library.call("nvmlEventSetCreate", ctypes.byref(event_set))
        if create is None or create() != SUCCESS:
            self._stop.wait()
            return
        free = library.call("nvmlEventSetFree", event_set)
        try:
            if self._register(library, event_set):
                self._armed.set()
                self._loop(library, event_set)
        finally:
            if free is not None:
                free()

    def _register(self, library: Library, event_set: object) -> bool:
        handle = library.device("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(self._uuid.encode()))
        events = ctypes.c_ulonglong(_XID_CRITICAL)
        call = library.call("nvmlDeviceRegisterEvents", handle, events, event_set) if handle is not None else None
        if call is not None and call() == SUCCESS:
            return True
        self._stop.wait(_RETRY_SECONDS)
        return False

    def _loop(self, library: Library, event_set: object) -> None:
        data = library.types.c_nvmlEventData_t()
        wait: Call | None = library.call(
            ("nvmlEventSetWait_v2", "nvmlEventSetWait"),
            event_set,
            ctypes.byref(data),
            ctypes.c_uint(_WAIT_MILLISECONDS),
        )
        while wait is not None and not self._stop.is_set():
            code = wait()
            if code == SUCCESS and data.eventType & _XID_CRITICAL:
                self._count(int(data.eventData))
            elif code not in {SUCCESS, TIMEOUT}:
                self._stop.wait(_RETRY_SECONDS)
                return

    def _count(self, code: int) -> None:
        with self._lock:
            seen = self._counts[code].count if code in self._counts else 0
            self._counts[code] = XidCount(code=code, count=seen + 1, last_timestamp=time.time())
