"""`orch compare`: files, jobs, conditions, exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.analysis.runs import gputop_entry, write_job, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def recordings(home: Path) -> list[str]:
    return [
        str(write_json(home / f"{name}.json", [gputop_entry(s, memory_used=memory + s % 3) for s in range(120)]))
        for name, memory in (("a", 1494.0), ("b", 1381.5))
    ]


def test_two_recordings(orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    done = orch("compare", *recordings(home), "--fail-if", "memory>+5%")
    assert (done.code, done.err) == (0, "")
    assert "B uses 7.5 % less memory (7.5 to 7.5)" in done.out
    assert {path.name for path in (home / "compare-a-b").iterdir()} == {
        "comparison.txt",
        "gpu_comparison.png",
        "gpu_comparison_histograms.png",
    }
    assert (home / "compare-a-b" / "gpu_comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_a_condition_that_holds_is_exit_code_1(orch: Orch, home: Path) -> None:
    done = orch("compare", *recordings(home), "--no-plots", "--fail-if", "memory<-5%", "--json")
    assert done.code == 1
    assert done.json["failed"] == [{"condition": "memory<-5%", "run": "B", "metric": "memory"}]
    assert done.json["files"] == []
    rows = {row["measure"]["name"]: row for row in done.json["pairs"][0]["rows"]}
    assert rows["memory"]["sentence"].startswith("B uses 7.5 % less memory")
    assert rows["memory"]["outcome"] == "lower"
    assert "memory<-5%: B uses 7.5 % less memory" in done.err


def test_jobs_are_compared_at_equal_steps(orch: Orch, home: Path) -> None:
    jobs = [str(write_job(home / name, step_seconds=step)) for name, step in (("one", 0.1), ("two", 0.09))]
    done = orch("compare", *jobs, "--output-dir", str(home / "out"))
    assert done.code == 0
    assert "B against A, at equal steps" in done.out
    assert "loss_at_equal_time" in done.out
    by_time = orch("compare", *jobs, "--no-plots", "--align", "time")
    assert "B against A, at equal time" in by_time.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--align", "epoch"], "--align 'epoch' is unknown"),
        (["--fail-if", "memory"], "'memory' is not a condition"),
        (["--fail-if", "mem>1%"], "mem is not compared between these runs"),
        (["--fail-if", "temperature>1%"], "temperature has no difference in per cent"),
        (["--align", "step"], "reports no steps"),
        (["--output-dir", "/proc/none"], "/proc/none cannot be written"),
    ],
)
def test_bad_input_is_exit_code_2(orch: Orch, home: Path, options: list[str], said: str) -> None:
    files = [
        str(write_json(home / f"{name}.json", [gputop_entry(s, temperature=60 + up) for s in range(30)]))
        for name, up in (("a", 0), ("b", 2))
    ]
    done = orch("compare", *files, "--output-dir", str(home / "out"), *options)
    assert done.code == 2
    assert said in done.err
