"""A script's optimizer steps are timed from outside: steps that count, steps that do not, and the limits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from orchestrator.bench.rank.script import FIRST_STEPS, StepWatch


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
