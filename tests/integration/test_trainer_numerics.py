"""Two real ranks over gloo compute what one process with the whole batch computes; every option has its effect."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from tests.integration.trainer_ranks import (
    STEPS,
    cross_entropy,
    global_batches,
    linear_model,
    momentum,
    normalized_model,
    run,
    trained_alone,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numerics")


@pytest.fixture(scope="module")
def found(place: Path) -> list[dict[str, Any]]:
    """Return what each rank found, in one start for all tests here."""
    ended = run("numerics.py", place, cwd=place)
    for status, out, err in ended:
        assert status == 0, out + err
    return [torch.load(place / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_states_close(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_states_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_the_process_group_is_as_configured(found: list[dict[str, Any]]) -> None:
    assert found[1]["process_group"] == {"backend": "gloo", "timeout": timedelta(seconds=77)}


def test_ranks_together_equal_one_process_with_the_whole_batch(found: list[dict[str, Any]]) -> None:
    expected = trained_alone(linear_model(), global_batches()).state_dict()
    assert_states_close(found[0]["whole_batch"], expected, rtol=1e-5, atol=1e-6)
    assert_states_equal(found[0]["whole_batch"], found[1]["whole_batch"])


def test_clipping_is_of_the_whole_gradient(found: list[dict[str, Any]]) -> None:
    expected = trained_alone(linear_model(), global_batches(), clip=0.05).state_dict()
    assert_states_close(found[0]["clipped"]["state"], expected, rtol=1e-5, atol=1e-6)
    assert found[0]["clipped"]["norms"] == found[1]["clipped"]["norms"]
    assert min(found[0]["clipped"]["norms"]) > 0.05, "else nothing would have been clipped"


def test_batch_normalization_is_sharded_in_lower_precision_too(found: list[dict[str, Any]]) -> None:
    full, lower = found[0]["sharded_batch_norm"]
    assert lower == pytest.approx(full, rel=0.05)
    assert lower != full


def test_accumulation_with_a_static_graph_equals_the_large_batch(found: list[dict[str, Any]]) -> None:
    assert_states_close(found[0]["static_accumulated"], found[0]["whole_batch"], rtol=1e-5, atol=1e-6)
    assert_states_equal(found[0]["static_accumulated"], found[1]["static_accumulated"])


@pytest.mark.parametrize("grouped", [False, True])
def test_accumulation_equals_the_large_batch_and_sends_once(found: list[dict[str, Any]], grouped: bool) -> None:
    accumulated = found[0]["accumulated"]
    assert_states_close(accumulated[grouped]["state"], found[0]["whole_batch"], rtol=1e-5, atol=1e-6)
    assert [count > 0 for count in accumulated[False]["sent"]] == [False, False, False, True] * STEPS
    assert accumulated[True]["sent"] == accumulated[False]["sent"][3::4], "no more in a group than one by one"


def test_compression_sends_halves(found: list[dict[str, Any]]) -> None:
    """With compression every gradient is a number that fp16 can hold; without it, hardly any is."""
    for rank in found:
        for full, half in zip(rank["compressed"][False], rank["compressed"][True], strict=True):
            assert torch.equal(half, half.half().float())
            assert not torch.equal(full, full.half().float())
            torch.testing.assert_close(half, full, rtol=1e-2, atol=1e-4)


def test_unused_parameters_need_an_option(found: list[dict[str, Any]]) -> None:
    outcome = found[0]["unused_parameters"]
    assert outcome["plain"].startswith("Expected to have finished reduction")
    assert (outcome["static"], outcome["find"]) == ("trained", "trained")


def test_buckets_and_views(found: list[dict[str, Any]]) -> None:
    """Each result is (buckets, distinct memory blocks of the gradients)."""
    options = found[0]["options_of_ddp"]
    assert options["default"] == (1, 1), "one bucket, and all gradients are views into it"
    assert options["copies"] == (1, 4)
    assert options["small_buckets"][0] > 1


def test_buffers_are_rank_0s_or_ones_own(found: list[dict[str, Any]]) -> None:
    assert torch.equal(found[0]["buffers"][True], found[1]["buffers"][True])
    assert not torch.equal(found[0]["buffers"][False], found[1]["buffers"][False])


def test_mixed_precision_is_close(found: list[dict[str, Any]]) -> None:
    assert found[0]["mixed"]["name"] == "bf16"
    assert_states_close(found[0]["mixed"]["state"], found[0]["whole_batch"], rtol=0.05, atol=0.01)
    assert not torch.equal(found[0]["mixed"]["state"]["0.weight"], found[0]["whole_batch"]["0.weight"])


def test_recomputation_changes_no_bit(found: list[dict[str, Any]]) -> None:
    assert_states_equal(found[0]["recomputed"], found[0]["whole_batch"])


@pytest.mark.parametrize("kind", ["plain", "clipped", "found_by_norm", "accumulated", "sharded"])
def test_one_ranks_nan_is_skipped_by_all(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        skipped, count, _ = rank["one_ranks_nan"][kind]
        assert skipped == [False, True, False, False, False, False]
        assert count == 1
    states = [rank["one_ranks_nan"][kind][2] for rank in found]
    assert all(value.isfinite().all() for value in states[0].values())
    if kind != "sharded":  # only rank 0 has the whole state there
        assert_states_equal(*states)


def test_the_report_names_the_rank_with_the_bad_data(found: list[dict[str, Any]]) -> None:
    report = found[0]["nan_for_ever"]
    assert "in 2 steps in a row, up to step 2" in report
    assert "rank 1: samples [0, 1, 2, 3, 4, 5, 6, 7] of a batch hold NaN" in report
    assert "rank 0:" not in report


def test_one_rank_short_of_memory_changes_nothing(found: list[dict[str, Any]]) -> None:
    assert [rank["one_ranks_memory"]["pieces"] for rank in found] == [1, 4]
    assert_states_close(found[0]["one_ranks_memory"]["state"], found[0]["whole_batch"], rtol=1e-5, atol=1e-6)
    assert_states_equal(found[0]["one_ranks_memory"]["state"], found[1]["one_ranks_memory"]["state"])


def test_fully_sharded_equals_one_process(found: list[dict[str, Any]]) -> None:
    sharded = found[0]["sharded"]
    total = sum(parameter.numel() for parameter in linear_model().parameters())
    assert sum(rank["sharded"]["local"] for rank in found) == total
    expected = trained_alone(linear_model(), global_batches(), clip=0.5).state_dict()
    assert_states_close(sharded["state"], expected, rtol=1e-4, atol=1e-6)
    assert_states_equal(*sharded["went_on"])
    assert_states_close(sharded["accumulated"], found[0]["whole_batch"], rtol=1e-4, atol=1e-6)
    assert sharded["precise"].isfinite()
    assert found[0]["sharded"]["evaluated"] == found[1]["sharded"]["evaluated"]


def test_evaluation_is_over_every_sample_once(found: list[dict[str, Any]]) -> None:
    model = normalized_model().eval()
    inputs, targets = global_batches(1, size=17)[0]
    with torch.no_grad():
        outputs = model(inputs)
    for rank in found:
        assert rank["evaluated"]["loss"] == pytest.approx(float(cross_entropy(outputs, targets)), rel=1e-5)
        assert rank["evaluated"]["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))


def test_ranks_stop_after_the_same_step(found: list[dict[str, Any]]) -> None:
    assert found[0]["stopped_together"] == found[1]["stopped_together"] >= 5


def test_different_lengths_are_noticed_before_anybody_waits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "9 batches on one rank and 5 on another" in rank["different_lengths"]
        assert rank["streams_of_different_lengths"] == (True, [3, 1])


def test_waiting_for_others_is_told_apart(found: list[dict[str, Any]]) -> None:
    assert 0 <= found[0]["plain"]["share"] < 1


def test_another_number_of_ranks_goes_on_to_the_same_result(found: list[dict[str, Any]], place: Path) -> None:
    """Two ranks stop in the second of three epochs; one rank continues with the same samples and the same global batch."""
    assert found[0]["saved_in_the_middle"] == (2, 1, 16)
    inputs, targets = global_batches(1, size=64)[0]

    def one_rank(directory: Path) -> nn.Module:
        ctx = Context(RankEnvironment(checkpoint_dir=str(directory), device="cpu"))
        config = MultiGPUConfig(batch_size=4, global_batch_size=16, progress_bar=False)
        model = linear_model()
        with MultiGPUTrainingManager(config, ctx=ctx) as manager:
            manager.setup_training(model, TensorDataset(inputs, targets), loss_fn=cross_entropy, optimizer=momentum)
            assert manager.trainer.accumulate == 4
            manager.fit(3)
            assert manager.progress.step == 12
        return model

    whole = one_rank(place / "whole")
    resumed = one_rank(place / "checkpoints")
    assert_states_close(resumed.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-6)
