"""A fake NVIDIA driver library, and the values to change while programs use it.

    fake = FakeNvml.create(tmp_path, gpus=8)
    fake[0].power_mw = 250_000
    subprocess.run(command, env={**os.environ, **fake.environment()})

`library()` builds `libnvidia-ml.so.1` with gcc. Unmodified pynvml, and any other program, loads it through
`LD_LIBRARY_PATH`, set before the program starts; inside a test process `with fake.loaded():` does the same, because the
dynamic loader identifies libraries by their SONAME. Values change as soon as they are written.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.fake_nvml import layout

SOURCE = Path(__file__).with_name("fake_nvml.c")
GPU_IS_LOST, NOT_SUPPORTED, TIMEOUT, UNKNOWN = 15, 3, 10, 999
UINT, ULL, DOUBLE = 1, 3, 0
"""nvmlValueType of a field."""
XID_CRITICAL = 0x8

CALL_US: Mapping[str, int] = {
    "utilization": 3,
    "memory": 8,
    "temperature": 2,
    "power": 2,
    "limit": 2,
    "clock": 2,
    "energy": 4200,
    "reasons": 2,
    "processes": 10,
    "pcie_throughput": 900,
}
FIELD_US: Mapping[int, int] = {83: 3600, 75: 650, 270: 680, 271: 630, 197: 260, 198: 190}
PCIE_THROUGHPUT_SLEEPS_US = 20_000
LATENCY_FROM = "measured: NVIDIA H100 80GB HBM3, driver 580.159.04, 2026-11-26"
"""Processor time of each call, and of the fields that take longer than 10 us: the driver computes meanwhile, and sleeps in one call only."""


_build_directory: tempfile.TemporaryDirectory[str] | None = None


def library(*, without: Iterable[str] = ()) -> Path:
    """Return the built library, lacking the functions in `without` as an old driver does.

    It is built once per process; the directory is removed when the process ends.
    """
    return _build(tuple(without))


@functools.cache
def _build(without: tuple[str, ...]) -> Path:
    global _build_directory  # noqa: PLW0603  # one for the process, removed by its finalizer
    if _build_directory is None:
        _build_directory = tempfile.TemporaryDirectory(prefix="fake-nvml-")
    root = Path(_build_directory.name) / (hashlib.sha256(repr(without).encode()).hexdigest()[:12])
    root.mkdir()
    target = root / "libnvidia-ml.so.1"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    if without:
        script = root / "exports.map"
        script.write_text(f"{{ local: {'; '.join(without)}; }};\n", encoding="ascii")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True, capture_output=True, text=True)
    return target


def _wake(address: int) -> None:
    """Wake the threads that sleep on a word of the shared file (futex)."""
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), 1, 2**31 - 1)


class FakeGpu:
    """One GPU of the fake driver; the attributes of `layout.Gpu` can be read and written."""

    def __init__(self, raw: layout.Gpu) -> None:
        object.__setattr__(self, "raw", raw)

    def __getattr__(self, name: str) -> object:
        return getattr(object.__getattribute__(self, "raw"), name)

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(self.raw, name):
            raise AttributeError(f"the fake GPU has no {name!r}; see layout.Gpu")
        setattr(self.raw, name, value)

    def field(self, number: int, value: float = 0, *, scope: int = 0, kind: int = ULL, **settings: int) -> layout.Field:
        """Set a field value; `settings` are those of `layout.Field` (result, timestamp_us, period_us, wobble ...)."""
        for slot in self.raw.fields[: self.raw.field_count]:
            if (slot.id, slot.scope) == (number, scope):
                break
        else:
            slot = self.raw.fields[self.raw.field_count]
            slot.id, slot.scope = number, scope
            self.raw.field_count += 1
        bits = ctypes.c_uint64.from_buffer_copy(ctypes.c_double(value)).value if kind == DOUBLE else int(value)
        slot.type, slot.value = kind, bits & (2**64 - 1)
        for name, setting in settings.items():
            setattr(slot, name, setting)
        return slot

    def drop_field(self, number: int, scope: int = 0) -> None:
        """Make the GPU refuse a field, as hardware without it does."""
        self.field(number, scope=scope, result=NOT_SUPPORTED)

    def latency(self, microseconds: Mapping[str, int]) -> None:
        """Make calls of these kinds sleep this long."""
        for call, value in microseconds.items():
            self.raw.latency_us[layout.CALLS.index(call)] = value

    def take_time(self) -> None:
        """Make calls take as long as those of an H100."""
        for call, microseconds in CALL_US.items():
            self.raw.spin_us[layout.CALLS.index(call)] = microseconds
        self.latency({"pcie_throughput": PCIE_THROUGHPUT_SLEEPS_US})
        for slot in self.raw.fields[: self.raw.field_count]:
            slot.latency_us = FIELD_US.get(slot.id, 0)

    def fail(self, call: str, result: int = UNKNOWN) -> None:
        """Make calls of a kind fail with an nvmlReturn; 0 makes them succeed again."""
        self.raw.errors[layout.CALLS.index(call)] = result

    def count(self, call: str) -> int:
        """Return how often calls of a kind were made."""
        return int(self.raw.calls[layout.CALLS.index(call)])

    def xid(self, code: int) -> None:
        """Raise an Xid event."""
        event = self.raw.events[self.raw.event_count % layout.MAX_EVENTS]
        event.type, event.data = XID_CRITICAL, code
        self.raw.event_count += 1
        _wake(ctypes.addressof(self.raw) + layout.Gpu.event_count.offset)

    def processes(self, memory_by_pid: Mapping[int, int]) -> None:
        """Set the processes that use the GPU, with their memory."""
        for slot, (pid, memory) in zip(self.raw.processes, memory_by_pid.items(), strict=False):
            slot.pid, slot.memory = pid, memory
        self.raw.process_count = len(memory_by_pid)

    def mig(self, devices: Iterable[tuple[str, str, int, int]]) -> None:
        """Cut the GPU into MIG devices: (uuid, name, total bytes, used bytes)."""
        rows = list(devices)
        for slot, (uuid, name, total, used) in zip(self.raw.mig, rows, strict=False):
            slot.uuid, slot.name, slot.memory_total, slot.memory_used = uuid.encode(), name.encode(), total, used
        self.raw.mig_mode, self.raw.mig_count = int(bool(rows)), len(rows)


class FakeNvml:
    """The driver's state, in a file that every process maps."""

    def __init__(self, path: Path) -> None:
        """Attach to an existing state file."""
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(layout.State))
        self.state = layout.State.from_buffer(self._map)

    @classmethod
    def create(cls, directory: Path, gpus: int = 2, *, model: str = "NVIDIA H100 80GB HBM3") -> FakeNvml:
        """Create a driver with `gpus` healthy data-centre GPUs in a new file under `directory`."""
        path = directory / "fake-nvml.state"
        path.write_bytes(bytes(ctypes.sizeof(layout.State)))
        fake = cls(path)
        fake.state.magic, fake.state.gpu_count = layout.MAGIC, gpus
        fake.state.driver_version = b"580.65.06"
        for index in range(gpus):
            _healthy(fake[index], index, model)
        return fake

    def __getitem__(self, index: int) -> FakeGpu:
        return FakeGpu(self.state.gpus[index])

    def __len__(self) -> int:
        return int(self.state.gpu_count)

    def __iter__(self) -> Iterator[FakeGpu]:
        return (self[index] for index in range(len(self)))

    def uuid(self, index: int) -> str:
        """Return the UUID of a GPU."""
        return self.state.gpus[index].uuid.decode()

    def environment(self, *, without: Iterable[str] = ()) -> dict[str, str]:
        """Return the variables that make a program started with them see these GPUs."""
        return {"LD_LIBRARY_PATH": str(library(without=without).parent), "FAKE_NVML_STATE": str(self.path)}

    @contextmanager
    def loaded(self) -> Iterator[FakeNvml]:
        """Make this very process see these GPUs from its next nvmlInit on."""
        ctypes.CDLL(str(library()))
        before = os.environ.get("FAKE_NVML_STATE")
        os.environ["FAKE_NVML_STATE"] = str(self.path)
        try:
            yield self
        finally:
            for gpu in self:
                gpu.hang = 0
            if before is None:
                del os.environ["FAKE_NVML_STATE"]
            else:
                os.environ["FAKE_NVML_STATE"] = before


def _healthy(gpu: FakeGpu, index: int, model: str) -> None:
    gpu.uuid = f"GPU-{index:08x}-fa4e-4e11-8000-000000000000".encode()
    gpu.name = model.encode()
    gpu.bus = 0x10 + index
    gpu.utilization, gpu.memory_utilization = 50 + index, 10
    gpu.memory_total, gpu.memory_used, gpu.memory_reserved = 80 << 30, (10 + index) << 30, 600 << 20
    gpu.power_mw, gpu.limit_mw, gpu.temperature = 300_000, 700_000, 55
    gpu.fan = 2**32 - 1
    gpu.raw.clocks_mhz[:] = (1980, 1980, 2619, 1545)
    gpu.raw.thresholds[:] = (92, 89, 95, 87)
    gpu.energy_mj, gpu.energy_since_us = 1_000_000, time.time_ns() // 1000
    gpu.reasons, gpu.supported_reasons = 0, 0x1FF
    gpu.field(186, kind=UINT)
    gpu.field(83)
    gpu.field(82, 62, kind=UINT)
    gpu.field(91, 2, kind=UINT)
    for number, value in ((197, 5 << 30), (198, 7 << 30)):
        gpu.field(number, value)
    for number in (74, 269, 270, 271, 76, 77, 79):
        gpu.field(number, 0)
    for number in (3, 4, 5, 6):
        gpu.field(number, 0)
    for number in (142, 143, 144, 145):
        gpu.field(number, 0, kind=UINT)
    for link in range(2):
        for number in (138, 139):
            gpu.field(number, 1000 * (link + 1), scope=link)
