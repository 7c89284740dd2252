"""Numbers of a device, read without waiting."""

from __future__ import annotations

import pytest
import torch

from orchestrator.train.trainer.measure import metrics
from orchestrator.train.trainer.measure.metrics import LateNumber


def test_on_a_cpu_the_number_is_there_at_once() -> None:
    assert LateNumber().read(torch.tensor(2.5)) == 2.5


class Number:
    """A number on a GPU; its copy to the host begins when it is requested."""

    def __init__(self, value: float) -> None:
        self.device = torch.device("cuda")
        self.value = value

    def detach(self) -> Number:
        return self

    def reshape(self, _shape: tuple[()]) -> torch.Tensor:
        return torch.tensor(self.value)


class Event:
    """An event that the device has reached once the test sets it."""

    reached = False

    def record(self) -> None:
        Event.reached = False

    def query(self) -> bool:
        return Event.reached


def test_on_a_gpu_the_newest_number_that_has_arrived_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    empty = torch.empty
    monkeypatch.setattr(metrics.torch, "empty", lambda *shape, **options: empty(*shape, dtype=options["dtype"]))
    number = LateNumber()

    def read(value: float) -> float | None:
        return number.read(Number(value))  # type: ignore[arg-type]

    assert read(1.0) is None
    assert read(2.0) is None, "the first has not arrived"
    Event.reached = True
    assert read(3.0) == 1.0
    assert read(4.0) == 1.0
    Event.reached = True
    assert read(5.0) == 3.0, "what was asked for meanwhile is skipped"
