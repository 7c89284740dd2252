"""NVIDIA GPUs through NVML: discovery, and one reader per GPU or MIG device.

A MIG device has its own memory but shares its GPU's power, heat and clocks, which therefore stay with that GPU; it is
listed after it and names it. `device.py` defines what is read and how.
"""

from __future__ import annotations

import ctypes

from orchestrator.gpu.drivers.nvidia.calls import MemoryCall
from orchestrator.gpu.drivers.nvidia.device import Device
from orchestrator.gpu.drivers.nvidia.events import XidWatch
from orchestrator.gpu.drivers.nvidia.library import SUCCESS, Handle, Library
from orchestrator.gpu.reader import Detail, GpuReadError, ReaderOptions
from orchestrator.gpu.sample import GpuInfo, Sample, Vendor


def open_nvidia() -> list[NvmlReader]:
    """Return a reader for every NVIDIA GPU and MIG device of this host; empty where there is none.

    Raises GpuReadError when there is a driver that does not work; a host without the driver simply has no NVIDIA GPU.
    """
    try:
        library = Library()
    except GpuReadError as error:
        if _no_driver(error):
            return []
        raise
    try:
        return _open_all(library)
    finally:
        library.close()


def _no_driver(error: GpuReadError) -> bool:
    """Whether NVML failed to start because the host has no NVIDIA driver at all (library or kernel module missing)."""
    return getattr(error.__cause__, "value", None) in {9, 12}


def _open_all(library: Library) -> list[NvmlReader]:
    count = library.number("nvmlDeviceGetCount_v2")
    if count is None:
        raise GpuReadError("NVML cannot count its GPUs. `nvidia-smi` shows whether the driver works.")
    driver = library.text("nvmlSystemGetDriverVersion")
    readers: list[NvmlReader] = []
    for ordinal in range(count):
        handle = library.device("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(ordinal))
        if handle is None:
            continue  # fallen off the bus: the others still work
        mig = _mig_devices(library, handle)
        parent = _describe(library, handle, len(readers), ordinal, driver, partitioned=bool(mig))
        readers.append(NvmlReader(parent))
        for device in mig:
            info = _describe(library, device, len(readers), ordinal, driver, parent=parent)
            readers.append(NvmlReader(info))
    return readers


def _mig_devices(library: Library, handle: Handle) -> list[Handle]:
    """Return the MIG devices of a GPU; none where MIG is off or unknown."""
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    mode = library.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    if mode is None or mode() != SUCCESS or current.value != 1:
        return []
    slots = library.number("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    found = (library.device("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(i)) for i in range(slots))
    return [device for device in found if device is not None]


def _describe(
    library: Library,
    handle: Handle,
    index: int,
    ordinal: int,
    driver: str,
    *,
    partitioned: bool = False,
    parent: GpuInfo | None = None,
) -> GpuInfo:
    bus = parent.pci_bus_id if parent else _pci_bus_id(library, handle)
    uuid = library.text("nvmlDeviceGetUUID", handle)
    memory = MemoryCall(library, handle).read()
    return GpuInfo(
        uuid=uuid or f"nvidia-{bus}",
        index=index,
        ordinal=ordinal,
        vendor=Vendor.NVIDIA,
        model=library.text("nvmlDeviceGetName", handle) or "NVIDIA GPU",
        memory_total_bytes=memory[1] if memory else None,
        pci_bus_id=bus,
        driver_version=driver,
        parent_uuid=parent.uuid if parent else None,
        partitioned=partitioned,
    )


def _pci_bus_id(library: Library, handle: Handle) -> str:
    """Return the address as the kernel writes it, 0000:3b:00.0; empty where the driver does not report it."""
    pci = library.types.nvmlPciInfo_t()
    call = library.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    if call is None or call() != SUCCESS:
        return ""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


class NvmlReader:
    """Reads one NVIDIA GPU or MIG device; see `orchestrator.gpu.reader.GpuReader`."""

    def __init__(self, info: GpuInfo, options: ReaderOptions | None = None) -> None:
        """Record the GPU; the first reading opens the driver, in the thread that reads."""
        self.info = info
        self.options = options or ReaderOptions()
        self._device: Device | None = None
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
        self._device = Device(self.info, self.options)

    def _release(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None

    def close(self) -> None:
        """Release the driver."""
        if self._xids is not None:
            self._xids.close()
            self._xids = None
        self._release()
