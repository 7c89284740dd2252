"""Graphs of recordings."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gpu.recording import reports
from orchestrator.gpu.recording.reading import RecordedSample, Recording
from orchestrator.gpu.recording.reports import MAX_POINTS, PlotError, write_plot
from orchestrator.parts import install_line


def recording(*samples: RecordedSample) -> Recording:
    return Recording(source=Path("gpu_stats_run.json"), samples=samples)


def sample(at: float, index: int = 0, **values: Any) -> RecordedSample:
    return RecordedSample(timestamp=at, elapsed_seconds=at, gpu_index=index, **values)


def test_each_value_that_was_recorded_has_a_panel(tmp_path: Path) -> None:
    power = [sample(t / 10, index=t % 2, power_watts=100.0 + t) for t in range(40)]
    one = write_plot(recording(*power), tmp_path / "one.png").read_bytes()
    both = [sample(t / 10, power_watts=100.0, utilization=0.5) for t in range(40)]
    two = write_plot(recording(*both), tmp_path / "two.png").read_bytes()
    assert one.startswith(b"\x89PNG")
    heights = [int.from_bytes(png[20:24], "big") for png in (one, two)]
    assert heights[1] - heights[0] == pytest.approx(2.2 * 110, abs=2)


def test_sensors_that_were_silent_leave_gaps_not_zeros() -> None:
    lines = reports._lines(
        recording(sample(0, power_watts=5.0), sample(1), sample(2, power_watts=7.0), sample(0, index=3)),
        lambda s: s.power_watts,
    )
    assert lines == {0: ([0, 2], [5.0, 7.0])}


def test_long_recordings_are_thinned() -> None:
    many = recording(*(sample(t / 100, power_watts=1.0) for t in range(3 * MAX_POINTS)))
    ((seconds, _),) = reports._lines(many, lambda s: s.power_watts).values()
    assert MAX_POINTS / 2 < len(seconds) <= MAX_POINTS


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"gpu_stats_run\.json holds no values to draw"):
        write_plot(recording(sample(0)), tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlotError, match=re.escape(install_line("plots"))):
        write_plot(recording(sample(0, power_watts=1.0)), tmp_path / "x.png")
