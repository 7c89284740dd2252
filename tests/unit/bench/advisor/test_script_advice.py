"""A job's script: it runs in a copy of its directory until its steps are timed, each kind of failure is reported, and the advice follows from that."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.bench.advisor.cost_model import Bucket, Calibration, Links, Probe, ProbePoint, predict
from orchestrator.bench.advisor.script_advice import (
    MAX_COPIED_BYTES,
    Script,
    ScriptAdvice,
    advise_script,
    probe_script,
    read_script_probe,
    script_sentence,
)
from orchestrator.bench.plan import BenchError, Cell

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


@pytest.mark.parametrize(
    ("kind", "target"), [pytest.param("script", "train.py", marks=pytest.mark.rare), ("module", "train")]
)
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
        pytest.param("print('done')", "before it had made enough optimizer steps", marks=pytest.mark.rare),
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
        data.truncate(MAX_COPIED_BYTES + 1)
    with pytest.raises(BenchError, match="holds more than 500 MB"):
        probe_script(script(directory, TRAINS), tmp_path / "log")


def test_the_figures_of_steps_become_a_probe() -> None:
    found = read_script_probe(
        {"steps": [2.0, 4.0, 3.0], "backwards": [1.0, 1.5, 2.0], "gradient_bytes": [8, 4], "device": "cuda"}
    )
    (point,) = found.probe.points
    assert (point.step, point.backward, found.probe.steps, found.device) == (3.0, 1.5, 3, "cuda")
    assert point.error == pytest.approx(1 / 3 / 3**0.5)


def advice(exposed: dict[int, float], unknown: tuple[int, ...] = ()) -> ScriptAdvice:
    """Return the advice for steps of 10 ms; ``exposed`` has the seconds of communication for each number of ranks."""
    probe = Probe(
        parameters=0,
        gradient_bytes=4_000_000,
        points=(ProbePoint(batch=1, step=0.01, backward=0.006, error=0.0),),
        wrapper=0.0,
        buckets=(Bucket(ready=1.0, bytes=4_000_000),),
        steps=20,
        seconds=0.2,
    )
    ranks = (1, *exposed)
    calibration = Calibration(
        links={n: Links(points=((4_000_000, seconds),)) for n, seconds in exposed.items()},
        slowdowns=dict.fromkeys(ranks, ((1, 1.0),)),
        waits=dict.fromkeys(ranks, ((0.01, 0.0),)),
    )
    predictions = tuple(predict(Cell(batch=n, ranks=n), probe, calibration) for n in ranks)
    return advise_script("cpu", probe, calibration, predictions, unknown)


def test_ranks_that_wait_little_are_all_worth_it() -> None:
    found = advice({2: 0.0, 8: 0.0005})
    assert (found.choice.cell.ranks, found.certain) == (8, True)
    assert found.efficiency(found.choice) == pytest.approx(10 / 10.5)
    assert script_sentence(found).startswith(
        "worth 8 ranks: on 8 ranks, reducing 4 MB of gradients adds 0.5 ms to 10 ms"
    )


def test_communication_beyond_the_computation_is_not_worth_it() -> None:
    found = advice({2: 0.05, 4: 0.2})
    assert (found.choice.cell.ranks, found.certain) == (1, True)
    assert script_sentence(found).startswith("worth 1 rank: on 4 ranks, reducing 4 MB of gradients adds 200 ms")


def test_close_to_the_limit_it_cannot_tell() -> None:
    found = advice({2: 0.0099})
    assert (found.choice.cell.ranks, found.certain) == (2, False)
    assert "I can't tell" in script_sentence(found)
