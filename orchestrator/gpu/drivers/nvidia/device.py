"""One opened NVIDIA GPU: prepared calls for everything that it supports.

Support is determined once, at opening: every call and field is tried, and one that the driver lacks or refuses is
never tried again. One that worked is read each time; a failure then leaves a gap in that sample (fast polling makes
some drivers answer "not supported" or 0 mW now and then), counted in the tally.

Known problems avoided here: `nvmlDeviceGetPowerUsage` is an average over a second on most GPUs since Ampere, so power
is field 186; `nvmlDeviceGetPcieThroughput` blocks 20 ms, so PCIe comes from byte counters; blank sentinels such as
4294967295 % are dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers.nvidia import fields
from orchestrator.gpu.drivers.nvidia.asking import Asking
from orchestrator.gpu.drivers.nvidia.calls import MemoryCall, ProcessCall
from orchestrator.gpu.drivers.nvidia.library import (
    LOST,
    SUCCESS,
    U32_BLANKS,
    Call,
    FieldBatch,
    FieldRow,
    Handle,
    Library,
)
from orchestrator.gpu.drivers.nvidia.library import Temperature as TemperatureArgument
from orchestrator.gpu.drivers.nvidia.slow import EnergySource, SlowReadings
from orchestrator.gpu.reader import Detail, GpuReadError, ReaderOptions
from orchestrator.gpu.sample import GpuInfo, GpuProcess, Sample, SampleValues, Throttle

if TYPE_CHECKING:
    from orchestrator.gpu.drivers.nvidia.events import XidWatch

_TEMPERATURE_V1: Final = 0x0100000C
_GPU_SENSOR: Final = 0
_MAX_NVLINKS: Final = 18
SETTINGS_SECONDS: Final = 5.0
"""The power limit and the fan are read at most this often: they change slowly."""
PROCESSES_SECONDS: Final = 1.5
"""The processes are read at every other reading where there is one a second."""
_SANE_WATTS: Final = 20_000.0
_SANE_CELSIUS: Final = 200.0
_SANE_MEGAHERTZ: Final = 100_000


class Device:
    """One opened GPU: its handle and the calls that it supports."""

    def __init__(self, info: GpuInfo, options: ReaderOptions) -> None:
        self._info = info
        self._tally = options.tally
        self._options = options
        self._library = Library()
        try:
            self._handle = self._find()
            self._asking = Asking(self._library, info.uuid, options.tally)
            self._prepare()
        except BaseException:
            self._library.close()
            raise

    def _find(self) -> Handle:
        handle = self._library.types.c_nvmlDevice_t()
        uuid = ctypes.c_char_p(self._info.uuid.encode())
        call = self._library.call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(handle))
        if call is None:
            raise GpuReadError("this NVIDIA driver is too old to find a GPU by its UUID. Update it to 450 or newer.")
        self._library.check(call(), f"GPU {self._info.uuid}")
        return handle

    def _prepare(self) -> None:
        """Bind every call that the driver has and the GPU answers."""
        library, handle = self._library, self._handle
        self._memory = MemoryCall(library, handle)
        self._utilization = library.types.c_nvmlUtilization_t()
        self._ask_utilization = self._works(
            library.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(self._utilization))
        )
        self._prepare_temperature()
        self._clocks = tuple(
            (name, clock, call) for domain, name in fields.CLOCK_DOMAINS for clock, call in self._clock(domain)
        )
        self._prepare_power()
        self._prepare_slow()

    def _works(self, call: Call | None) -> Call | None:
        """Return the call if it succeeds now; a lost GPU is an error, any other error means that the GPU does not support it."""
        if call is None:
            return None
        code = call()
        if code in LOST:
            self._library.check(code, f"GPU {self._info.uuid}")
        return call if code == SUCCESS else None

    def _number(self, names: str | tuple[str, ...], *arguments: object) -> tuple[ctypes.c_uint, Call] | None:
        out = ctypes.c_uint()
        call = self._works(self._library.call(names, self._handle, *arguments, ctypes.byref(out)))
        return (out, call) if call is not None else None

    def _clock(self, domain: int) -> list[tuple[ctypes.c_uint, Call]]:
        found = self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(domain))
        return [found] if found else []

    def _prepare_temperature(self) -> None:
        """Prepare the newer call where the driver has it, because CUDA 14 removes the older one."""
        argument = TemperatureArgument(version=_TEMPERATURE_V1, sensor=_GPU_SENSOR)
        call = self._works(self._library.call("nvmlDeviceGetTemperatureV", self._handle, ctypes.byref(argument)))
        self._temperature: tuple[ctypes.c_uint | TemperatureArgument, Call] | None
        if call is not None:
            self._temperature = (argument, call)
        else:
            self._temperature = self._number("nvmlDeviceGetTemperature", ctypes.c_uint(_GPU_SENSOR))

    def _prepare_power(self) -> None:
        """Prepare instantaneous power at the GPU's scope, else at its module's, else the driver's average."""
        self._freshness = fields.Freshness()
        self._power_batch = self._batch(((fields.POWER_INSTANT, fields.SCOPE_GPU),)) or self._batch(
            ((fields.POWER_INSTANT, fields.SCOPE_MODULE),)
        )
        self._power_average = None if self._power_batch else self._number("nvmlDeviceGetPowerUsage")

    def _batch(self, wanted: tuple[tuple[int, int], ...]) -> FieldBatch | None:
        """Return a batch of the fields that the GPU supports; None without any."""
        if not wanted:
            return None
        try:
            batch = FieldBatch(self._library, self._handle, wanted)
        except GpuReadError:
            return None
        code = batch.read()
        if code in LOST:
            self._library.check(code, f"GPU {self._info.uuid}")
        if code != SUCCESS:
            return None
        usable = tuple(pair for pair, (result, _, _) in zip(wanted, batch.rows(), strict=True) if result == SUCCESS)
        if usable == wanted:
            return batch
        return self._batch(usable)

    def _prepare_slow(self) -> None:
        """Prepare the calls that only a full reading makes."""
        links = self._nvlinks()
        wanted = (
            fields.MEMORY_TEMPERATURE,
            *(field for field, _ in fields.THROTTLE_FIELDS if field not in fields.SLOW),
            *(field for field, _, _ in fields.ECC_FIELDS),
            *(field for field, _ in fields.REMAPPED_FIELDS),
        )
        per_link = tuple((field, link) for link in links for field in (fields.NVLINK_TRANSMIT, fields.NVLINK_RECEIVE))
        # Power comes first where it comes from a field at all: a full reading then needs no second call for it.
        power = self._power_batch.fields if self._power_batch is not None else ()
        self._batch_full = self._batch((*power, *((field, 0) for field in wanted), *per_link))
        known = {field for field, _ in self._batch_full.fields} if self._batch_full is not None else set()
        instead = {older for newer, older in fields.REPLACED.items() if newer in known}
        self._slow = SlowReadings(
            self._asking,
            fields=self._batch(tuple((field, 0) for field in fields.SLOW if field not in instead)),
            energy=self._energy(),
        )
        self._pcie_sent, self._pcie_received = fields.Unwrapped(), fields.Unwrapped()
        self._limit = self._number(("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"))
        self._fan = self._number("nvmlDeviceGetFanSpeed")
        self._settings: SampleValues = {}
        self._settings_due = 0.0
        self._processes = ProcessCall(self._library, self._handle)
        self._processes_seen: tuple[GpuProcess, ...] = ()
        self._processes_due = 0.0
        self._prepare_throttle()
        self._temperature_limits = tuple(
            (sensor, limit, float(found[0].value))
            for threshold, sensor, limit in fields.TEMPERATURE_LIMITS
            if (found := self._number("nvmlDeviceGetTemperatureThreshold", ctypes.c_uint(threshold)))
            and 0 < found[0].value < _SANE_CELSIUS
        )

    def _energy(self) -> EnergySource:
        batch, out = self._batch(((fields.ENERGY, 0),)), ctypes.c_ulonglong()
        older = self._library.call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(out))
        return EnergySource(batch, self._works(older) if batch is None else None, out)

    def _nvlinks(self) -> range:
        batch = self._batch(((fields.NVLINK_COUNT, 0),))
        count = batch.rows()[0][1] if batch else None
        return range(min(int(count or 0), _MAX_NVLINKS))

    def _prepare_throttle(self) -> None:
        self._reasons = ctypes.c_ulonglong()
        self._ask_reasons = self._works(
            self._library.call(
                ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
                self._handle,
                ctypes.byref(self._reasons),
            )
        )
        supported = ctypes.c_ulonglong()
        self._works(
            self._library.call(
                ("nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"),
                self._handle,
                ctypes.byref(supported),
            )
        )
        self._supported_reasons = supported.value

    def read(self, detail: Detail, xids: XidWatch | None) -> Sample:
        """Return one reading. Raises GpuLostError, or GpuReadError when all calls fail."""
        wall, start = time.time(), time.perf_counter()
        monotonic = time.monotonic()
        values: SampleValues = {}
        self._asking.begin()
        rows = self._asking.rows(self._batch_full) if detail is Detail.FULL else []
        self._read_power(values, wall, rows)
        if detail is not Detail.POWER:
            self._read_load(values)
        if detail is Detail.FULL:
            self._read_full(values, rows)
            if xids is not None:
                values["xids"] = xids.counts()
        self._asking.check_answered()
        return Sample(
            gpu_uuid=self._info.uuid,
            timestamp=wall,
            monotonic=monotonic,
            duration_seconds=time.perf_counter() - start,
            **values,
        )

    def _read_power(self, values: SampleValues, wall: float, rows: list[FieldRow]) -> None:
        watts, timestamp_us = self._ask_power(rows)
        if watts is not None and not 0.0 < watts < _SANE_WATTS:
            self._tally.zero_power += watts <= 0.0
            self._tally.blank += watts >= _SANE_WATTS
            watts = None
        if watts is not None:
            values["power_watts"] = watts
        values["fresh"] = self._freshness.update(watts, timestamp_us, int(wall * 1e6))
        if timestamp_us > 0:
            values["driver_timestamp"] = timestamp_us / 1e6

    def _ask_power(self, rows: list[FieldRow]) -> tuple[float | None, int]:
        """Return (watts or None, the driver's timestamp in microseconds or 0), from `rows` if they contain it."""
        if self._power_batch is None:
            asked = self._power_average is not None and self._asking.ask(self._power_average[1])
            return (self._power_average[0].value / 1e3, 0) if asked and self._power_average else (None, 0)
        for result, milliwatts, timestamp_us in (rows or self._asking.rows(self._power_batch))[:1]:
            if result == SUCCESS and milliwatts is not None:
                return milliwatts / 1e3, timestamp_us
            self._tally.failed += 1
        return None, 0

    def _read_temperature(self, values: SampleValues) -> None:
        if self._temperature is not None and self._asking.ask(self._temperature[1]):
            source = self._temperature[0]
            celsius = source.celsius if isinstance(source, TemperatureArgument) else source.value
            if abs(celsius) < _SANE_CELSIUS:
                values["temperatures"] = (("gpu", float(celsius)),)
            else:
                self._tally.blank += 1

    def _read_load(self, values: SampleValues) -> None:
        self._read_temperature(values)
        if self._asking.ask(self._ask_utilization):
            values["utilization"] = self._percent(self._utilization.gpu)
            values["memory_activity"] = self._percent(self._utilization.memory)
        memory = self._memory.read()
        if memory is not None:
            self._asking.answered()
            values["memory_used_bytes"] = memory[0]
            values["memory_total_bytes"] = memory[1]
        clocks = [(name, out.value * 1e6) for name, out, call in self._clocks if self._asking.ask(call)]
        values["clocks"] = tuple(pair for pair in clocks if pair[1] < _SANE_MEGAHERTZ * 1e6)

    def _percent(self, percent: int) -> float | None:
        if percent <= 100:
            return percent / 100
        self._tally.blank += 1
        return None

    def _read_full(self, values: SampleValues, rows: list[FieldRow]) -> None:
        now = time.monotonic()
        found = self._asking.usable(self._batch_full, rows)
        found.update(self._slow.fields(now, sparing=self._options.sparing))
        self._sort_fields(found, values)
        joules = self._slow.energy_joules(now, sparing=self._options.sparing)
        if joules is not None:
            values["energy_joules"] = joules
        if now >= self._settings_due:
            self._settings_due = now + SETTINGS_SECONDS
            self._settings = self._read_settings()
        values.update(self._settings)
        if self._asking.ask(self._ask_reasons):
            values["throttle"] = fields.throttle_states(self._supported_reasons, self._reasons.value)
        values["temperature_limits"] = self._temperature_limits
        if self._options.processes:
            if now >= self._processes_due:
                self._processes_due = now + PROCESSES_SECONDS
                self._processes_seen = self._processes.read()
            values["processes"] = self._processes_seen

    def _read_settings(self) -> SampleValues:
        values: SampleValues = {}
        if (
            self._limit is not None
            and self._asking.ask(self._limit[1])
            and 0 < self._limit[0].value < _SANE_WATTS * 1e3
        ):
            values["power_limit_watts"] = self._limit[0].value / 1e3
        if self._fan is not None and self._asking.ask(self._fan[1]) and self._fan[0].value not in U32_BLANKS:
            values["fan"] = self._fan[0].value / 100
        return values

    def _sort_fields(self, found: dict[tuple[int, int], float], values: SampleValues) -> None:
        celsius = found.get((fields.MEMORY_TEMPERATURE, 0))
        if celsius and celsius < _SANE_CELSIUS:  # GPUs without the sensor answer 0
            values["temperatures"] = (*values.get("temperatures", ()), ("memory", float(celsius)))
        sent, received = found.get((fields.PCIE_TRANSMIT, 0)), found.get((fields.PCIE_RECEIVE, 0))
        if sent is not None:
            values["pcie_transmit_bytes"] = self._pcie_sent.update(int(sent))
        if received is not None:
            values["pcie_receive_bytes"] = self._pcie_received.update(int(received))
        held: dict[Throttle, float] = {}
        for field, reason in fields.THROTTLE_FIELDS:
            if (field, 0) in found:
                held.setdefault(reason, found[field, 0] / 1e9)
        values["throttle_seconds"] = tuple(held.items())
        values["ecc_errors"] = tuple(
            (severity, scope, int(found[field, 0]))
            for field, severity, scope in fields.ECC_FIELDS
            if (field, 0) in found
        )
        values["remapped_rows"] = tuple(
            (cause, int(found[field, 0])) for field, cause in fields.REMAPPED_FIELDS if (field, 0) in found
        )
        values["nvlinks"] = _links(found)

    def close(self) -> None:
        """Release the driver. Never raises."""
        with contextlib.suppress(Exception):  # nothing is left to release if the driver is gone
            self._library.close()


def _links(found: dict[tuple[int, int], float]) -> tuple[tuple[int, int | None, int | None], ...]:
    """Return (link, bytes sent, bytes received) from NVML's KiB counters."""

    def bytes_of(field: int, link: int) -> int | None:
        kibibytes = found.get((field, link))
        return None if kibibytes is None else int(kibibytes) * 1024

    numbers = sorted({link for field, link in found if field in {fields.NVLINK_TRANSMIT, fields.NVLINK_RECEIVE}})
    return tuple(
        (link, bytes_of(fields.NVLINK_TRANSMIT, link), bytes_of(fields.NVLINK_RECEIVE, link)) for link in numbers
    )
