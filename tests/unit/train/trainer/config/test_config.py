"""MultiGPUConfig: one record, checked as a whole, the same from every source."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.spec.trainer import TrainingMode
from orchestrator.train.errors import ConfigError
from orchestrator.train.trainer.config import rules as config_rules
from orchestrator.train.trainer.config.config import (
    TRAINER_VARIABLE,
    MultiGPUConfig,
    settings,
    show_default,
)
from orchestrator.train.trainer.config.rules import Surroundings
from tests.support.stack import PATIENCE_SECONDS

ROOT = Path(__file__).parents[5]


def around(**changes: Any) -> Surroundings:
    facts: dict[str, Any] = {
        "world_size": 1,
        "local_rank": 0,
        "cuda_devices": 0,
        "on_cuda": False,
        "computes_bf16": True,
    }
    return Surroundings(**(facts | changes))


def problems_of(**settings: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig(**settings)
    return caught.value.problems


def test_the_source_example_is_a_valid_configuration() -> None:
    """Every field of the source is there, duplicates included."""
    config = MultiGPUConfig(
        training_mode=TrainingMode.DISTRIBUTED_DATA_PARALLEL,
        device_ids=(0, 1, 2, 3),
        world_size=4,
        rank=0,
        local_rank=0,
        use_mixed_precision=True,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        find_unused_parameters=False,
        broadcast_buffers=True,
        pin_memory=True,
        num_workers=4,
        prefetch_factor=2,
        persistent_workers=True,
        sync_bn=True,
        use_fp16_allreduce=True,
        fp16_compression=True,
        enable_fault_tolerance=True,
        checkpoint_frequency=1000,
        recovery_timeout=300,
        use_gradient_as_bucket_view=True,
        reduce_bucket_size=25 * 1024 * 1024,
        bucket_cap_mb=25,
        static_graph=True,
        backend="nccl",
        timeout=timedelta(minutes=30),
        use_gradient_checkpointing=True,
    )
    assert config.precision == "auto"
    assert config.fp16_compression is config.use_fp16_allreduce is True
    assert config.recovery_timeout == timedelta(minutes=5)


def test_every_conflict_is_told_at_once_each_with_a_remedy() -> None:
    found = problems_of(
        training_mode="data_parallel",
        world_size=4,
        static_graph=True,
        find_unused_parameters=True,
        use_mixed_precision=True,
        precision="fp32",
        prefetch_factor=4,
        compile_mode="max-autotune",
    )
    text = "\n".join(found)
    for word in (
        "world_size is 4",
        "static_graph has no effect",
        "precision is fp32",
        "prefetch_factor",
        "compile_mode",
    ):
        assert word in text
    assert all(any(verb in problem for verb in ("set ", "leave ", "turn ", "write ")) for problem in found)


def test_every_wrong_value_is_told_at_once() -> None:
    found = problems_of(
        batch_size=0,
        gradient_accumulation_steps=True,
        max_grad_norm=-1,
        num_workers=-1,
        timeout="soon",
        max_nonfinite_steps=object(),
        seed=10**30,
        training_mode="tensor_parallel",
        precision="int4",
        backend="mpi2",
        device_ids=[0, 0],
        sync_bn="yes",
        compile=True,
        compile_mode="",
        rank="0",
    )
    names = {problem.split(":")[0] for problem in found}
    assert names == {
        *("batch_size", "gradient_accumulation_steps", "max_grad_norm", "num_workers", "timeout", "training_mode"),
        *("precision", "backend", "device_ids", "sync_bn", "compile_mode", "rank", "max_nonfinite_steps", "seed"),
    }


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"fp16_compression": True, "use_fp16_allreduce": False}, "one setting"),
        ({"bucket_cap_mb": 25, "reduce_bucket_size": 1024}, "one setting"),
        ({"static_graph": True, "find_unused_parameters": True}, "turn one off"),
        ({"use_mixed_precision": False, "precision": "bf16"}, "leave one out"),
        ({"global_batch_size": 100, "batch_size": 32, "world_size": 2}, "not a multiple"),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 2}, "leave gradient_accumulation_steps out"),
        ({"persistent_workers": True}, "set num_workers"),
        ({"rank": 2, "world_size": 2}, "count from 0"),
        ({"rank": 0}, "set both"),
        ({"enable_fault_tolerance": False, "checkpoint_frequency": 5}, "checkpoint_frequency has no effect"),
        ({"enable_fault_tolerance": False, "recovery_timeout": timedelta(seconds=5)}, "recovery_timeout has no effect"),
        ({"oom_retry": True, "static_graph": True}, "turn one off"),
        ({"oom_retry": True, "training_mode": "fully_sharded"}, "turn one off"),
        ({"training_mode": "fully_sharded", "fp16_compression": True}, "no effect"),
        ({"training_mode": "fully_sharded", "precision": "fp16"}, "bf16"),
        ({"training_mode": "data_parallel", "sync_bn": True}, "sync_bn has no effect"),
        ({"compile_backend": "inductor"}, "compile_backend has no effect"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], word: str) -> None:
    (problem,) = problems_of(**settings)
    assert word in problem


@pytest.mark.parametrize(
    ("settings", "facts", "word"),
    [
        ({"backend": "nccl"}, {}, "needs a GPU"),
        ({"device_ids": (0, 1)}, {}, "sees none"),
        ({"device_ids": (0, 3)}, {"on_cuda": True, "cuda_devices": 2}, "only 2"),
        ({"device_ids": (0,)}, {"on_cuda": True, "cuda_devices": 2, "local_rank": 1}, "one for each rank"),
        ({"precision": "bf16"}, {"on_cuda": True, "cuda_devices": 1, "computes_bf16": False}, "bf16"),
        ({"training_mode": "data_parallel"}, {"world_size": 2}, "one process"),
        ({"training_mode": "fully_sharded"}, {}, "one rank"),
        ({"global_batch_size": 64}, {"world_size": 3}, "not a multiple"),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(settings: dict[str, Any], facts: dict[str, Any], word: str) -> None:
    config = MultiGPUConfig(**settings)
    (finding,) = config_rules.conflicts_with_place(config, around(**facts))
    assert word in config_rules.sentence(finding)


def test_a_default_configuration_fits_everywhere() -> None:
    for facts in ({}, {"world_size": 8, "local_rank": 7}, {"on_cuda": True, "cuda_devices": 8, "computes_bf16": False}):
        assert list(config_rules.conflicts_with_place(MultiGPUConfig(), around(**facts))) == []


@pytest.mark.parametrize(
    ("settings", "compressed", "megabytes", "size"),
    [
        ({}, False, 25.0, 26_214_400),
        ({"use_fp16_allreduce": True}, True, 25.0, 26_214_400),
        ({"fp16_compression": True, "bucket_cap_mb": 1}, True, 1, 1_048_576),
        ({"reduce_bucket_size": 512 * 1024}, False, 0.5, 524_288),
        ({"reduce_bucket_size": 26_214_400, "bucket_cap_mb": 25}, False, 25, 26_214_400),
    ],
)
def test_aliases_agree(settings: dict[str, Any], compressed: bool, megabytes: float, size: int) -> None:
    config = MultiGPUConfig(**settings)
    assert (config.fp16_compression, config.use_fp16_allreduce) == (compressed, compressed)
    assert (config.bucket_cap_mb, config.reduce_bucket_size) == (megabytes, size)


@pytest.mark.parametrize(
    ("settings", "mixed", "precision"),
    [
        ({}, False, "fp32"),
        ({"use_mixed_precision": True}, True, "auto"),
        ({"precision": "fp16"}, True, "fp16"),
        ({"use_mixed_precision": True, "precision": "bf16"}, True, "bf16"),
        ({"use_mixed_precision": False}, False, "fp32"),
    ],
)
def test_precision_is_filled_in(settings: dict[str, Any], mixed: bool, precision: str) -> None:
    config = MultiGPUConfig(**settings)
    assert (config.use_mixed_precision, config.precision) == (mixed, precision)


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (timedelta(microseconds=1), "log_interval: expected at least 1ms, got 0.000001s"),
        (timedelta(seconds=-1), 'log_interval: "-1s" is not a duration'),
    ],
)
def test_a_time_that_is_too_short_is_refused_as_a_duration(time: timedelta, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MultiGPUConfig(log_interval=time)
    assert str(refused.value).startswith(said)


def test_replace_fills_in_anew() -> None:
    config = MultiGPUConfig(use_fp16_allreduce=True, reduce_bucket_size=1024 * 1024, use_mixed_precision=True)
    changed = config.replace(fp16_compression=False, bucket_cap_mb=4, precision="fp32")
    assert (changed.use_fp16_allreduce, changed.reduce_bucket_size) == (False, 4 * 1024 * 1024)
    assert changed.use_mixed_precision is False
    assert changed.replace(use_mixed_precision=True).precision == "auto"
    assert config.replace(batch_size=8).fp16_compression is True


def test_a_change_says_what_to_write() -> None:
    config = MultiGPUConfig()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"config = config\.replace\(use_mixed_precision=True\)"):
        config.use_mixed_precision = True  # type: ignore[misc]
    assert config.replace(use_mixed_precision=True).precision == "auto"
    assert config.precision == "fp32"


@pytest.mark.parametrize(
    ("given", "own_loader", "on_cuda", "ranks", "told"),
    [
        ({"pin_memory": True}, False, False, 2, ["pin_memory"]),
        ({"pin_memory": True}, False, True, 2, []),
        ({"sync_bn": True}, False, True, 1, ["sync_bn"]),
        ({"sync_bn": True}, False, True, 2, []),
        ({"sync_bn": True}, False, False, 2, ["sync_bn"]),
        ({"batch_size": 8, "shuffle": False}, True, True, 2, ["batch_size", "shuffle"]),
        ({"batch_size": 8, "shuffle": False}, False, True, 2, []),
        ({}, True, False, 1, []),
    ],
)
def test_settings_that_do_nothing_here_are_named(
    given: dict[str, Any], own_loader: bool, on_cuda: bool, ranks: int, told: list[str]
) -> None:
    found = config_rules.without_effect(
        MultiGPUConfig(**given), on_cuda=on_cuda, world_size=ranks, own_loader=own_loader
    )
    assert [config_rules.names_of(one)[0] for one in found] == told


def test_presets_are_valid_and_can_be_changed() -> None:
    assert MultiGPUConfig.development().training_mode is TrainingMode.DATA_PARALLEL
    assert MultiGPUConfig.production().gradient_accumulation_steps == 4
    large = MultiGPUConfig.large_model(batch_size=2)
    assert (large.gradient_accumulation_steps, large.use_gradient_checkpointing, large.batch_size) == (8, True, 2)
    assert MultiGPUConfig.production(global_batch_size=256).gradient_accumulation_steps == 1
    assert MultiGPUConfig.large_model(num_workers=0).num_workers == 0


def test_a_mapping_as_yaml_gives_it() -> None:
    config = MultiGPUConfig.from_dict(
        {
            "training_mode": "fully_sharded",
            "timeout": "90s",
            "batch_size": 8,
            "max_grad_norm": 1,
            "recovery_timeout": 60,
        }
    )
    assert config.training_mode is TrainingMode.FULLY_SHARDED
    assert (config.timeout, config.recovery_timeout) == (timedelta(seconds=90), timedelta(minutes=1))


def test_a_mapping_tells_all_unknown_names_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        MultiGPUConfig.from_dict({"batchsize": 8, "timeout": "soon", "colour": "red"})
    text = str(caught.value)
    assert "batchsize: there is no such key (did you mean batch_size?)" in text
    assert "is not a duration" in text
    assert "colour: there is no such key (trainer has the settings of docs/training.md)" in text


def test_the_command_line_reads_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRAINER_VARIABLE, raising=False)
    config = MultiGPUConfig.from_args(
        [
            *("--batch-size", "8", "--use-mixed-precision", "--sync-bn", "no", "--device-ids", "0,1"),
            *("--timeout", "10m", "--max-grad-norm", "0.5", "--training-mode", "data_parallel", "--compile=true"),
        ]
    )
    assert (config.batch_size, config.use_mixed_precision, config.sync_bn) == (8, True, False)
    assert (config.device_ids, config.timeout, config.max_grad_norm) == ((0, 1), timedelta(minutes=10), 0.5)
    assert (config.training_mode, config.compile) == ("data_parallel", True)


def test_the_command_line_wins_over_the_job_file_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRAINER_VARIABLE, json.dumps({"batch_size": 16, "seed": 7}))
    config = MultiGPUConfig.from_args(["--batch-size", "4"], batch_size=64, seed=1, num_workers=2)
    assert (config.batch_size, config.seed, config.num_workers) == (4, 7, 2)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_job_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TRAINER_VARIABLE, text)
    with pytest.raises(ConfigError, match=TRAINER_VARIABLE):
        MultiGPUConfig.from_args([])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--batch-size", "many"], "whole number"),
        (["--max-grad-norm", "big"], "a number above 0"),
        (["--sync-bn", "perhaps"], "true or false"),
        (["--device-ids", "a,b"], "commas"),
        (["--batch-size", "none"], "whole number"),
    ],
)
def test_bad_text_on_the_command_line(arguments: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        MultiGPUConfig.from_args(arguments)


def test_an_unknown_option_ends_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        MultiGPUConfig.from_args(["--batchsize", "3"])
    assert caught.value.code == 2


def test_every_field_is_documented() -> None:
    """docs/training.md has the table that the settings' definitions give, and no other row."""
    rows = [
        f"| `{name}` | {key.doc.unit} | {'' if key.default is None else f'`{show_default(key)}`'} | {key.doc.text} |"
        for name, key in settings().items()
    ]
    text = (ROOT / "docs" / "training.md").read_text()
    table = "| setting | unit | default | effect |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
    assert table in text, "write into docs/training.md:\n" + table


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"timeout": "5m"}, timedelta(minutes=5)),
        ({"timeout": 0.25}, timedelta(milliseconds=250)),
        ({"timeout": timedelta(microseconds=1_234_567)}, timedelta(microseconds=1_234_567)),
        ({"peak_flops": 1e15}, 1e15),
        ({"device_ids": [3, 1]}, (3, 1)),
        ({"compile": True, "compile_mode": "max-autotune"}, True),
        ({"training_mode": TrainingMode.FULLY_SHARDED}, TrainingMode.FULLY_SHARDED),
    ],
)
def test_values_of_python_are_taken(given: dict[str, Any], value: object) -> None:
    assert getattr(MultiGPUConfig(**given), next(iter(given))) == value


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--compile", "1"], "compile", True),
        (["--sync-bn", "Off"], "sync_bn", False),
        (["--peak-flops", "1e15"], "peak_flops", 1e15),
        (["--device-ids", "[0, 2]"], "device_ids", (0, 2)),
        (["--max-grad-norm", "none"], "max_grad_norm", None),
    ],
)
def test_words_of_a_command_line_are_taken(arguments: list[str], name: str, value: object) -> None:
    assert getattr(MultiGPUConfig.from_args(arguments, max_grad_norm=2.0), name) == value


def test_a_configuration_is_read_without_pydantic() -> None:
    """A rank that starts again imports what it needs, and no more."""
    script = (
        "import sys; from orchestrator.train import MultiGPUConfig; MultiGPUConfig.from_dict({'timeout': '5m'}); "
        "print([name for name in ('torch', 'pydantic', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.strip() == "[]"
