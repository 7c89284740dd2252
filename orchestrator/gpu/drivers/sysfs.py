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

from orchestrator.gpu.reader import GpuLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
