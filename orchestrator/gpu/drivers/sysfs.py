"""Finds the graphics cards under the Linux kernel's /sys, and reads their files repeatedly.

An attribute is kept open and read from its beginning each time, which makes the kernel query the driver at the cost of
one system call. An attribute that is missing or that the driver refuses reads as None. A device that is gone raises
GpuLostError.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.sample import GpuLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_CARD: Final = re.compile(r"card\d+")
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GONE: Final = frozenset({errno.ENODEV, errno.ENXIO})
PCI_IDS: Final = (Path("/usr/share/hwdata/pci.ids"), Path("/usr/share/misc/pci.ids"))


class Attribute:
    """One file of a device, kept open."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path) -> None:
        """Open `path`; a missing file is an attribute that is always absent."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    @property
    def present(self) -> bool:
        """Whether the kernel has this file and permits reading it."""
        return self._descriptor >= 0

    def bytes(self) -> bytes | None:
        """Return the content now, at most 4 KiB. Raises GpuLostError when the device is gone."""
        if self._descriptor < 0:
            return None
        try:
            return os.pread(self._descriptor, 4096, 0)
        except OSError as error:
            if error.errno in _GONE:
                raise GpuLostError(
                    f"{self._path}: the kernel no longer has this device. Check the kernel log; it takes a reset or a"
                    " reboot."
                ) from error
            return None

    def text(self) -> str | None:
        """Return the content as text without surrounding white space; None when there is none."""
        raw = self.bytes()
        return raw.decode("utf-8", "replace").strip() or None if raw is not None else None

    def number(self) -> int | None:
        """Return the content as a decimal number, else None."""
        raw = self.bytes()
        try:
            return int(raw) if raw else None
        except ValueError:
            return None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Attributes:
    """The attributes that a reader holds open, closed together."""

    def __init__(self) -> None:
        self._open: list[Attribute] = []

    def open(self, *candidates: Path) -> Attribute | None:
        """Open the first readable one of these files, else None."""
        for path in candidates:
            attribute = Attribute(path)
            if attribute.present:
                self._open.append(attribute)
                return attribute
        return None

    def close(self) -> None:
        """Close them all."""
        for attribute in self._open:
            attribute.close()
        self._open.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A graphics card: its directory under /sys/class/drm, its PCI device's directory, and its driver."""

    directory: Path
    device: Path
    driver: str
    pci_bus_id: str
    pci_device_id: str


def cards(sysfs: Path, vendor: str, drivers: Iterable[str]) -> Iterator[Card]:
    """Return the cards of a PCI vendor ("0x1002") with one of these drivers, in the order of their PCI addresses."""
    found: list[Card] = []
    for directory in (sysfs / "class" / "drm").glob("card*"):
        device = directory / "device"
        if not _CARD.fullmatch(directory.name) or read_text(device / "vendor") != vendor:
            continue
        driver = (device / "driver").resolve().name
        if driver in drivers:
            found.append(
                Card(
                    directory=directory,
                    device=device,
                    driver=driver,
                    pci_bus_id=_bus_id(device),
                    pci_device_id=read_text(device / "device") or "",
                )
            )
    yield from sorted(found, key=lambda card: card.pci_bus_id)


def _bus_id(device: Path) -> str:
    name = device.resolve().name
    if _PCI.fullmatch(name):
        return name
    for line in (read_text(device / "uevent") or "").splitlines():
        key, _, value = line.partition("=")
        if key == "PCI_SLOT_NAME":
            return value.lower()
    return name


def read_text(path: Path) -> str | None:
    """Return a file's text without surrounding white space; None where it is missing or empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def hwmon(device: Path, name: str | None = None) -> Path | None:
    """Return the sensor directory of a device, the one of that `name` if several; None where it has none."""
    directories = sorted((device / "hwmon").glob("hwmon*"))
    named = [directory for directory in directories if name is None or read_text(directory / "name") == name]
    return next(iter(named or directories), None)


def driver_version(sysfs: Path, driver: str) -> str:
    """Return the module's own version, else the kernel's: drivers in the kernel tree have none of their own."""
    return read_text(sysfs / "module" / driver / "version") or os.uname().release


def device_name(vendor: str, device: str, databases: Iterable[Path] = PCI_IDS) -> str | None:
    """Return a PCI device's name from the system's pci.ids ("0x1002", "0x744c"); None when it is missing."""
    wanted_vendor, wanted_device = vendor.removeprefix("0x"), device.removeprefix("0x")
    for database in databases:
        try:
            lines = database.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        inside = False
        for line in lines:
            if not line.startswith(("\t", "#")):
                inside = line.startswith(f"{wanted_vendor} ")
            elif inside and line.startswith(f"\t{wanted_device} "):
                name = line[len(wanted_device) + 1 :].strip()
                _, bracket, marketing = name.partition("[")
                return marketing.rstrip("]") if bracket else name
    return None


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
