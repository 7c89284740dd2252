"""Parses amdgpu's binary table `gpu_metrics`: throttling, energy and the firmware's time in one read.

Layouts are the kernel's (kgd_pp_interface.h): version 1.3 on RDNA and MI200, 1.4 and later on MI300. Only values that
no other file has are read. The energy accumulator is used from 1.4 on: earlier firmware counts in its own units, and
monitors that used it reported impossible energies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from orchestrator.gpu.sample import Throttle

_HEADER: Final = struct.Struct("<HBB")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_JOULES_PER_TICK: Final = 2.0**-16
_BLANK: Final = 0xFFFFFFFFFFFFFFFF

_FIRMWARE_TIME_1_3: Final = 96
_INDEPENDENT_THROTTLE_1_3: Final = 112
_ENERGY_1_4: Final = 24
_ENERGY_1_5: Final = 88
"""Version 1.5 added the activity of 32 JPEG engines at the beginning."""

_THROTTLE_BITS: Final = (
    (range(8), Throttle.POWER_CAP),
    (range(16, 24), Throttle.CURRENT),
    (range(32, 44), Throttle.THERMAL),
    (range(44, 48), Throttle.HARDWARE_THERMAL),
    (range(56, 58), Throttle.RELIABILITY),
)
"""Groups of bits of the throttle word that has the same meaning on every ASIC, and their reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdMetrics:
    """Values of the table: throttling by reason, energy in joules, and a number that changes with the table."""

    throttle: tuple[tuple[Throttle, bool], ...]
    energy_joules: float | None
    stamp: int


def parse(table: bytes | None) -> AmdMetrics | None:
    """Parse a table; None for an empty, truncated or unknown one."""
    if table is None or len(table) < _HEADER.size:
        return None
    size, major, minor = _HEADER.unpack_from(table)
    if major != 1 or len(table) < size:
        return None
    if minor == 3 and size >= _INDEPENDENT_THROTTLE_1_3 + _U64.size:
        (word,) = _U64.unpack_from(table, _INDEPENDENT_THROTTLE_1_3)
        (stamp,) = _U64.unpack_from(table, _FIRMWARE_TIME_1_3)
        throttle = () if word == _BLANK else _throttle(word)
        return AmdMetrics(throttle=throttle, energy_joules=None, stamp=stamp)
    if minor in {4, 5} and size >= 200:
        (ticks,) = _U64.unpack_from(table, _ENERGY_1_4 if minor == 4 else _ENERGY_1_5)
        energy = ticks * _JOULES_PER_TICK if 0 < ticks < _BLANK else None
        return AmdMetrics(throttle=(), energy_joules=energy, stamp=ticks)
    return None


def _throttle(word: int) -> tuple[tuple[Throttle, bool], ...]:
    return tuple((reason, any(word >> bit & 1 for bit in bits)) for bits, reason in _THROTTLE_BITS)
