"""The plan of measurements: checked cells at a known global batch, in an order that favours none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.bench.plan import (
    BenchError,
    BenchRequest,
    cells_of,
    check,
    device_of,
    parse_numbers,
    parse_size,
    ranks_of,
)

REQUEST = BenchRequest()


def test_a_global_batch_is_shared_by_the_ranks() -> None:
    cells = cells_of(replace(REQUEST, batch_sizes=(64, 32)), (1, 2, 4))
    assert [(cell.batch, cell.ranks, cell.per_rank) for cell in cells] == [
        (32, 1, 32), (32, 2, 16), (32, 4, 8), (64, 1, 64), (64, 2, 32), (64, 4, 16)
    ]  # fmt: skip


def test_a_batch_per_rank_is_compared_with_one_rank_at_the_same_global_batch() -> None:
    cells = cells_of(replace(REQUEST, batch_sizes=(16,), scope="per-rank"), (1, 2, 4))
    assert [(cell.batch, cell.ranks) for cell in cells] == [(16, 1), (32, 1), (32, 2), (64, 1), (64, 4)]


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(BenchError, match="global batch of 16 cannot be shared equally by 3 ranks"):
        cells_of(replace(REQUEST, batch_sizes=(16,)), (1, 3))


@pytest.mark.parametrize(
    ("mode", "ranks", "gpus", "found"),
    [
        ("auto", (), 0, (1, 2)),
        ("auto", (), 8, (1, 2, 4, 8)),
        ("auto", (), 1, (1,)),
        ("auto", (4, 2), 4, (1, 2, 4)),
        ("single", (2,), 2, (1,)),
        ("multi", (1, 2, 4), 4, (2, 4)),
        ("auto", (16,), 0, (1, 16)),
    ],
)
def test_ranks_follow_from_mode_and_machine(
    mode: str, ranks: tuple[int, ...], gpus: int, found: tuple[int, ...]
) -> None:
    assert ranks_of(replace(REQUEST, gpu_mode=mode, ranks=ranks), gpus=gpus) == found


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(BenchError, match=r"--ranks has 4, and this machine has 1 GPU$"):
        ranks_of(replace(REQUEST, ranks=(4,)), gpus=1)


@pytest.mark.parametrize(
    ("changes", "gpus", "words"),
    [
        ({"device": "cuda"}, 0, "--device cuda: torch sees no GPU"),
        ({"precision": "fp16"}, 0, "--precision fp16 needs a GPU"),
        ({"memory_limit_bytes": 10**9}, 0, "--memory-limit limits GPUs"),
        ({"device": "cpu", "memory_limit_bytes": 10**9}, 2, "--memory-limit limits GPUs"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(changes: dict[str, Any], gpus: int, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        device_of(replace(REQUEST, **changes), gpus=gpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "huge"}, "--model huge is not known"),
        ({"model": "net.py:a b"}, "names no factory"),
        ({"model": "net.txt:make"}, "names no factory"),
        ({"gpu_mode": "both"}, "--gpu-mode both"),
        ({"precision": "fp8"}, "--precision fp8"),
        ({"device": "tpu"}, "--device tpu"),
        ({"scope": "each"}, "--batch-scope each"),
        ({"batch_sizes": ()}, "--batch-sizes is empty"),
        ({"batch_sizes": (0,)}, "--batch-sizes has 0"),
        ({"batch_sizes": (8, 8)}, "--batch-sizes names a number twice: 8,8"),
        ({"ranks": (65,)}, "--ranks has 65"),
        ({"runs": 0}, "--runs has 0"),
        ({"steps": 100_001}, "--steps has 100001"),
        ({"threads": 0}, "--threads has 0"),
        ({"price_per_gpu_hour": -1.0}, "--price is -1.0"),
        ({"price_per_gpu_hour": float("nan")}, "--price is nan"),
    ],
)
def test_a_value_that_nothing_can_be_measured_with_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=words) as caught:
        check(replace(REQUEST, **changes))
    assert caught.value.hint


def test_a_users_factory_is_accepted_and_named_by_file_and_function() -> None:
    request = replace(REQUEST, model="nets/wide.py:make")
    check(request)
    assert request.model_name == "wide_make"


@pytest.mark.parametrize("text", ["", "1,,2", "1.5", "-1", "two", "1 2", "9999999999"])
def test_other_texts_are_no_numbers(text: str) -> None:
    with pytest.raises(BenchError, match="is not a whole number"):
        parse_numbers("--ranks", text)


@pytest.mark.parametrize("text", ["", "0", "12XB", "-1GB", "1.5GB", "9999999TB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(BenchError, match="is not a size"):
        parse_size("--memory-limit", text)
