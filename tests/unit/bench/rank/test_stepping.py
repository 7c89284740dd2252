"""The steps that ``orch bench`` makes equal those of a hand-written loop, and add nothing to them."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from orchestrator.bench.rank.models import make_workload
from orchestrator.bench.rank.stepping import BATCHES, DeviceClock, Stepper, exposed_and_hidden

CPU = torch.device("cpu")


def stepper(precision: str = "fp32", accumulate: int = 1) -> Stepper:
    workload = make_workload("medium", 3)
    return Stepper(
        workload, batch=8, precision=precision, device=CPU, clock=DeviceClock(CPU), seed=3, accumulate=accumulate
    )


def weights_by_hand(steps: int) -> list[torch.Tensor]:
    workload = make_workload("medium", 3)
    generator = torch.Generator().manual_seed(3)
    batches = cycle([workload.batch(8, generator) for _ in range(BATCHES)])
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-3)
    workload.model.train()
    for _ in range(steps):
        inputs, targets = next(batches)
        workload.loss(workload.model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return list(workload.model.parameters())


def test_a_block_is_a_loop_by_hand() -> None:
    ours = stepper()  # both continue with the random state that building the model left
    block = ours.block(6)
    by_hand = weights_by_hand(6)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), by_hand, strict=True))
    assert len(block.steps) == 6
    assert all(seconds > 0 for seconds in block.steps)
    assert sum(block.steps) <= block.seconds


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_only_other_precisions_are_cast(precision: str, dtype: torch.dtype) -> None:
    ours, seen = stepper(precision), []
    ours.model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    ours.step()
    assert seen == [dtype]
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_accumulated_passes_add_up_to_one_step() -> None:
    ours, seen = stepper(accumulate=4), []
    ours.model.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    ours.block(2)
    assert seen == [2] * 8
    assert {float(state["step"]) for state in ours.optimizer.state.values()} == {2.0}


@pytest.mark.parametrize(
    ("buckets", "end", "exposed", "hidden"),
    [
        ([(3.0, 5.0)], 5.0, 2.0, 0.0),
        ([(1.0, 2.0), (3.0, 4.0)], 4.0, 1.0, 1.0),
        ([(1.0, 3.5), (3.0, 4.0)], 4.0, 1.0, 2.0),
        ([(1.0, 2.5), (2.0, 2.8), (4.0, 4.5)], 4.5, 0.5, 1.8),
        ([(2.0, 2.8), (1.0, 2.5), (4.0, 4.5)], 4.5, 0.5, 1.8),
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 9.0)], 9.0, 5.0, 3.0),
        ([(1.0, 2.0)], 0.9, 0.0, 0.0),
    ],
)
def test_communication_is_counted_once(
    buckets: list[tuple[float, float]], end: float, exposed: float, hidden: float
) -> None:
    assert exposed_and_hidden(buckets, end) == pytest.approx((exposed, hidden))
