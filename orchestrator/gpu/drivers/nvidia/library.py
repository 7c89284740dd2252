"""NVML as prepared calls: functions of the driver's library with their arguments bound and their results preallocated.

pynvml finds and loads the library and has its structures and constants. Its functions create objects and raise an
exception for everything that a GPU lacks, which is common here, so readers call the library directly: the same call
costs a twentieth. Nothing in this module interprets a value; `nvml.py` does.

ctypes releases the interpreter lock during a call, so a driver that hangs blocks only the calling thread.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.reader import GpuLostError, GpuReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SUCCESS: Final = 0
UNINITIALIZED: Final = 1
NOT_FOUND: Final = 6
TIMEOUT: Final = 10
FUNCTION_NOT_FOUND: Final = 13
LOST: Final = frozenset({15, 16, 28})
"""GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND."""

U32_BLANKS: Final = frozenset({0xFFFFFFFF, *range(0x7FFFFFF0, 0x80000000)})
U64_BLANK_FLOOR: Final = 0x7FFFFFFFFFFFFFF0
"""Smallest of the vendor's marks for "no value" (9.2e18); no counter of a GPU reaches it."""

Handle = Any
"""An opaque `nvmlDevice_t`."""


class Temperature(ctypes.Structure):
    """Argument of `nvmlDeviceGetTemperatureV`; older pynvml releases do not have it."""

    _fields_ = (("version", ctypes.c_uint), ("sensor", ctypes.c_uint), ("celsius", ctypes.c_int))


class Call:
    """One function with its arguments; calling it returns NVML's return code."""

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., int], *arguments: Any) -> None:
        self._function = function
        self._arguments = arguments

    def __call__(self) -> int:
        """Make the call; returns NVML's code, with the results in what the arguments point to."""
        return self._function(*self._arguments)


class Library:
    """The loaded driver library, initialised; `close` undoes one `open`."""

    def __init__(self) -> None:
        """Load and initialise. Raises GpuReadError where there is no driver or it does not answer."""
        import pynvml

        self.types: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GpuReadError(f"NVML cannot start: {error}. `nvidia-smi` shows whether the driver works.") from error
        self._library: Any = pynvml.nvmlLib

    def function(self, name: str) -> Callable[..., int] | None:
        """Return the function of that name, or None where the driver is too old to have it."""
        return getattr(self._library, name, None)

    def call(self, names: str | Iterable[str], *arguments: Any) -> Call | None:
        """Return a prepared call of the first of these functions that the driver has, else None."""
        for name in (names,) if isinstance(names, str) else names:
            function = self.function(name)
            if function is not None:
                return Call(function, *arguments)
        return None

    def check(self, code: int, what: str) -> None:
        """Turn a return code other than success into GpuLostError or GpuReadError."""
        if code == SUCCESS:
            return
        message = f"{what}: {self.describe(code)}"
        if code in LOST:
            raise GpuLostError(f"{message}. Look for Xid 79 in the kernel log; the GPU needs a reset or a reboot.")
        raise GpuReadError(f"{message}. `nvidia-smi` shows whether the driver works.")

    def describe(self, code: int) -> str:
        """Return NVML's text for a return code."""
        try:
            return str(self.types.NVMLError(code))
        except Exception:
            return f"NVML error {code}"

    def text(self, name: str, *arguments: Any, size: int = 96) -> str:
        """Return the text that a function writes; empty where the driver lacks the function or refuses."""
        buffer = ctypes.create_string_buffer(size)
        call = self.call(name, *arguments, buffer, ctypes.c_uint(size))
        if call is None or call() != SUCCESS:
            return ""
        return buffer.value.decode("utf-8", "replace")

    def number(self, name: str, *arguments: Any) -> int | None:
        """Return the number that a function writes; None where the driver lacks the function, refuses, or has no value."""
        out = ctypes.c_uint()
        call = self.call(name, *arguments, ctypes.byref(out))
        if call is None or call() != SUCCESS or out.value in U32_BLANKS:
            return None
        return out.value

    def device(self, name: str, *arguments: Any) -> Handle | None:
        """Return the device handle from a function, or None."""
        handle = self.types.c_nvmlDevice_t()
        call = self.call(name, *arguments, ctypes.byref(handle))
        if call is None or call() != SUCCESS:
            return None
        return handle

    def close(self) -> None:
        """Undo the initialisation; the library stays loaded. Never raises."""
        try:
            self.types.nvmlShutdown()
        except self.types.NVMLError:
            return


_FIELD = struct.Struct("=IIqqIIQ")
"""nvmlFieldValue_t: field, scope, timestamp (us), latency (us), value type, return code, value."""


FieldRow = tuple[int, float | None, int]
"""(return code, value or None, driver's timestamp in microseconds) of one field."""


class FieldBatch:
    """Field values of one GPU, all of them in one driver call on an array that is allocated once."""

    def __init__(self, library: Library, handle: Handle, fields: tuple[tuple[int, int], ...]) -> None:
        """Prepare a call for (field id, scope id) pairs; raises GpuReadError where the driver lacks field values."""
        self.fields = fields
        self._array = (library.types.c_nvmlFieldValue_t * len(fields))()
        if ctypes.sizeof(self._array) != _FIELD.size * len(fields):
            raise GpuReadError("NVML's field values have another layout than this program knows. Update orch.")
        for slot, (field, scope) in zip(self._array, fields, strict=True):
            slot.fieldId, slot.scopeId = field, scope
        call = library.call("nvmlDeviceGetFieldValues", handle, ctypes.c_int(len(fields)), ctypes.byref(self._array))
        if call is None:
            raise GpuReadError("this driver has no field values")
        self._call = call
        self._bytes = memoryview(self._array).cast("B")

    def read(self) -> int:
        """Read the fields; return the driver's code for the call as a whole."""
        return self._call()

    def rows(self) -> list[FieldRow]:
        """Return the results of `read`, in the order of `fields`."""
        rows: list[FieldRow] = []
        for _field, _scope, timestamp, _latency, kind, code, raw in _FIELD.iter_unpack(self._bytes):
            rows.append((code, _decode(kind, raw) if code == SUCCESS else None, timestamp))
        return rows


def _decode(kind: int, raw: int) -> float | None:
    """Decode a field's union by its value type; None for a vendor's mark of no value."""
    if kind == 1:  # unsigned int
        value = raw & 0xFFFFFFFF
        return None if value in U32_BLANKS else value
    if kind in {2, 3}:  # unsigned long, unsigned long long
        return None if raw >= U64_BLANK_FLOOR else raw
    if kind == 0:  # double
        (number,) = struct.unpack("=d", struct.pack("=Q", raw))
        return float(number) if abs(number) < 2**62 else None
    if kind == 4:  # signed long long
        signed = raw - (1 << 64) if raw >> 63 else raw
        return None if signed >= U64_BLANK_FLOOR else signed
    if kind == 5:  # signed int
        low = raw & 0xFFFFFFFF
        return None if low in U32_BLANKS - {0xFFFFFFFF} else (low - (1 << 32) if low >> 31 else low)
    return raw & 0xFFFF if kind == 6 else None  # unsigned short
