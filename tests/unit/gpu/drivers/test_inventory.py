"""The GPUs of a host: all vendors at once, in a stable order, whatever state its drivers are in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.gpu.drivers import inventory
from orchestrator.gpu.drivers.inventory import discover, open_readers, survey
from orchestrator.gpu.sample import GpuReader, Vendor
from tests.support import fake_sysfs
from tests.support.fake_nvml import FakeNvml


def test_all_vendors_of_a_host_at_once(nvml: FakeNvml, tmp_path: Path) -> None:
    root = tmp_path / "sys"
    fake_sysfs.mi300x(root, 0)
    fake_sysfs.battlemage(root, 1)
    gpus = discover(sysfs=root, node="node1")
    assert [gpu.vendor for gpu in gpus] == [Vendor.NVIDIA, Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL]
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu.ordinal for gpu in gpus] == [0, 1, 0, 0]
    assert len({gpu.uuid for gpu in gpus}) == 4
    assert nvml.uuid(1) == gpus[1].uuid


def test_a_host_without_gpus(tmp_path: Path) -> None:
    with FakeNvml.create(tmp_path).loaded() as fake:
        fake.state.init_result = 9
        assert discover(sysfs=tmp_path) == ()


def test_a_broken_driver_hides_only_its_own_gpus_and_is_told(nvml: FakeNvml, tmp_path: Path) -> None:
    fake_sysfs.mi300x(tmp_path / "sys")
    nvml.state.init_result = 18
    found = survey(sysfs=tmp_path / "sys", node="n")
    assert [gpu.vendor for gpu in found.gpus] == [Vendor.AMD]
    (problem,) = found.problems
    assert problem.startswith("NVIDIA GPUs cannot be read: ")
    found.close()


def test_a_hanging_driver_hides_only_its_own_gpus(nvml: FakeNvml, tmp_path: Path) -> None:
    fake_sysfs.mi300x(tmp_path / "sys")
    nvml[0].hang = 1
    found = survey(sysfs=tmp_path / "sys", node="n", deadline_seconds=3.0)
    assert [gpu.vendor for gpu in found.gpus] == [Vendor.AMD]
    assert "not answered within 3 s" in found.problems[0]
    nvml[0].hang = 0
    found.close()


def test_a_reader_of_another_make_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(root: Path, node: str) -> Sequence[GpuReader]:
        raise PermissionError("/sys is not readable")

    monkeypatch.setattr(inventory, "open_amd", broken)
    assert "AMD GPUs cannot be read: /sys is not readable" in survey(sysfs=tmp_path).problems


def test_readers_by_uuid_in_the_order_asked_for(nvml: FakeNvml, tmp_path: Path) -> None:
    readers = open_readers([nvml.uuid(1), nvml.uuid(0)], sysfs=tmp_path)
    assert [reader.info.uuid for reader in readers] == [nvml.uuid(1), nvml.uuid(0)]
    assert len(open_readers(sysfs=tmp_path)) == 2


def test_a_uuid_that_is_not_here_is_named_with_those_that_are(nvml: FakeNvml, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=f"GPU-nowhere; it has: {nvml.uuid(0)}, {nvml.uuid(1)}"):
        open_readers(["GPU-nowhere", nvml.uuid(0)], sysfs=tmp_path)


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, orchestrator.gpu.drivers.inventory, orchestrator.gpu.load, orchestrator.gpu.recording.recorder;"
        "print([name for name in ('torch', 'ray', 'pynvml', 'numpy', 'asyncio', 'ssl', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
