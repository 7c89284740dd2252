"""What counts as delivered to wandb, and what a process that follows a killed one hands over again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator.analysis.trackers.journal import Point
from orchestrator.analysis.trackers.process import RunFacts

BACKEND = "orchestrator.analysis.trackers.wandb"


class Run:
    """wandb's run: with a step given, a row is complete once it is committed, or a later step begins."""

    def __init__(self, step: int) -> None:
        self.step, self.project, self.url, self.summary = step, "orch", "", {}
        self.rows: list[int] = []
        self._begun: int | None = None

    def define_metric(self, *_: str, **__: str) -> None:
        pass

    def log(self, values: dict[str, float], *, step: int, commit: bool = False) -> None:
        assert values
        if self._begun is not None and self._begun < step:
            self.rows.append(self._begun)
        self._begun = None if commit else step
        if commit:
            self.rows.append(step)


class Wandb(ModuleType):
    """The library, for one run; ``known`` is the next step of a run that the server resumes."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.known, self.runs = 0, list[Run]()

    def init(self, **_: Any) -> Run:
        self.runs.append(Run(self.known))
        return self.runs[-1]

    def Settings(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wandb]:
    library = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    yield library
    sys.modules.pop(BACKEND, None)


POINTS = [Point(number=number, at=1.0, step=10 * number, values={"loss": 1.0}) for number in range(4)]


def opened(tmp_path: Path) -> tuple[Any, Any]:
    module = importlib.import_module(BACKEND)
    return module, module.WandbRun(RunFacts(job_id="digits-abc234", folder=tmp_path))


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_point_is_pending_for_a_minute_after_wandb_got_it(
    wandb: Wandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    module, run = opened(tmp_path)
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run.write(POINTS[:2])
    assert run.kept() == -1
    now[0] += 40
    run.write(POINTS[2:])
    assert wandb.runs[0].rows == [0, 1, 2, 3], "no row waits for the next one"
    now[0] += 20
    assert run.kept() == 1
    now[0] += 40
    assert run.kept() == 3


@pytest.mark.parametrize(("mode", "again"), [("offline", [0, 1, 2, 3]), ("online", [2, 3])])
def test_pending_points_are_handed_over_again_unless_a_server_has_them(
    wandb: Wandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, again: list[int]
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.known = 2 if mode == "online" else 0
    _, run = opened(tmp_path)
    assert [point.number for point in run.missing(POINTS)] == again
