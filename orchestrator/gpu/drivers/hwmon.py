"""Temperatures, power, energy and fan of a card from the kernel's hwmon files, the same for AMD and Intel.

Units there: millidegrees, microwatts, microjoules, hertz.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers.sysfs import Attribute, Attributes, read_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TEMPERATURE: Final = re.compile(r"temp(\d+)_input")
_FREQUENCY: Final = re.compile(r"freq(\d+)_input")
_SENSORS: Final = {"mem": "memory", "vram": "memory", "pkg": "gpu", "package": "gpu"}
_DOMAINS: Final = {"sclk": "graphics", "mclk": "memory"}
_LIMITS: Final = (("crit", "critical"), ("emergency", "emergency"), ("max", "max"))
_SANE_MILLIDEGREES: Final = range(-50_000, 200_000)


def _numbered(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    found = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


class Sensors:
    """The opened sensors of one hwmon directory."""

    def __init__(self, directory: Path | None, files: Attributes) -> None:
        """Open the sensors in `directory`; None for a card without any."""
        self._temperatures: list[tuple[str, Attribute]] = []
        self._clocks: list[tuple[str, Attribute]] = []
        self.limits: tuple[tuple[str, str, float], ...] = ()
        self._directory = directory
        self._files = files
        self._fan = self._fan_full = None
        if directory is None:
            return
        self._open_temperatures(directory)
        for number in _numbered(directory, _FREQUENCY):
            label = read_text(directory / f"freq{number}_label") or f"freq{number}"
            attribute = files.open(directory / f"freq{number}_input")
            if attribute is not None:
                self._clocks.append((_DOMAINS.get(label, label), attribute))
        self._fan = files.open(directory / "pwm1") or files.open(directory / "fan1_input")
        full = self.once("pwm1_max") or (255 if self.once("pwm1") is not None else self.once("fan1_max"))
        self._fan_full = full

    def _open_temperatures(self, directory: Path) -> None:
        limits: list[tuple[str, str, float]] = []
        for number in _numbered(directory, _TEMPERATURE):
            label = (read_text(directory / f"temp{number}_label") or "gpu").lower()
            sensor = _SENSORS.get(label, label)
            attribute = self._files.open(directory / f"temp{number}_input")
            if attribute is not None:
                self._temperatures.append((sensor, attribute))
            for suffix, limit in _LIMITS:
                millidegrees = self.once(f"temp{number}_{suffix}")
                if millidegrees is not None and 0 < millidegrees < _SANE_MILLIDEGREES.stop:
                    limits.append((sensor, limit, millidegrees / 1e3))
        self.limits = tuple(limits)

    def open(self, *names: str) -> Attribute | None:
        """Open the first existing one of these files of the directory."""
        return self._files.open(*(self._directory / name for name in names)) if self._directory is not None else None

    def once(self, name: str) -> int | None:
        """Read a constant number."""
        text = read_text(self._directory / name) if self._directory is not None else None
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def label(self, name: str) -> str | None:
        """Read a constant text."""
        return read_text(self._directory / name) if self._directory is not None else None

    def temperatures(self) -> tuple[tuple[str, float], ...]:
        """Return (sensor, degrees Celsius) of every plausible temperature."""
        read = ((sensor, attribute.number()) for sensor, attribute in self._temperatures)
        return tuple((sensor, value / 1e3) for sensor, value in read if value is not None and _sane(value))

    def clocks(self) -> tuple[tuple[str, float], ...]:
        """Return (domain, hertz) of every clock."""
        read = ((domain, attribute.number()) for domain, attribute in self._clocks)
        return tuple((domain, float(value)) for domain, value in read if value is not None)

    def fan(self) -> float | None:
        """Return the speed as a share of its maximum; None without a fan or where the maximum is unknown."""
        if self._fan is None or not self._fan_full:
            return None
        speed = self._fan.number()
        return min(1.0, speed / self._fan_full) if speed is not None else None


def _sane(millidegrees: int) -> bool:
    """Whether a temperature is plausible; a disabled sensor reports 0 or nonsense."""
    return millidegrees in _SANE_MILLIDEGREES and millidegrees != 0


def micro(attribute: Attribute | None) -> float | None:
    """Read a file in microwatts or microjoules, as watts or joules; None where it is missing."""
    value = attribute.number() if attribute is not None else None
    return value / 1e6 if value is not None else None


def first_labelled(sensors: Sensors, quantity: str, labels: Sequence[str]) -> int | None:
    """Return the channel of `quantity` ("energy") with one of the labels, tried in order; else the lowest."""
    present = [number for number in range(1, 5) if sensors.once(f"{quantity}{number}_input") is not None]
    for label in labels:
        for number in present:
            if sensors.label(f"{quantity}{number}_label") == label:
                return number
    return present[0] if present else None
