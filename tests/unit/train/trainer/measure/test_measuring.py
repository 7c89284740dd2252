"""Measurements are right, and unknown values are left out."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.gpu.sample import Detail, GpuInfo, GpuLostError, ReaderOptions, Sample, Vendor
from orchestrator.train.errors import DataError
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.batches import compute_loss, count, map_tensors, split
from orchestrator.train.trainer.engine.step_clock import CpuClock, Part
from orchestrator.train.trainer.engine.trainer import DistributedDataParallelTrainer
from orchestrator.train.trainer.measure import metrics as measuring
from orchestrator.train.trainer.measure import peaks
from orchestrator.train.trainer.measure.metrics import MetricsCollector, count_flops, device_peak, mean_interval
from orchestrator.train.trainer.measure.monitor import PerformanceMonitor, comparison_report
from orchestrator.train.trainer.measure.peaks import peak_flops, peak_source
from tests.unit.train.trainer.builders import a_model, alone, cross_entropy, sgd

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA A10X", "bf16", None),
        ("NVIDIA H300", "bf16", None),
    ],
)
def test_peaks_are_known_or_unknown_never_guessed(name: str, precision: str, teraflops: float | None) -> None:
    assert peak_flops(name, precision) == (None if teraflops is None else teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A10G", "bf16", 70),
        ("AMD Radeon PRO W7900", "fp16", 122.6),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "bf16", 88.2),
        ("NVIDIA GeForce RTX 4070 Ti", "bf16", 80.2),
        ("NVIDIA GeForce RTX 5090", "fp8", 419),
        ("NVIDIA GeForce RTX 5070 Ti", "fp8", 175.8),
        ("AMD Instinct MI350X", "bf16", 2309.6),
        ("NVIDIA GB300", "bf16", 2500),
        ("AMD Instinct MI355X", "fp8", 5033.2),
    ],
)
def test_every_peak_says_where_it_stands(name: str, precision: str, teraflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12)
    assert str(peak_source(name)).endswith(("agrees with quotations of it", "not compared with it"))
    assert peak_source(f"{name} MIG 1g.10gb") is peak_source("a GPU of tomorrow") is None


def test_the_table_is_printed_or_the_sources_of_gpus_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*names: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["peaks", *names])
        runpy.run_path(str(peaks.__file__), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    assert printed() == list(peaks.table())
    assert printed("NVIDIA A10G", "a GPU of tomorrow") == [
        f"NVIDIA A10G: {peak_source('NVIDIA A10G')}",
        "a GPU of tomorrow: not in the table",
    ]


def test_a_cpu_has_no_documented_peak() -> None:
    assert device_peak(CPU, "fp32") is None


def test_flops_are_counted_without_touching_the_model() -> None:
    """Forward 2mnk; backward twice that, less the gradient of the inputs, which is not needed."""
    model = nn.Sequential(
        nn.BatchNorm1d(64), nn.Linear(64, 32, bias=False), nn.Dropout(0.5), nn.Linear(32, 8, bias=False)
    )
    before, random_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    batch = (torch.randn(16, 64), torch.zeros(16, dtype=torch.long))
    random_state = torch.get_rng_state()
    counted = count_flops(model, batch, lambda m, b: compute_loss(m, b, cross_entropy)[0])
    forward = 2 * 16 * (64 * 32 + 32 * 8)
    assert counted == 3 * forward
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_looks_at_its_numbers_cannot_be_counted() -> None:
    class Looks(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values if values.sum() > 0 else -values)

    assert count_flops(Looks(2, 2), torch.ones(1, 2), lambda m, b: m(b).sum()) is None


def test_the_collector_has_the_names_that_training_scripts_use() -> None:
    trainer = DistributedDataParallelTrainer(MultiGPUConfig(batch_size=4), alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    metrics = MetricsCollector(trainer)
    assert metrics.collected()["loss_history"] == []
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    for _ in range(3):
        metrics.step_done(trainer.train_step(batch))
        metrics.take()
    found = metrics.collected()
    assert found.keys() == {"training_time", "throughput", "memory_usage", "gpu_utilization", "loss_history"}
    losses = found["loss_history"]
    assert isinstance(losses, list)
    assert losses == sorted(losses, reverse=True)
    assert [one.step for one in metrics.history] == [1, 2, 3]
    assert [one.step for one in metrics.history[-2:]] == [2, 3]
    assert found["training_time"] == metrics.history[-1].training_time == sum(metrics.step_seconds_list)
    assert found["throughput"] == metrics.throughput()["samples_per_second"]
    assert isinstance(found["memory_usage"], float)
    assert found["memory_usage"] > 0
    assert found["gpu_utilization"] is None


def test_every_accumulated_batch_is_counted() -> None:
    config = MultiGPUConfig(peak_flops=1e9, flops_per_sample=500.0, batch_size=4, gradient_accumulation_steps=4)
    trainer = DistributedDataParallelTrainer(config, alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    metrics = MetricsCollector(trainer, energy=SimpleNamespace(joules=64.0, utilization=0.5))  # type: ignore[arg-type]
    losses = []
    for number in range(8):
        result = trainer.train_step((torch.randn(4 - number % 2, 8), torch.zeros(4 - number % 2, dtype=torch.long)))
        losses.append((float(result.loss), result.samples))
        assert result.updated == (number % 4 == 3)
        if result.updated:
            metrics.step_done(result)
    taken = metrics.take()
    assert metrics.take() == {}, "nothing has happened since"
    assert (metrics.steps, metrics.samples) == (2, 28)
    assert taken["samples_per_second"] * taken["step_seconds"] == pytest.approx(14)
    assert taken["mfu"] == pytest.approx(taken["samples_per_second"] * 500 / 1e9)
    assert taken["joules_per_sample"] == pytest.approx(64 / 28)
    whole = sum(loss * samples for loss, samples in losses[4:]) / 14
    assert metrics.current()["loss"] == pytest.approx(whole)
    total, samples = metrics.epoch_loss.sums()
    assert (total / samples, samples) == (pytest.approx(sum(a * b for a, b in losses) / 28), 28)


def test_the_parts_of_a_step_are_those_of_all_its_batches() -> None:
    trainer = DistributedDataParallelTrainer(MultiGPUConfig(batch_size=4, gradient_accumulation_steps=4), alone())
    trainer.prepare(a_model(), loss_fn=cross_entropy, optimizer=sgd)
    ended = []
    trainer.clock.end = lambda: ended.append(trainer._passes)  # type: ignore[method-assign]
    for _ in range(8):
        trainer.train_step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert ended == [0, 0]


def test_the_parts_of_a_step_are_told_apart() -> None:
    clock = CpuClock()
    assert clock.take() == {}
    for _ in range(2):
        clock.begin()
        for part in (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.FORWARD, Part.OPTIMIZER):
            if part is Part.BACKWARD:
                torch.ones(300, 300) @ torch.ones(300, 300)
            clock.mark(part)
        clock.end()
    taken = clock.take()
    assert set(taken) == set(Part)
    assert taken[Part.BACKWARD] == max(taken.values())
    assert clock.take() == {}


class Meter:
    """A GPU with an energy counter that goes up by ten joules with each reading."""

    def __init__(self, uuid: str, *, counter: bool = True, lost: bool = False) -> None:
        self.info = GpuInfo(
            uuid=uuid,
            index=0,
            ordinal=0,
            vendor=Vendor.NVIDIA,
            model="test",
            memory_total_bytes=None,
            pci_bus_id="",
            driver_version="",
        )
        self.options = ReaderOptions()
        self.readings = 0
        self.counter, self.lost, self.closed = counter, lost, False

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        if self.lost:
            raise GpuLostError("gone")
        self.readings += 1
        joules = 100.0 + 10 * self.readings if self.counter else None
        return Sample(gpu_uuid=self.info.uuid, timestamp=0.0, monotonic=0.0, energy_joules=joules)

    def reopen(self) -> None:
        raise AssertionError("it must not be reopened")

    def close(self) -> None:
        self.closed = True


def test_joules_are_those_of_ones_own_gpu() -> None:
    mine, other = Meter("GPU-1234"), Meter("GPU-9999")
    meter = measuring._choose([other, mine], "1234")
    assert meter is not None
    meter.close()
    assert other.closed
    assert mine.closed
    follower = measuring.EnergyMeter(Meter("GPU-1"), every_seconds=0.001)
    wait_until(lambda: (follower.joules or 0) >= 20)
    follower.close()
    assert measuring._choose([Meter("GPU-1")], "") is None


@pytest.mark.parametrize("reader", [Meter("a", counter=False), Meter("a", lost=True)])
def test_no_counter_no_joules(reader: Any) -> None:
    meter = measuring.EnergyMeter(reader, every_seconds=0.001)
    meter._thread.join(300)
    assert not meter._thread.is_alive()
    assert meter.joules is None
    meter.close()


def wait_until(condition: Any) -> None:
    import time

    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Batches


def test_batches_of_any_nesting() -> None:
    batch = {"a": torch.ones(4, 3), "b": [torch.zeros(4), "text"], "c": (1, torch.ones(()))}
    assert count(batch)[0] == 4
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"].sum() == 24
    assert doubled["b"][1] == "text"
    halves = split(batch, 2)
    assert [len(half["a"]) for half in halves] == [2, 2]
    assert halves[0]["c"][1].dim() == 0
    with pytest.raises(DataError, match="cannot be split"):
        split(batch, 3)


# Statistics, monitor, comparison


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        found = mean_interval((1 + 0.1 * torch.randn(200, generator=generator)).tolist())
        assert found is not None
        covered += found[0] <= 1 <= found[1]
    assert 0.92 < covered / 400 < 0.98
    assert mean_interval([1.0] * 99) is None


class Ticks:
    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_the_monitor_of_the_source(tmp_path: Path) -> None:
    monitor = PerformanceMonitor(CPU, clock=Ticks(0.5))
    with pytest.raises(RuntimeError, match="start_monitoring"):
        monitor.record_metrics(1.0, 32)
    monitor.start_monitoring()
    assert monitor.get_summary() == {}
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        monitor.plot_metrics(tmp_path / "none.png")
    for step in range(120):
        monitor.record_metrics(torch.tensor(1 / (step + 1), requires_grad=True), batch_size=32, num_gpus=2, lr=0.1)
    summary = monitor.get_summary()
    assert summary["avg_throughput"] == pytest.approx(64)
    assert summary["avg_throughput_per_gpu"] == pytest.approx(32)
    assert summary["avg_throughput_low"] <= 64.0001 >= summary["avg_throughput_high"] - 0.001
    assert summary["max_memory_usage"] > 0.01
    assert (summary["first_loss"], summary["last_loss"]) == (1.0, pytest.approx(1 / 120))
    assert summary["avg_lr"] == pytest.approx(0.1)
    monitor.plot_metrics(tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="count from 1"):
        monitor.record_metrics(1.0, 0)
    monitor.start_monitoring()
    assert monitor.get_summary() == {}


def test_a_loss_that_is_none_does_not_hide_the_others() -> None:
    monitor = PerformanceMonitor(CPU, clock=Ticks(1.0))
    monitor.start_monitoring()
    for loss in (2.0, math.nan, 1.0):
        monitor.record_metrics(loss, 1)
    assert monitor.get_summary()["min_loss"] == 1.0


def run(rate: float, *, ranks: float = 1, spread: float | None = 0.01) -> dict[str, float]:
    found = {"samples_per_second": rate, "ranks": ranks, "loss": 0.5}
    if spread is not None:
        found |= {"samples_per_second_low": rate * (1 - spread), "samples_per_second_high": rate * (1 + spread)}
    return found


def test_a_comparison_says_what_the_numbers_can_show() -> None:
    text = comparison_report(
        {
            "one": run(1200),
            "four": run(4300, ranks=4) | {"mfu": 0.4, "peak_memory_bytes": 2**31},
            "same": run(1205),
            "slow": run(600),
            "short": run(9999, spread=None),
        }
    )
    assert "| four | 4 | 4300 | 4257 to 4343 | 3.58 | 90% | 2.00 | 40.0% | 0.5 |" in text
    assert "four is faster than one: x 3.58" in text
    assert "slow is slower than one: x 0.50" in text
    assert "same and one: no difference that these runs could show" in text
    assert "short against one: too few steps" in text
    assert "unknown" in text
