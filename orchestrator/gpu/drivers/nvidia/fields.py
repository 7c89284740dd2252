"""NVML fields: id, scope, unit and their place in a `Sample`.

Data and arithmetic only. A field that a GPU refuses at first is left out of the batch from then on, so that no read is wasted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orchestrator.gpu.sample import Throttle

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

TEMPERATURE_LIMITS: Final = (
    (0, "gpu", "shutdown"),
    (1, "gpu", "slowdown"),
    (3, "gpu", "max"),
    (2, "memory", "max"),
)
"""(NVML's threshold, sensor, limit)."""


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
