"""What a rank of the benchmark does: its models, its steps, and a script that is only timed."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.bench.rank.models import ModelError, make_workload
from orchestrator.bench.rank.probing import reference_steps
from orchestrator.bench.rank.script import FIRST_STEPS, StepWatch
from orchestrator.bench.rank.stepping import BATCHES, DeviceClock, Stepper, exposed_and_hidden


@pytest.mark.parametrize(
    ("name", "parameters"), [("medium", 54_403), ("large", 2_021_379), ("conv", 94_986), ("transformer", 466_432)]
)
def test_a_model_has_its_true_number_of_parameters_and_can_be_trained(name: str, parameters: int) -> None:
    made = make_workload(name, 42)
    assert made.parameters == parameters
    inputs, targets = made.batch(4, torch.Generator().manual_seed(1))
    loss = made.loss(made.model(inputs), targets)
    loss.backward()
    assert torch.isfinite(loss)


USER = """
import torch
from torch import nn
class Net(nn.Linear):
    pass
def plain():
    return Net(50, 3)
def whole():
    return nn.Linear(4, 1), lambda n, g: (torch.randn(n, 4, generator=g), torch.randn(n, 1, generator=g)), nn.functional.mse_loss
def nothing():
    return None
def frozen():
    return nn.ReLU()
def broken():
    raise RuntimeError("no weights here")
LIST = [1]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(("factory", "parameters"), [("plain", 153), ("whole", 5)])
def test_a_users_model(script: Path, factory: str, parameters: int) -> None:
    assert make_workload(f"{script}:{factory}", 1).parameters == parameters


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("absent", "has no function absent"),
        ("LIST", "has no function LIST"),
        ("nothing", "returned NoneType: return a module"),
        ("frozen", "no trainable parameters"),
        ("broken", "failed: RuntimeError: no weights here"),
    ],
)
def test_a_factory_that_makes_no_model_is_named(script: Path, factory: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_workload(f"{script}:{factory}", 1)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere.py not found"):
        make_workload(f"{tmp_path}/nowhere.py:make", 1)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ModelError, match="cannot be imported: ZeroDivisionError"):
        make_workload(f"{broken}:make", 1)


@pytest.mark.parametrize(("pilot", "steps"), [(10.0, 10), (0.0025, 100), (0.00249, 100), (0.0000001, 200)])
def test_the_steps_of_a_reference_are_a_whole_number_whatever_a_step_takes(pilot: float, steps: int) -> None:
    """The number is always an int: with numbers of different types, ranks ended each other's all-reduce."""
    found = reference_steps(pilot)
    assert (found, type(found)) == (steps, int)


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def optimizer_of(*sizes: int) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.SGD(parameters, lr=0.1)


def watch_of(clock: Clock, told: list[dict[str, Any]], **limits: float) -> StepWatch:
    return StepWatch(
        most_steps=int(limits.get("steps", 5)), most_seconds=limits.get("seconds", 100.0), done=told.append, clock=clock
    )


def make_steps(watch: StepWatch, optimizer: torch.optim.Optimizer, clock: Clock, steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock.now += seconds
        watch._stepped(optimizer)


def test_the_first_steps_do_not_count_and_the_limit_of_steps_ends_it(clock: Clock) -> None:
    told: list[dict[str, Any]] = []
    watch, optimizer = watch_of(clock, told, steps=4), optimizer_of(10, 3)
    make_steps(watch, optimizer, clock, 1 + FIRST_STEPS, 9.0)
    assert told == []
    make_steps(watch, optimizer, clock, 3, 0.5)
    assert told == []
    make_steps(watch, optimizer, clock, 1, 0.25)
    assert told == [
        {"steps": [0.5, 0.5, 0.5, 0.25], "backwards": [0.0] * 4, "gradient_bytes": [40, 12], "device": "cpu"}
    ]


def test_the_limit_of_seconds_ends_it(clock: Clock) -> None:
    told: list[dict[str, Any]] = []
    watch, optimizer = watch_of(clock, told, seconds=2.0), optimizer_of(1)
    make_steps(watch, optimizer, clock, 1 + FIRST_STEPS + 3, 0.75)
    assert [one["steps"] for one in told] == [[0.75] * 3]


def test_steps_of_a_second_optimizer_and_parameters_without_gradients_do_not_count(clock: Clock) -> None:
    told: list[dict[str, Any]] = []
    watch, first, second = watch_of(clock, told, steps=1), optimizer_of(2), optimizer_of(1000)
    first.add_param_group({"params": [torch.nn.Parameter(torch.zeros(50))]})
    for _ in range(2 + FIRST_STEPS):
        make_steps(watch, first, clock, 1, 1.0)
        make_steps(watch, second, clock, 1, 1.0)
    assert [(one["steps"], one["gradient_bytes"]) for one in told] == [([2.0], [8])]


def test_backward_is_timed_whoever_calls_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restored after the test
    watch, inside = watch_of(clock, told, steps=1), sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(inside, "_global_optimizer_post_hooks", type(inside._global_optimizer_post_hooks)())
    watch.install()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_hook(lambda _: setattr(clock, "now", clock.now + 0.125))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2 + FIRST_STEPS):
        clock.now += 1.0
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [(one["steps"], one["backwards"]) for one in told] == [([1.125], [0.125])]


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
