"""NVIDIA GPUs through NVML, by pynvml's own calls: discovery, and one reader per GPU or MIG device.

A MIG device has its own memory but shares its GPU's power, heat and clocks, which therefore stay with that GPU; it is
listed after it and names it.

Support is determined at opening: every call and field is tried, and one that the driver lacks or refuses is never tried
again. Another error (a timeout, a driver that is busy) says nothing of that: support is then determined again, until no
call fails so. One that worked is made each time; a failure then leaves a gap in that sample, as some drivers answer "not
supported" or 0 mW now and then when they are polled fast.

Known problems avoided here: `nvmlDeviceGetPowerUsage` is an average over a second on most GPUs since Ampere, so power
is field 186; `nvmlDeviceGetPcieThroughput` blocks 20 ms, so PCIe comes from byte counters; blank sentinels such as
4294967295 % are dropped. ctypes releases the interpreter lock during a call, so a driver that hangs blocks only the
calling thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pynvml

from orchestrator.gpu.sample import (
    Detail,
    GpuInfo,
    GpuLostError,
    GpuProcess,
    GpuReadError,
    ReaderOptions,
    Sample,
    Throttle,
    Vendor,
    XidCount,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[], Any]

Handle = Any
"""An opaque `nvmlDevice_t`."""
Pair = tuple[int, int]
"""A field and its scope."""

NO_DRIVER: Final = frozenset({9, 12})
"""DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND: the host has no NVIDIA driver at all."""
LOST: Final = frozenset({15, 16, 28})
"""GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND."""
TIMEOUT: Final = 10
LACKED: Final = frozenset({2, 3, 4, 6, 13, 14, 22, 24, 25, 26})
"""Lasting answers: INVALID_ARGUMENT, some "not supported", NO_PERMISSION, NOT_FOUND, CORRUPTED_INFOROM, what the driver's version lacks."""
AGAIN_SECONDS: Final = 2.0
LONGEST_AGAIN_SECONDS: Final = 60.0
"""Support that is in doubt is determined again after 2 s, later after a fifth of the time for which it has been, at most a minute."""
_TRIES: Final = 3

SETTINGS_SECONDS: Final = 5.0
"""The power limit and the fan are read at most this often: they change slowly."""
PROCESSES_SECONDS: Final = 1.5
"""The processes are read at every other reading where there is one a second."""
ENERGY_SECONDS: Final = 1.5
"""With one reading a second, the energy is read at every other one: it takes 4 ms of processor time on an H100."""
SLOW_SECONDS: Final = 4.5
"""The slow fields are read at every fifth one: on an H100 they take 2 ms together, and all other values 0.1 ms."""

_GPU_SENSOR: Final = 0
_MAX_NVLINKS: Final = 18
_SANE_WATTS: Final = 20_000.0
_SANE_CELSIUS: Final = 200.0
_SANE_HERTZ: Final = 1e11
_U32_BLANKS: Final = frozenset({0xFFFFFFFF, *range(0x7FFFFFF0, 0x80000000)})
_U64_BLANK_FLOOR: Final = 0x7FFFFFFFFFFFFFF0
"""Smallest of the vendor's marks for "no value" (9.2e18); no counter of a GPU reaches it."""

# ---------------------------------------------------------------------------- fields: id, unit, place in a `Sample`

POWER_INSTANT: Final = 186
MEMORY_TEMPERATURE: Final = 82
ENERGY: Final = 83
PCIE_TRANSMIT: Final = 197
PCIE_RECEIVE: Final = 198
NVLINK_COUNT: Final = 91
NVLINK_TRANSMIT: Final = 138
NVLINK_RECEIVE: Final = 139

SCOPE_GPU: Final = 0
SCOPE_MODULE: Final = 1
"""Grace Hopper reports power at the scope of the module only."""

THROTTLE_FIELDS: Final = (
    (74, Throttle.POWER_CAP),
    (269, Throttle.THERMAL),
    (75, Throttle.THERMAL),
    (270, Throttle.HARDWARE_THERMAL),
    (271, Throttle.POWER_BRAKE),
    (76, Throttle.SYNC_BOOST),
    (77, Throttle.CURRENT),
    (79, Throttle.RELIABILITY),
)
"""Nanoseconds each. Newer drivers count thermal slowdown in 269, older ones in 75; where both answer, the first is used."""
REPLACED: Final = {269: 75}
"""Older fields, by the newer ones that count the same."""
SLOW: Final = (PCIE_TRANSMIT, PCIE_RECEIVE, 75, 270, 271)
"""Fields that the driver gets from the GPU's own processor: 0.2 to 0.7 ms each on an H100 (driver 580), others take 5 us."""
ECC_FIELDS: Final = (
    (3, "corrected", "volatile"),
    (4, "uncorrected", "volatile"),
    (5, "corrected", "aggregate"),
    (6, "uncorrected", "aggregate"),
)
REMAPPED_FIELDS: Final = ((142, "correctable"), (143, "uncorrectable"), (144, "pending"), (145, "failure"))
THROTTLE_BITS: Final = (
    (0x002, Throttle.CLOCK_SETTING),
    (0x100, Throttle.CLOCK_SETTING),
    (0x004, Throttle.POWER_CAP),
    (0x008, Throttle.HARDWARE_SLOWDOWN),
    (0x010, Throttle.SYNC_BOOST),
    (0x020, Throttle.THERMAL),
    (0x040, Throttle.HARDWARE_THERMAL),
    (0x080, Throttle.POWER_BRAKE),
    (0x200, Throttle.CURRENT),
    (0x400, Throttle.RELIABILITY),
)
"""Bits of the clocks' event reasons. Bit 0 means that the GPU is idle, which is no throttling."""
CLOCK_DOMAINS: Final = ((1, "sm"), (2, "memory"))
"""The graphics clock equals the SM clock, and nothing here uses the video engines: two driver calls less."""
TEMPERATURE_LIMITS: Final = ((0, "gpu", "shutdown"), (1, "gpu", "slowdown"), (3, "gpu", "max"), (2, "memory", "max"))
"""(NVML's threshold, sensor, limit)."""

_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of a field's union, by its value type."""


def _value(row: Any) -> float | None:
    """Return a field's value; None for a refused one and for a vendor's mark of no value."""
    if row.nvmlReturn != pynvml.NVML_SUCCESS or row.valueType >= len(_MEMBERS):
        return None
    member = _MEMBERS[row.valueType]
    value: float = getattr(row.value, member)
    if member == "dVal":
        return value if abs(value) < 2**62 else None
    if member == "uiVal":
        return None if value in _U32_BLANKS else value
    if member == "siVal":
        return None if value >= 0x7FFFFFF0 else value
    return None if value >= _U64_BLANK_FLOOR else value


# ------------------------------------------------------------------------------------------------------ discovery


def open_nvidia() -> list[NvmlReader]:
    """Return a reader for every NVIDIA GPU and MIG device of this host; empty where there is none.

    Raises GpuReadError when there is a driver that does not work; a host without the driver simply has no NVIDIA GPU.
    """
    try:
        _open_driver()
    except GpuReadError as error:
        if getattr(error.__cause__, "value", None) in NO_DRIVER:
            return []
        raise
    try:
        return _open_all()
    finally:
        _close_driver()


def _open_driver() -> None:
    """Initialise the driver's library, once more. Raises GpuReadError where there is none or it does not answer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuReadError(f"NVML cannot start: {error}. `nvidia-smi` shows whether the driver works.") from error


def _close_driver() -> None:
    """Undo one `_open_driver`; the library stays loaded. Never raises."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _answer(function: Callable[..., Any], *arguments: Any, default: Any = None) -> Any:
    """Return what the driver answers, `default` where it lacks the function or refuses; a call that fails otherwise is made again."""
    for _ in range(_TRIES):
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            if error.value in LACKED | LOST:
                break
    return default


def _open_all() -> list[NvmlReader]:
    count = _answer(pynvml.nvmlDeviceGetCount)
    if count is None:
        raise GpuReadError("NVML cannot count its GPUs. `nvidia-smi` shows whether the driver works.")
    driver = _answer(pynvml.nvmlSystemGetDriverVersion, default="")
    readers: list[NvmlReader] = []
    for ordinal in range(count):
        handle = _answer(pynvml.nvmlDeviceGetHandleByIndex, ordinal)
        if handle is None:
            continue  # fallen off the bus: the others still work
        mig = _mig_devices(handle)
        parent = _describe(handle, len(readers), ordinal, driver, partitioned=bool(mig))
        readers.append(NvmlReader(parent))
        for device in mig:
            readers.append(NvmlReader(_describe(device, len(readers), ordinal, driver, parent=parent)))
    return readers


def _mig_devices(handle: Handle) -> list[Handle]:
    """Return the MIG devices of a GPU; none where MIG is off or unknown."""
    current, _pending = _answer(pynvml.nvmlDeviceGetMigMode, handle, default=(0, 0))
    slots = _answer(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, default=0) if current == 1 else 0
    found = (_answer(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in range(slots))
    return [device for device in found if device is not None]


def _describe(
    handle: Handle,
    index: int,
    ordinal: int,
    driver: str,
    *,
    partitioned: bool = False,
    parent: GpuInfo | None = None,
) -> GpuInfo:
    pci = None if parent else _answer(pynvml.nvmlDeviceGetPciInfo, handle)
    # The address as the kernel writes it, 0000:3b:00.0; NVML's own text has eight digits of the domain.
    bus = parent.pci_bus_id if parent else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else ""
    memory = _used_and_total(
        _answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        or _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
    )
    return GpuInfo(
        uuid=_answer(pynvml.nvmlDeviceGetUUID, handle) or f"nvidia-{bus}",
        index=index,
        ordinal=ordinal,
        vendor=Vendor.NVIDIA,
        model=_answer(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        memory_total_bytes=memory[1] if memory else None,
        pci_bus_id=bus,
        driver_version=driver,
        parent_uuid=parent.uuid if parent else None,
        partitioned=partitioned,
    )


def _used_and_total(found: Any) -> tuple[int, int] | None:
    """Return a GPU's memory in bytes: in use, and in all; None for an implausible answer."""
    usable = found is not None and 0 < found.total < _U64_BLANK_FLOOR and found.used <= found.total
    return (found.used, found.total) if usable else None


# --------------------------------------------------------------------------------------------------------- reading


class NvmlReader:
    """Reads one NVIDIA GPU or MIG device; see `orchestrator.gpu.sample.GpuReader`."""

    def __init__(self, info: GpuInfo, options: ReaderOptions | None = None) -> None:
        """Record the GPU; the first reading opens the driver, in the thread that reads."""
        self.info = info
        self.options = options or ReaderOptions()
        self._device: _Device | None = None
        self._xids: XidWatch | None = None

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        """Query the driver now; see `GpuReader.read`."""
        if self._device is None:
            self.reopen()
        assert self._device is not None
        if self.options.xids and self._xids is None and self.info.parent_uuid is None:
            self._xids = XidWatch(self.info.uuid)
        return self._device.read(detail, self._xids)

    def reopen(self) -> None:
        """Release the driver and find the GPU again by its UUID."""
        self._release()
        self._device = _Device(self.info, self.options)

    def _release(self) -> None:
        if self._device is not None:
            self._device = None
            _close_driver()

    def close(self) -> None:
        """Release the driver."""
        if self._xids is not None:
            self._xids.close()
            self._xids = None
        self._release()


Value = TypeVar("Value")


class _Kept(Generic[Value]):
    """A value that is read at most every so many seconds (monotonic), and repeated meanwhile."""

    def __init__(self, read: Callable[[], Value]) -> None:
        self._read = read
        self._due = 0.0
        self._value: Value | None = None

    def get(self, now: float, seconds: float) -> Value:
        if self._value is None or now >= self._due:
            self._due = now + seconds
            self._value = self._read()
        return self._value


class _Device:
    """One opened GPU: its handle and the calls that it supports."""

    def __init__(self, info: GpuInfo, options: ReaderOptions) -> None:
        self._info = info
        self._options = options
        self._asked = self._answered = 0
        self._freshness = Freshness()
        self._pcie_sent, self._pcie_received = Unwrapped(), Unwrapped()
        _open_driver()
        try:
            self._handle = self._find()
            self._prepare()
            self._doubted_since = time.monotonic()
            self._again_at = self._doubted_since + AGAIN_SECONDS
        except BaseException:
            _close_driver()
            raise

    def _find(self) -> Handle:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(self._info.uuid)
        except pynvml.NVMLError as error:
            self._check_lost(error)
            raise GpuReadError(
                f"GPU {self._info.uuid}: {error}. `nvidia-smi` shows whether the driver works."
            ) from error

    def _check_lost(self, error: pynvml.NVMLError) -> None:
        """Raise GpuLostError where the driver says that the GPU is gone."""
        if error.value in LOST:
            raise GpuLostError(
                f"GPU {self._info.uuid}: {error}. Look for Xid 79 in the kernel log; the GPU needs a reset or a reboot."
            ) from error

    # -- preparing

    def _prepare(self) -> None:
        """Bind every call that the driver has and the GPU answers. Raises GpuLostError."""
        self._in_doubt = False
        # Version 2 leaves the driver's own reservation out.
        self._memory = self._first(("nvmlDeviceGetMemoryInfo",), pynvml.nvmlMemory_v2) or self._first(
            ("nvmlDeviceGetMemoryInfo",)
        )
        self._utilization = self._first(("nvmlDeviceGetUtilizationRates",))
        # The newer call where the driver has it, because CUDA 14 removes the older one.
        self._temperature = self._first(("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), _GPU_SENSOR)
        clocks = ((name, self._first(("nvmlDeviceGetClockInfo",), domain)) for domain, name in CLOCK_DOMAINS)
        self._clocks = tuple((name, call) for name, call in clocks if call is not None)
        # Instantaneous power at the GPU's scope, else at its module's, else the driver's average.
        self._power_field = self._supported(((POWER_INSTANT, SCOPE_GPU),)) or self._supported(
            ((POWER_INSTANT, SCOPE_MODULE),)
        )
        self._power_average = None if self._power_field else self._first(("nvmlDeviceGetPowerUsage",))
        self._prepare_fields()
        self._limit = self._first(("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"))
        self._fan = self._first(("nvmlDeviceGetFanSpeed",))
        self._settings = _Kept(self._read_settings)
        self._processes = _Kept(self._read_processes)
        self._reasons = self._first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        )
        supported = self._first(
            ("nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons")
        )
        self._supported_reasons = self._ask(supported) or 0
        limits = (
            (sensor, limit, self._ask(self._first(("nvmlDeviceGetTemperatureThreshold",), threshold)))
            for threshold, sensor, limit in TEMPERATURE_LIMITS
        )
        self._temperature_limits = tuple(
            (sensor, limit, float(celsius))
            for sensor, limit, celsius in limits
            if celsius is not None and 0 < celsius < _SANE_CELSIUS
        )
        self._support_in_doubt = self._in_doubt  # failures of later readings say nothing about support

    def _prepare_fields(self) -> None:
        """Choose the fields of a full reading: those that are cheap, those that are slow, and the energy."""
        count = self._fields(((NVLINK_COUNT, 0),)).get((NVLINK_COUNT, 0))
        links = range(min(int(count or 0), _MAX_NVLINKS))
        wanted = (
            MEMORY_TEMPERATURE,
            *(field for field, _ in THROTTLE_FIELDS if field not in SLOW),
            *(field for field, _, _ in ECC_FIELDS),
            *(field for field, _ in REMAPPED_FIELDS),
        )
        per_link = ((field, link) for link in links for field in (NVLINK_TRANSMIT, NVLINK_RECEIVE))
        # Power comes first where it comes from a field at all: a full reading then needs no second call for it.
        self._full_fields = self._supported((*self._power_field, *((field, 0) for field in wanted), *per_link))
        known = {field for field, _ in self._full_fields}
        instead = {older for newer, older in REPLACED.items() if newer in known}
        slow = self._supported(tuple((field, 0) for field in SLOW if field not in instead))
        self._slow = _Kept(lambda: self._fields(slow))
        energy = self._supported(((ENERGY, 0),))
        older = None if energy else self._first(("nvmlDeviceGetTotalEnergyConsumption",))
        self._energy = _Kept(lambda: (self._fields(energy).get((ENERGY, 0)) if energy else self._ask(older),))

    def _first(self, names: Sequence[str], *arguments: object) -> Call | None:
        """Return the first of these calls that pynvml and the driver have and the GPU answers. Raises GpuLostError."""
        for name in names:
            function = getattr(pynvml, name, None)
            if function is None:
                continue  # an older pynvml
            call = partial(function, self._handle, *arguments)
            try:
                call()
            except pynvml.NVMLError as error:
                self._check_lost(error)
                self._doubt(error.value)
                continue
            return call
        return None

    def _supported(self, wanted: Sequence[Pair]) -> tuple[Pair, ...]:
        """Return the fields that the GPU has, in their order. Raises GpuLostError."""
        while wanted:
            rows = self._rows(wanted)
            if not rows:
                return ()
            usable = tuple(
                pair for pair, row in zip(wanted, rows, strict=True) if row.nvmlReturn == pynvml.NVML_SUCCESS
            )
            if usable == tuple(wanted):
                return usable
            for row in rows:
                self._doubt(row.nvmlReturn)
            wanted = usable
        return ()

    def _doubt(self, result: int) -> None:
        """Record a call that failed for a reason that may pass."""
        self._in_doubt = self._in_doubt or result not in LACKED | {pynvml.NVML_SUCCESS}

    def _settle_doubts(self) -> None:
        """Determine support again where it is in doubt and that is due."""
        now = time.monotonic()
        if self._support_in_doubt and now >= self._again_at:
            self._again_at = now + min(LONGEST_AGAIN_SECONDS, max(AGAIN_SECONDS, (now - self._doubted_since) / 5))
            self._prepare()

    # -- asking

    def _ask(self, call: Call | None) -> Any:
        """Make a call; return the answer, None where there is none this time. Raises GpuLostError."""
        if call is None:
            return None
        self._asked += 1
        try:
            answer = call()
        except pynvml.NVMLError as error:
            self._check_lost(error)
            self._doubt(error.value)
            return None
        self._answered += 1
        return answer

    def _rows(self, pairs: Sequence[Pair]) -> Sequence[Any]:
        """Read fields, all in one driver call; nothing when there is none or the driver refuses. Raises GpuLostError."""
        if not pairs:
            return ()
        rows: Sequence[Any] | None = self._ask(partial(pynvml.nvmlDeviceGetFieldValues, self._handle, pairs))
        return () if rows is None else rows

    def _fields(self, pairs: Sequence[Pair], rows: Sequence[Any] | None = None) -> dict[Pair, float]:
        """Return the values of fields, from `rows` if they were read already; refused values and blanks are left out."""
        rows = self._rows(pairs) if rows is None else rows
        values = ((pair, _value(row)) for pair, row in zip(pairs, rows, strict=False))
        return {pair: value for pair, value in values if value is not None}

    # -- reading

    def read(self, detail: Detail, xids: XidWatch | None) -> Sample:
        """Return one reading. Raises GpuLostError, or GpuReadError when all calls fail."""
        self._settle_doubts()
        wall, start, monotonic = time.time(), time.perf_counter(), time.monotonic()
        sample = Sample(gpu_uuid=self._info.uuid, timestamp=wall, monotonic=monotonic)
        self._asked = self._answered = 0
        rows = self._rows(self._full_fields) if detail is Detail.FULL else ()
        self._read_power(sample, rows)
        if detail is not Detail.POWER:
            self._read_load(sample)
        if detail is Detail.FULL:
            self._read_full(sample, rows)
            if xids is not None:
                sample.xids = xids.counts()
        if self._asked and not self._answered:
            raise GpuReadError(f"GPU {self._info.uuid} answered none of {self._asked} questions. See `nvidia-smi`.")
        sample.duration_seconds = time.perf_counter() - start
        return sample

    def _read_power(self, sample: Sample, rows: Sequence[Any]) -> None:
        milliwatts, timestamp_us = None, 0
        if not self._power_field:
            milliwatts = self._ask(self._power_average)
        elif found := (rows or self._rows(self._power_field)):
            milliwatts, timestamp_us = _value(found[0]), found[0].timestamp
        watts = None if milliwatts is None else milliwatts / 1e3
        if watts is not None and not 0.0 < watts < _SANE_WATTS:
            watts = None  # some drivers report 0 W when polled too often
        if watts is not None:
            sample.power_watts = watts
        sample.fresh = self._freshness.update(watts, timestamp_us, int(sample.timestamp * 1e6))
        if timestamp_us > 0:
            sample.driver_timestamp = timestamp_us / 1e6

    def _read_load(self, sample: Sample) -> None:
        celsius = self._ask(self._temperature)
        if celsius is not None and abs(celsius) < _SANE_CELSIUS:
            sample.temperatures = (("gpu", float(celsius)),)
        load = self._ask(self._utilization)
        if load is not None:
            sample.utilization = load.gpu / 100 if load.gpu <= 100 else None
            sample.memory_activity = load.memory / 100 if load.memory <= 100 else None
        memory = _used_and_total(self._ask(self._memory))
        if memory is not None:
            sample.memory_used_bytes, sample.memory_total_bytes = memory
        clocks = ((name, self._ask(call)) for name, call in self._clocks)
        sample.clocks = tuple(
            (name, megahertz * 1e6) for name, megahertz in clocks if megahertz and megahertz * 1e6 < _SANE_HERTZ
        )

    def _read_full(self, sample: Sample, rows: Sequence[Any]) -> None:
        sparing, now = self._options.sparing, sample.monotonic
        found = self._fields(self._full_fields, rows) | self._slow.get(now, SLOW_SECONDS if sparing else 0.0)
        self._sort_fields(found, sample)
        (millijoules,) = self._energy.get(now, ENERGY_SECONDS if sparing else 0.0)
        if millijoules is not None:
            sample.energy_joules = millijoules / 1e3
        sample.power_limit_watts, sample.fan = self._settings.get(now, SETTINGS_SECONDS)
        reasons = self._ask(self._reasons)
        if reasons is not None:
            sample.throttle = throttle_states(self._supported_reasons, reasons)
        sample.temperature_limits = self._temperature_limits
        if self._options.processes:
            sample.processes = self._processes.get(now, PROCESSES_SECONDS)

    def _read_settings(self) -> tuple[float | None, float | None]:
        """Return the power limit (watts) and the fan's speed (ratio)."""
        limit, fan = self._ask(self._limit), self._ask(self._fan)
        watts = limit / 1e3 if limit is not None and 0 < limit < _SANE_WATTS * 1e3 else None
        return watts, None if fan is None or fan in _U32_BLANKS else fan / 100

    def _read_processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes on the GPU; none where the driver does not report them."""
        rows = _answer(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle, default=())
        used = [(row.pid, row.usedGpuMemory) for row in rows]
        return tuple(
            GpuProcess(pid=pid, memory_bytes=memory if memory is not None and memory < _U64_BLANK_FLOOR else None)
            for pid, memory in used
        )

    def _sort_fields(self, found: dict[Pair, float], sample: Sample) -> None:
        celsius = found.get((MEMORY_TEMPERATURE, 0))
        if celsius and celsius < _SANE_CELSIUS:  # GPUs without the sensor answer 0
            sample.temperatures = (*sample.temperatures, ("memory", float(celsius)))
        sent, received = found.get((PCIE_TRANSMIT, 0)), found.get((PCIE_RECEIVE, 0))
        if sent is not None:
            sample.pcie_transmit_bytes = self._pcie_sent.update(int(sent))
        if received is not None:
            sample.pcie_receive_bytes = self._pcie_received.update(int(received))
        held: dict[Throttle, float] = {}
        for field, reason in THROTTLE_FIELDS:
            if (field, 0) in found:
                held.setdefault(reason, found[field, 0] / 1e9)
        sample.throttle_seconds = tuple(held.items())
        sample.ecc_errors = tuple(
            (severity, scope, int(found[field, 0])) for field, severity, scope in ECC_FIELDS if (field, 0) in found
        )
        sample.remapped_rows = tuple(
            (cause, int(found[field, 0])) for field, cause in REMAPPED_FIELDS if (field, 0) in found
        )
        sample.nvlinks = _links(found)


def _links(found: dict[Pair, float]) -> tuple[tuple[int, int | None, int | None], ...]:
    """Return (link, bytes sent, bytes received) from NVML's KiB counters."""

    def bytes_of(field: int, link: int) -> int | None:
        kibibytes = found.get((field, link))
        return None if kibibytes is None else int(kibibytes) * 1024

    numbers = sorted({link for field, link in found if field in {NVLINK_TRANSMIT, NVLINK_RECEIVE}})
    return tuple((link, bytes_of(NVLINK_TRANSMIT, link), bytes_of(NVLINK_RECEIVE, link)) for link in numbers)


def throttle_states(supported: int, active: int) -> tuple[tuple[Throttle, bool], ...]:
    """Return the reasons that a GPU can report, each with whether it holds now, from NVML's two bit masks."""
    states: dict[Throttle, bool] = {}
    for bit, reason in THROTTLE_BITS:
        if supported & bit or active & bit:
            states[reason] = states.get(reason, False) or bool(active & bit)
    return tuple(states.items())


@dataclass(slots=True)
class Unwrapped:
    """Extends a hardware counter of 32 bits that wraps to an unbounded integer.

    Only one wrap between two readings is detectable; a counter that falls by less than half its range was reset, and is
    passed on unchanged, which Prometheus' `rate()` supports.
    """

    offset: int = 0
    last: int = 0

    def update(self, raw: int) -> int:
        """Return the counter's value with all wraps so far added."""
        if raw < self.last < 2**32 and self.last - raw > 2**31:
            self.offset += 2**32
        elif raw < self.last:
            self.offset = 0
        self.last = raw
        return raw + self.offset


@dataclass(slots=True)
class Freshness:
    """Distinguishes a new value of a sensor from a repeated one.

    A driver's timestamp from before the call is the sensor's own: the value is fresh when it has changed. One from
    during the call only repeats the time of the call; then, and without any, only a changed value proves freshness.
    """

    _value: float | None = None
    _timestamp_us: int = 0

    def update(self, value: float | None, timestamp_us: int, asked_us: int) -> bool:
        """Whether this value is new; times in microseconds of Unix time, 0 where the driver gives none."""
        sensor_time = 0 < timestamp_us < asked_us
        fresh = timestamp_us != self._timestamp_us if sensor_time else value != self._value
        self._value, self._timestamp_us = value, timestamp_us
        return fresh and value is not None


# ------------------------------------------------------------------------------------------------------ Xid events

_XID_CRITICAL: Final = 0x8
_WAIT_MILLISECONDS: Final = 1000
_RETRY_SECONDS: Final = 1.0


class XidWatch:
    """Counts a GPU's Xid events from now on, in a thread that blocks in the driver.

    NVML delivers each event to a waiting caller once and keeps no history. The thread initialises the library itself
    and dies with its process; a driver that hangs blocks only this thread.
    """

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
                _open_driver()
            except GpuReadError:
                self._stop.wait(_RETRY_SECONDS)
                continue
            try:
                self._watch()
            except pynvml.NVMLError:
                self._stop.wait(_RETRY_SECONDS)
            finally:
                self._armed.clear()
                _close_driver()

    def _watch(self) -> None:
        """Wait for events until stopped. Raises NVMLError when the driver fails."""
        events = _answer(pynvml.nvmlEventSetCreate)
        if events is None:
            self._stop.wait()
            return
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            pynvml.nvmlDeviceRegisterEvents(handle, _XID_CRITICAL, events)
            self._armed.set()
            while not self._stop.is_set():
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, _WAIT_MILLISECONDS)
                except pynvml.NVMLError as error:
                    if error.value != TIMEOUT:
                        raise
                    continue
                if data.eventType & _XID_CRITICAL:
                    self._count(int(data.eventData))
        finally:
            _answer(pynvml.nvmlEventSetFree, events)

    def _count(self, code: int) -> None:
        with self._lock:
            seen = self._counts[code].count if code in self._counts else 0
            self._counts[code] = XidCount(code=code, count=seen + 1, last_timestamp=time.time())
