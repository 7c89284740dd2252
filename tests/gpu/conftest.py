"""Fixtures of the tests of a real GPU: a daemon with the machine's own GPUs, and NVML's own values for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from orchestrator.gpu.drivers.inventory import survey
from orchestrator.gpu.sample import GpuInfo, Vendor
from tests.gpu.jobs import Memory
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def gpu() -> GpuInfo:
    """Return the machine's first NVIDIA GPU."""
    readers = survey().readers
    found = [reader.info for reader in readers if reader.info.vendor is Vendor.NVIDIA]
    for reader in readers:
        reader.close()
    if not found:
        pytest.skip("no NVIDIA GPU here")
    return found[0]


@pytest.fixture(scope="session")
def stack(gpu: GpuInfo) -> Iterator[Stack]:
    """Yield the session's daemon, with the machine's own GPUs; a test must leave it as it was."""
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch is not built for CUDA")
    made = Stack()
    try:
        made.up()
        assert gpu.uuid in {each.uuid for node in made.client.nodes() for each in node.gpus}
        yield made
    finally:
        made.close()


@pytest.fixture
def memory(gpu: GpuInfo) -> Iterator[Memory]:
    """Yield NVML's own values for the GPU's memory."""
    made = Memory(gpu.uuid)
    yield made
    made.close()
