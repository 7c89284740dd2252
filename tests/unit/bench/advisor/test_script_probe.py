"""A job's script runs in a copy of its directory until its steps are timed; each kind of failure is reported."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.bench.advisor.cost_model import Bucket
from orchestrator.bench.advisor.script_advice import (
    MOST_COPIED_BYTES,
    Script,
    buckets_of,
    probe_script,
    read_script_probe,
)
from orchestrator.bench.plan import BenchError

MIB = 1 << 20
TRAINS = """
import os, sys, pathlib, torch
print(sys.argv, os.environ["WORLD_SIZE"], os.environ["ORCH_CHECKPOINT_DIR"])
import helper
pathlib.Path("written.pt").write_text("by the probe")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
while True:
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def script(directory: Path, text: str, **changes: object) -> Script:
    (directory / "train.py").write_text(text)
    fields = {
        "python": sys.executable,
        "kind": "script",
        "target": "train.py",
        "args": ("--lr", "0.1"),
        "directory": directory,
    }
    return Script(**{**fields, "environ": dict(os.environ), **changes})  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    (made / "helper.py").write_text("")
    return made


@pytest.mark.parametrize(("kind", "target"), [("script", "train.py"), ("module", "train")])
def test_a_script_without_an_end_is_timed_and_leaves_nothing_in_its_directory(
    directory: Path, tmp_path: Path, kind: str, target: str
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "socket"))
        found = probe_script(script(directory, TRAINS, kind=kind, target=target), tmp_path / "log")
    assert found.device == "cpu"
    assert found.probe.gradient_bytes == 4 * (4 * 2 + 2)
    assert found.probe.steps > 0
    assert 0 < found.probe.points[0].backward < found.probe.points[0].step
    assert sorted(path.name for path in directory.iterdir()) == ["helper.py", "socket", "train.py"]
    assert "['" in (tmp_path / "log").read_text()
    assert "'--lr', '0.1'] 1 " in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('boom')", "ended with 1 before it had made its steps: ValueError: boom"),
        ("import os; os._exit(3)", "ended with 3 before it had made its steps: it printed nothing"),
        ("print('done')", "before it had made enough optimizer steps"),
    ],
)
def test_a_script_that_makes_no_step_is_told(directory: Path, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError, match="ended") as caught:
        probe_script(script(directory, text), tmp_path / "log")
    assert message in caught.value.message
    assert caught.value.hint


def test_a_script_that_takes_too_long_is_ended(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"fewer than 20 optimizer steps within 0\.1s"):
        probe_script(
            script(directory, "import threading; threading.Event().wait()"), tmp_path / "log", start_seconds=0.1
        )


def test_a_directory_that_is_too_large_is_not_copied(directory: Path, tmp_path: Path) -> None:
    with (directory / "data.bin").open("wb") as data:
        data.truncate(MOST_COPIED_BYTES + 1)
    with pytest.raises(BenchError, match="holds more than 500 MB"):
        probe_script(script(directory, TRAINS), tmp_path / "log")


def test_the_figures_of_steps_become_a_probe() -> None:
    found = read_script_probe(
        {"steps": [2.0, 4.0, 3.0], "backwards": [1.0, 1.5, 2.0], "gradient_bytes": [8, 4], "device": "cuda"}
    )
    (point,) = found.probe.points
    assert (point.step, point.backward, found.probe.steps, found.device) == (3.0, 1.5, 3, "cuda")
    assert point.error == pytest.approx(1 / 3 / 3**0.5)


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], [(1.0, 0)]),
        ([100], [(1.0, 100)]),
        ([30 * MIB, 2 * MIB], [(1 / 16, 2 * MIB), (1.0, 30 * MIB)]),
        ([MIB // 2] * 4, [(0.5, MIB), (1.0, MIB)]),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_on(sizes: list[int], buckets: list[tuple[float, int]]) -> None:
    assert buckets_of(sizes) == tuple(Bucket(ready=ready, bytes=size) for ready, size in buckets)
