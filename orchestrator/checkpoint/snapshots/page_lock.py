"""Page-locks the memory of slots into which a GPU's tensors are copied.

The CUDA driver copies to memory that may be paged out through a small buffer of its own, on the processor; to locked memory the GPU
writes by itself, at the speed of its bus. The CUDA driver is called and not torch's runtime: an error of the runtime stays set, and an
unrelated later call of the script's would raise it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.snapshots.file import SnapshotSlot

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts of the process
_SUCCESS: Final = 0


class MemoryLocks(Protocol):
    """The two calls of the CUDA driver; each returns whether it succeeded."""

    def lock(self, address: int, size: int) -> bool:
        """Lock ``size`` bytes of memory."""

    def unlock(self, address: int) -> bool:
        """Undo ``lock``."""


class CudaDriver:
    """The driver library that torch has loaded. Raises OSError without one, AttributeError where it is too old."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._lock, self._unlock = library.cuMemHostRegister_v2, library.cuMemHostUnregister
        self._lock.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unlock.argtypes = [ctypes.c_void_p]

    def lock(self, address: int, size: int) -> bool:
        """See MemoryLocks. Fails in a thread that has no CUDA context."""
        return bool(self._lock(address, size, _PORTABLE) == _SUCCESS)

    def unlock(self, address: int) -> bool:
        """See MemoryLocks."""
        return bool(self._unlock(address) == _SUCCESS)


@functools.cache
def cuda_driver() -> CudaDriver | None:
    """Return the CUDA driver; None where there is none (AMD, Intel)."""
    try:
        return CudaDriver()
    except (OSError, AttributeError):
        return None


class PageLocks:
    """Locks the slots of a process: each once, for as long as it is mapped."""

    def __init__(self, driver: Callable[[], MemoryLocks | None] = cuda_driver) -> None:
        self._driver = driver
        self._tried: weakref.WeakSet[Any] = weakref.WeakSet()

    def lock(self, slot: SnapshotSlot) -> None:
        """Lock a slot's memory, if that was not tried before. A failure only makes copies into the slot slower."""
        if slot in self._tried:
            return
        self._tried.add(slot)
        driver, address = self._driver(), _address_of(slot)
        if driver is not None and driver.lock(address, len(slot.memory)):
            # Before the memory is unmapped: a slot's finalizer precedes the release of what it refers to.
            weakref.finalize(slot, driver.unlock, address).atexit = False


def _address_of(slot: SnapshotSlot) -> int:
    import torch

    return int(torch.frombuffer(slot.memory, dtype=torch.uint8).data_ptr())
