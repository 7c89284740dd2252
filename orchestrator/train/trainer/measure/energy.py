"""Measures the energy of a rank's GPU, read now and then by a thread: some drivers take milliseconds per reading."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from orchestrator.gpu.sample import GpuReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.gpu.sample import GpuReader

READ_EVERY_SECONDS = 2.0


class EnergyMeter:
    """Follows the energy counter of one GPU. `close` ends its thread."""

    def __init__(self, reader: GpuReader, every_seconds: float = READ_EVERY_SECONDS) -> None:
        self._reader = reader
        self._every_seconds = every_seconds
        self._first: float | None = None
        self._newest: float | None = None
        self.utilization: float | None = None
        """The GPU's load when it was read last, as a ratio; None where the driver does not report it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="energy meter", daemon=True)
        self._thread.start()

    @property
    def joules(self) -> float | None:
        """Return the energy since the meter was created, in joules, up to the newest reading; None before two readings, or without a counter."""
        if self._first is None or self._newest is None or self._newest <= self._first:
            return None
        return self._newest - self._first

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        self._thread.join()
        self._reader.close()

    def _follow(self) -> None:
        while True:
            try:
                sample = self._reader.read()
            except GpuReadError:
                return
            self.utilization = sample.utilization
            if sample.energy_joules is None and sample.utilization is None:
                return
            self._first = sample.energy_joules if self._first is None else self._first
            self._newest = sample.energy_joules if self._newest is None else (sample.energy_joules or self._newest)
            if self._closed.wait(self._every_seconds):
                return


def open_meter(device: torch.device) -> EnergyMeter | None:
    """Return a meter for the GPU that torch calls `device`; None for CPUs and drivers without a counter."""
    if device.type != "cuda":
        return None
    from orchestrator.gpu.drivers.nvidia import open_nvidia

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        readers = open_nvidia()
    except GpuReadError:
        return None
    return _choose(readers, uuid)


def _choose(readers: Sequence[GpuReader], uuid: str) -> EnergyMeter | None:
    chosen = None
    for reader in readers:
        if uuid and reader.info.uuid.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
            chosen = reader
        else:
            reader.close()
    return None if chosen is None else EnergyMeter(chosen)
