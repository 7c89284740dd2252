"""Utilization, power and energy of a run, from readers that may fail or lack values."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.bench.benchmark import GpuUse, GpuWatch
from orchestrator.gpu.sample import Detail, GpuReadError, Sample
from tests.support.stack import wait_until


class Reader:
    """Returns the same load every time, and more energy."""

    def __init__(self, *, fails: bool = False, **values: Any) -> None:
        self.fails = fails
        self.reads = 0
        self._sample = Sample(gpu_uuid="GPU-1", timestamp=0.0, monotonic=0.0, **values)

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        self.reads += 1
        if self.fails:
            raise GpuReadError("asleep")
        energy = None if self._sample.energy_joules is None else self._sample.energy_joules * self.reads
        return dataclasses.replace(self._sample, energy_joules=energy)


def watched(*readers: Any) -> GpuUse:
    with GpuWatch(readers, every_seconds=0.001) as watch:
        for reader in readers:
            wait_until("it was read", lambda reader=reader: reader.reads >= 3)
    return watch.use()


def test_gpus_are_added_up() -> None:
    one, two = (Reader(utilization=u, power_watts=100.0, energy_joules=10.0) for u in (0.4, 0.8))
    use = watched(one, two)
    assert use.utilization is not None
    assert round(use.utilization, 6) == 0.6
    assert use.power_watts == 200.0
    assert use.energy_joules == 10.0 * (one.reads - 1) + 10.0 * (two.reads - 1)


def test_what_a_gpu_does_not_tell_is_unknown() -> None:
    use = watched(Reader(utilization=0.4, power_watts=100.0), Reader(utilization=0.4), Reader(fails=True))
    assert (use.power_watts, use.energy_joules) == (None, None)


def test_without_gpus_nothing_is_known() -> None:
    assert watched() == GpuUse()
