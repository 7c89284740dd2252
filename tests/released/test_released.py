"""This version reads the files and messages of every released one."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository
from orchestrator.checkpoint.repository.status import PersisterStatus
from orchestrator.core.conformance import repaired
from orchestrator.core.events import Exit
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.page import read_last_page
from orchestrator.runtime.forkserver.request import parse
from orchestrator.runtime.ranks.launch_spec import RankPlan
from orchestrator.runtime.ranks.rank_events import RankEvent
from orchestrator.train.script.progress_facts import ProgressSnapshot
from tests.released.__main__ import STATES, main
from tests.released.samples import MESSAGES, REQUEST, holds, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSIONS = sorted(path.parent for path in Path(__file__).parent.glob("*/messages.json"))
LATER = 2e9  # seconds since the epoch: after every page here was written


def messages() -> Iterator[Any]:
    for version in VERSIONS:
        for told in json.loads((version / "messages.json").read_text()):
            yield pytest.param(told, id=f"{version.name}-{told['type']}")


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def version(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a released version."""
    found: Path = request.param
    return found


def test_there_is_one_of_every_message() -> None:
    newest = json.loads((VERSIONS[-1] / "messages.json").read_text())
    assert {told["type"] for told in newest} == {type(each).__name__ for each in MESSAGES}


@pytest.mark.parametrize("told", list(messages()))
def test_a_message_means_what_it_meant(told: dict[str, Any]) -> None:
    """A pickle has a message's module and name, and its values in the order of its fields: a new field comes last."""
    found = pickle.loads(base64.b64decode(told["pickle"]))
    assert type(found).__name__ == told["type"]
    if isinstance(found, RankEvent | Exit | ProgressSnapshot | PersisterStatus):  # checked when they are received
        assert not set(repaired(found)[1]) & set(told["told"])
    assert holds(plain(found), told["told"])


@pytest.mark.parametrize("told", list(messages()))
def test_a_message_of_this_version_is_read_by_the_earlier_one(told: dict[str, Any]) -> None:
    """An earlier version takes as many values as it has fields: its own fields come first."""
    (sample,) = [each for each in MESSAGES if type(each).__name__ == told["type"]]
    if not isinstance(sample, RankPlan | RankEvent):  # they have an order of their own
        assert [field.name for field in dataclasses.fields(sample)][: len(told["told"])] == list(told["told"])


def test_a_plan_of_a_later_version_is_taken_without_what_is_new() -> None:
    (plan,) = [each for each in MESSAGES if isinstance(each, RankPlan)]
    made = object.__new__(RankPlan)
    made.__setstate__((*plan.__getstate__(), 60.0, "of a later version"))
    assert made == dataclasses.replace(plan, idle_seconds=60.0)


def test_a_request_to_a_fork_server_is_understood(version: Path) -> None:
    told = json.loads((version / "wire.json").read_text())
    if told["protocol"] != wire.PROTOCOL:
        pytest.skip("another protocol: the two refuse each other, as test_wire shows")
    data = base64.b64decode(told["request"])
    message = wire.decode(data[wire.HEADER.size :])
    assert message == {name: list(each) if isinstance(each, tuple) else each for name, each in REQUEST.items()}
    spawn = parse(message, [3, 4, 5])
    assert (spawn.target, spawn.env["NAME"], spawn.umask, spawn.memory_bytes) == ("train.py", "gr\udcfc", 0o77, 1 << 30)


def test_a_page_is_read(version: Path) -> None:
    page = read_last_page(str(version / "progress.page"), now=LATER)
    assert (page.last_step, page.total_steps) == (41, 100)
    assert page.stop_seen_at is not None


def test_checkpoints_are_found_verified_and_loaded(version: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(version / "checkpoints", root)
    repository = CheckpointRepository(root, attempt=2, job_id="digits-k3f9q2")
    assert [(info.attempt, info.step) for info in repository.list()] == [(1, 20), (1, 10)]
    loaded = repository.load_latest()
    assert loaded is not None
    (_, (step, state)) = STATES
    assert (loaded.step, loaded.attempt, loaded.metrics) == (step, 1, {"loss": 1 / step})
    for name, tensor in state["model"].items():
        assert torch.equal(loaded.state["model"][name], tensor)
        assert loaded.state["model"][name].dtype is tensor.dtype
    assert {name: loaded.state[name] for name in state if name != "model"} == {
        name: value for name, value in state.items() if name != "model"
    }


def test_a_version_is_written_once(version: Path) -> None:
    with pytest.raises(FileExistsError):
        main([version.name])
