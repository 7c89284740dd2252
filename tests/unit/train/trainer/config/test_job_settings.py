"""job.yaml's `trainer:`: checked at submission, read by every rank without a line in the script."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import SpecError
from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.config.config import TRAINER_VARIABLE, MultiGPUConfig, trainer_findings
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.train.trainer.builders import a_context

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "version: 1\nname: job\nentrypoint: python train.py\n"


def problems_of(text: str) -> list[tuple[int, int, str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_job(HEAD + text, rules=(trainer_findings,))
    return [(problem.line, problem.column, problem.path, str(problem)) for problem in caught.value.problems]


def test_good_settings_are_accepted() -> None:
    spec = parse_job(
        HEAD + "trainer: {batch_size: 64, timeout: 5m, precision: bf16, device_ids: [0]}\n"
        "resources: {resources_per_worker: {gpu: 1}}\n",
        rules=(trainer_findings,),
    )
    assert MultiGPUConfig.from_dict(spec.trainer).batch_size == 64


def test_everything_wrong_is_told_at_once_where_it_stands() -> None:
    text = (
        "resources: {num_workers: 2, resources_per_worker: {gpu: 0}}\n"  # line 4
        "trainer:\n"
        "  batch_size: 0\n"
        "  batchsize: 3\n"
        "  timeout: soon\n"
        "  static_graph: true\n"
        "  find_unused_parameters: true\n"
        "  fp16_compression: true\n"
        "  use_fp16_allreduce: false\n"
        "  rank: 1\n"
    )
    found = problems_of(text)
    assert [(line, path) for line, _, path, _ in found] == [
        (6, "trainer.batch_size"),
        (7, "trainer.batchsize"),
        (8, "trainer.timeout"),
        (9, "trainer.static_graph"),
        (11, "trainer.fp16_compression"),
        (13, "trainer.rank"),
    ]
    assert found[0][1] == 15
    assert "did you mean batch_size?" in found[1][3]


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ("{training_mode: data_parallel}", "world_size is 4"),
        ("{global_batch_size: 100, batch_size: 32}", "not a multiple of batch_size 32 x 4 ranks"),
        ("{backend: nccl}", "needs a GPU in every rank"),
        ("{device_ids: [0, 1, 2, 3]}", "this process sees none"),
        ("{checkpoint_frequency: 10}\ncheckpoint: {interval: 5}", "both say when to save"),
    ],
)
def test_the_rest_of_the_file_is_looked_at(trainer: str, message: str) -> None:
    found = problems_of(f"resources: {{num_workers: 4, resources_per_worker: {{gpu: 0}}}}\ntrainer: {trainer}\n")
    assert len(found) == 1
    assert message in found[0][3]


def test_what_follows_from_a_wrong_value_is_no_news() -> None:
    found = problems_of("trainer: {num_workers: many, prefetch_factor: 2}\n")
    assert [path for *_, path, _ in found] == ["trainer.num_workers"]


def test_a_wrong_value_does_not_hide_a_conflict() -> None:
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig(batch_size=0, static_graph=True, find_unused_parameters=True)
    assert len(caught.value.problems) == 2


def test_the_manager_reads_it_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRAINER_VARIABLE, json.dumps({"batch_size": 8, "max_grad_norm": 0.5}))
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=2, seed=5), ctx=a_context(tmp_path))
    assert (manager.config.batch_size, manager.config.max_grad_norm, manager.config.seed) == (8, 0.5, 5)
    assert MultiGPUConfig.from_job(batch_size=2).batch_size == 8


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRAINER_VARIABLE, json.dumps({"batch_size": 8, "seed": 3}))
    config = MultiGPUConfig.from_args(["--batch-size", "16"]).replace(max_grad_norm=1.0)
    manager = MultiGPUTrainingManager(config, ctx=a_context(tmp_path))
    assert (manager.config.batch_size, manager.config.seed) == (16, 3)


def test_checking_needs_no_torch() -> None:
    script = (
        "import sys, orchestrator.train.trainer.config.config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.split() == ["False", "False"]
