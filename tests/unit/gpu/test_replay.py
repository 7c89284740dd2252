"""`orch replay`: the player with a separate clock, the keys, and refused command lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.errors import BadRequestError, NotFoundError, OrchError
from orchestrator.cli.commands import gpu
from orchestrator.cli.commands.runs import find_recording
from orchestrator.cli.session import Session
from orchestrator.cli.top.player import Player
from orchestrator.gpu.recording.reading import RecordedSample, Recording

START = 1_700_000_000.0


def sample(index: int, at: float, **changes: Any) -> RecordedSample:
    values: dict[str, Any] = {
        "timestamp": START + at,
        "elapsed_seconds": at,
        "gpu_index": index,
        "gpu_name": "H100",
        "utilization": at / 100,
        "power_watts": 300.0 if index == 0 else 100.0,
    }
    return RecordedSample(**{**values, **changes})


def recording(*, seconds: int = 100, silent_from: int = 1000, **changes: Any) -> Recording:
    samples = [
        sample(index, float(at))
        for at in range(seconds + 1)
        for index in (0, 1)
        if not (index == 1 and at > silent_from)
    ]
    return Recording(**{"source": Path("run.json"), "samples": tuple(samples), **changes})


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_plays_at_its_speed_and_stays_at_the_end(clock: Clock) -> None:
    player = Player(recording(), start=10.0, speed=2.0, clock=clock)
    assert player.position == 10.0
    clock.now += 5.0
    assert player.position == 20.0
    shown = player.frame
    assert shown.at == START + 20.0
    assert [one.utilization_ratio for one in shown.rows] == [0.2, 0.2]
    assert list(shown.history["GPU 0"]) == [at / 100 for at in range(21)]
    assert "run.json  2x  0:00:20.0 of 0:01:40.0" in shown.title
    clock.now += 1000.0
    assert player.position == player.end == 100.0
    assert "end" in player.frame.title


def test_pause_seek_step_and_speed(clock: Clock) -> None:
    player = Player(recording(), clock=clock)
    clock.now += 7.5
    player.toggle()
    clock.now += 60.0
    assert (player.playing, player.position) == (False, 7.5)
    player.step(1)
    assert player.position == 8.0
    player.step(-1)
    assert player.position == 7.0
    player.skip(-60.0)
    assert player.position == 0.0
    player.step(-1)
    assert player.position == 0.0
    player.seek(player.end)
    player.step(1)
    assert player.position == 100.0
    player.toggle()
    assert (player.playing, player.position) == (True, 0.0), "at the end it plays again"
    player.faster(1)
    clock.now += 3.0
    assert (player.speed, player.position) == (2.0, 6.0)
    for _ in range(20):
        player.faster(1)
    assert player.speed == 1000.0
    for _ in range(20):
        player.faster(-1)
    assert player.speed == 0.1
    assert player.position == 6.0, "a change of the speed moves nothing"


def test_a_gpu_that_falls_silent_shows_no_old_values(clock: Clock) -> None:
    player = Player(recording(silent_from=50), start=55.0, clock=clock)
    assert [one.health for one in player.frame.rows] == ["ok", "ok"]
    player.seek(80.0)
    first, second = player.frame.rows
    assert (first.health, first.power_watts) == ("ok", 300.0)
    assert (second.health, second.power_watts, second.problem) == ("stale", None, "no sample for 30 s")


def test_balance_training_and_defects_of_the_file_are_told(clock: Clock) -> None:
    samples = (
        *recording().samples,
        sample(0, 101.0, utilization=1.0, training={"epoch": 3}),
        sample(1, 101.0, utilization=1.0),
    )
    player = Player(recording(samples=samples, repaired=True, dropped=2), start=101.0, clock=clock)
    shown = player.frame
    assert "poor" in shown.origin
    assert "power CV 50%" in shown.origin
    assert "training: epoch 3" in shown.problems
    assert "the end of the file is cut off and left out" in shown.problems
    assert any("2 entries" in problem for problem in shown.problems)


# --------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(environ={"ORCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})


def entry(number: int) -> dict[str, Any]:
    return {"timestamp": f"2026-01-01T00:00:{number:02d}", "gpu_index": 0, "utilization": 50, "power": 100}


def test_truncated_files_play_what_is_whole(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "gpu_stats_x.json"
    path.write_text(json.dumps([entry(i) for i in range(5)])[:-30])
    found = find_recording(session, str(path)).recording
    assert (len(found.samples), found.repaired) == (4, True)


def test_a_jobs_telemetry_is_found_by_its_directory_and_by_its_name(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "home/jobs/digits-k3f9q2/telemetry"
    folder.mkdir(parents=True)
    (folder / "telemetry-GPU-1.csv").write_text("1700000000.0,0.5,1,100.0,,40,,,1\n")
    for ref in (str(folder), str(folder.parent), "digits-k3f9q2"):
        found = find_recording(session, ref)
        assert (found.name, len(found.recording.samples)) == ("digits-k3f9q2", 1)


FOREIGN = {
    "truncated.json": (b'[{"timestamp": "2026', "holds no samples: its end is cut off"),
    "text.txt": (b"hello\n", "is no GPU recording"),
    "noise.json": (bytes(range(256)) * 20, "is no GPU recording"),
    "empty.csv": (b"", "is no GPU recording"),
    "other.json": (b'{"a": 1}', "no"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_one_clear_error(session: Session, tmp_path: Path, name: str) -> None:
    content, expected = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRequestError, match=expected) as caught:
        find_recording(session, str(tmp_path / name))
    assert name in caught.value.message
    assert caught.value.hint


def test_what_is_not_there_or_no_file_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for ref, error in (
        ("gone.json", NotFoundError),
        ("no-such-job", NotFoundError),
        ("\0", NotFoundError),
        ("/dev/null", BadRequestError),
        (str(tmp_path / "nothing"), BadRequestError),
    ):
        with pytest.raises(error):
            find_recording(session, ref)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"speed": math.nan}, "--speed nan"),
        ({"speed": 0.0}, "--speed 0"),
        ({"speed": 1e6}, "out of range"),
        ({"start": "5"}, "no unit"),
        ({"start": "10m"}, "after the end"),
        ({}, "needs a terminal"),
    ],
)
def test_bad_options_are_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([entry(i) for i in range(5)]))
    monkeypatch.setattr(gpu, "Session", lambda: session)
    with pytest.raises(OrchError, match=expected):
        gpu.replay(str(path), **arguments)
