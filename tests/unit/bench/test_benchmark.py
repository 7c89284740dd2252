"""`orch bench` with tiny real ranks on gloo: its files, a user's own model, and ranks that fail or die."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench.benchmark import GpuWatch
from orchestrator.bench.results import GpuUse
from orchestrator.cli.main import run
from orchestrator.gpu.sample import Detail, GpuReadError, Sample
from tests.support.stack import wait_until

TINY = ("--batch-sizes", "4", "--ranks", "2", "--steps", "2")


@pytest.fixture
def orch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(("bench", *arguments, "--output-dir", str(tmp_path / "out")))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.rare
def test_a_model_of_ones_own_is_compared_and_everything_written(orch: Any, tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text("from torch import nn\ndef make():\n    print('a user may print')\n    return nn.Linear(50, 3)\n")
    code, out, err = orch("--model", f"{script}:make", *TINY, "--runs", "5", "--precision", "bf16", "--json")
    assert code == 0, err
    found = json.loads(out)
    files = {Path(name).name for name in found["files"]}
    assert {
        "benchmark_net_make_single_gpu.json",
        "benchmark_net_make_multi_gpu.json",
        "comparison_report_net_make.md",
    } <= files
    assert "153 trainable parameters" in err
    (multi,) = found["multi"]["results"]
    assert (multi["batch_size"], multi["batch_size_per_rank"], multi["ranks"], multi["num_runs"]) == (4, 2, 2, 5)
    assert multi["detailed_runs"][0]["reduced_bytes_per_step"] == 153 * 4
    assert multi["mean_exposed_communication_ms"] >= 0
    (single,) = found["single"]["results"]
    assert single["mean_communication_ms"] == 0
    assert found["multi"]["comparisons"][0]["finding"] in {"faster", "slower", "unclear"}
    (logged,) = list((tmp_path / "out/logs").glob("*ranks2_batch4_run004.json"))
    assert len(json.loads(logged.read_text())["ranks"][1]["step_seconds"]) == 2


@pytest.mark.rare
def test_a_configuration_that_fails_is_reported_and_the_others_go_on(orch: Any, tmp_path: Path) -> None:
    """The second rank exits in every run, and the first would wait for it for ever."""
    script = tmp_path / "net.py"
    script.write_text(
        "import os, torch.distributed as dist\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if dist.is_initialized() and dist.get_rank() == 1:\n"
        "            print('the second rank gives up', flush=True)\n"
        "            os._exit(3)\n"
        "        return super().forward(x)\n"
        "def make():\n    return Net(50, 3)\n"
    )
    code, _out, err = orch("--model", f"{script}:make", *TINY, "--runs", "2")
    assert code == 0, err
    assert "2 ranks, global batch 4: rank 1 ended: the second rank gives up" in err
    report = (tmp_path / "out/comparison_report_net_make.md").read_text()
    assert "2 ranks, global batch 4: failed: rank 1 ended" in report
    assert "Nothing to compare" in report


def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_measured(orch: Any, tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text("from torch import nn\ndef make():\n    return nn.Linear(7, 3)\n")
    code, _, err = orch("--model", f"{script}:make", *TINY)
    assert code == 2
    assert "net.py:make cannot make a training step: RuntimeError" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "huge"), "--model huge is not known"),
        (("--batch-sizes", "16,x"), "'x' is not a whole number"),
        (("--ranks", "0"), "--ranks has 0"),
        (("--memory-limit", "much"), "--memory-limit 'much' is not a size"),
    ],
)
def test_a_bad_argument_is_refused_without_starting_a_rank(orch: Any, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = orch(*arguments)
    assert code == 2
    assert words in err


@pytest.mark.rare
def test_advice_comes_from_a_few_steps_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = run(("advise", "--model", "medium", "--batch-sizes", "8,32", "--ranks", "1,2", "--json"))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert 1 <= found["probe"]["steps"] <= 20
    assert found["parameters"] == 54_403
    assert [one["batch_size"] for one in found["advice"]] == [8, 32]
    for advice in found["advice"]:
        assert [one["ranks"] for one in advice["predictions"]] == [1, 2]
        assert all(one["samples_per_second"] > 0 for one in advice["predictions"])
    assert found["links"]["2"]["all_reduce_seconds"]["4096"] > 0


def test_thresholds_need_the_parameters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "net.py"
    script.write_text("from torch import nn\ndef make():\n    return nn.Linear(50, 3)\n")
    assert run(("advise", "--model", f"{script}:make", "--batch-sizes", "64", "--policy", "thresholds")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "153 trainable parameters; by thresholds alone, nothing was measured",
        "global batch 64: one GPU: 153 parameters: the model is too small",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--policy", "guess"), "--policy guess is not known"), (("--model", "huge"), "--model huge is not known")],
)
def test_a_bad_question_is_refused(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("advise", *arguments)) == 2
    assert words in capsys.readouterr().err


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
