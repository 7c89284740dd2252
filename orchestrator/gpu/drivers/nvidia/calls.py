"""Two NVML calls with versions or sizes: memory in use, and the processes on a GPU."""

from __future__ import annotations

import ctypes
from typing import Final

from orchestrator.gpu.drivers.nvidia.library import SUCCESS, U64_BLANK_FLOOR, Handle, Library
from orchestrator.gpu.sample import GpuProcess

_MEMORY_V2: Final = 0x02000028
_INSUFFICIENT_SIZE: Final = 7
_MOST_PROCESSES: Final = 4096


class MemoryCall:
    """Memory in use, without the driver's reservation where the driver reports it (version 2 of the call)."""

    __slots__ = ("_call", "_out", "_types")

    def __init__(self, library: Library, handle: Handle) -> None:
        self._out = library.types.c_nvmlMemory_v2_t()
        self._out.version = _MEMORY_V2
        self._call = library.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(self._out))
        if self._call is None or self._call() != SUCCESS:
            self._out = library.types.c_nvmlMemory_t()
            self._call = library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(self._out))

    def read(self) -> tuple[int, int] | None:
        """Return (used, total) in bytes, or None."""
        if self._call is None or self._call() != SUCCESS:
            return None
        total, used = self._out.total, self._out.used
        return (used, total) if 0 < total < U64_BLANK_FLOOR and used <= total else None


class ProcessCall:
    """Lists the processes that use the GPU; its array grows with them and stays."""

    __slots__ = ("_call", "_count", "_handle", "_library", "_rows")

    def __init__(self, library: Library, handle: Handle) -> None:
        self._library = library
        self._handle = handle
        self._count = ctypes.c_uint()
        self._make_room(16)

    def _make_room(self, processes: int) -> None:
        self._rows = (self._library.types.c_nvmlProcessInfo_v3_t * processes)()
        self._call = self._library.call(
            "nvmlDeviceGetComputeRunningProcesses_v3", self._handle, ctypes.byref(self._count), ctypes.byref(self._rows)
        )

    def read(self) -> tuple[GpuProcess, ...]:
        """Return the processes; none where the driver does not report them."""
        code = self._ask()
        if code == _INSUFFICIENT_SIZE and self._count.value < _MOST_PROCESSES:
            self._make_room(2 * self._count.value)
            code = self._ask()
        if code != SUCCESS:
            return ()
        used = [(row.pid, row.usedGpuMemory) for row in self._rows[: self._count.value]]
        return tuple(
            GpuProcess(pid=pid, memory_bytes=memory if memory < U64_BLANK_FLOOR else None) for pid, memory in used
        )

    def _ask(self) -> int | None:
        self._count.value = len(self._rows)
        return self._call() if self._call is not None else None
