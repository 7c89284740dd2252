"""Fixtures of the GPU tests: a fake NVIDIA driver with two GPUs, and a reader that tests drive by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_nvml import FakeNvml
from tests.unit.gpu.support import ScriptedReader


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[FakeNvml]:
    """Load a fake driver with two healthy GPUs, which this process sees."""
    with FakeNvml.create(tmp_path, gpus=2).loaded() as fake:
        yield fake


@pytest.fixture
def make_reader() -> Iterator[Callable[[str], ScriptedReader]]:
    """Yield a function that makes readers; their hanging calls are released when the test ends."""
    readers: list[ScriptedReader] = []

    def make(uuid: str = "GPU-a") -> ScriptedReader:
        readers.append(ScriptedReader(uuid))
        return readers[-1]

    yield make
    for reader in readers:
        reader.release()
