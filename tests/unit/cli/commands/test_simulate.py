"""`orch simulate`: traces, synthetic jobs, the daemon's history, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.cli.commands.simulate import trace_of
from orchestrator.core.simulation import TraceJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

TRACE = "timestamp,duration,num_gpus\n2026-01-01 00:00:00,100,8\n2026-01-01 00:00:10,50,8\n"


def test_a_trace_under_two_policies(orch: Orch, home: Path) -> None:
    (home / "t.csv").write_text(TRACE)
    done = orch("simulate", str(home / "t.csv"), "--nodes", "1x8", "--compare", "fifo")
    assert (done.code, done.err) == (0, "")
    assert "completion, mean" in done.out
    answer = orch("simulate", str(home / "t.csv"), "--nodes", "1x8", "--compare", "fifo", "--json").json
    assert answer["policies"]["orch"]["completion_seconds"]["mean"] == 120
    assert answer["policies"]["fifo"]["preemptions"] == 0


def test_synthetic_jobs_are_written_and_played(orch: Orch, home: Path) -> None:
    out = str(home / "s.csv")
    assert orch("simulate", "--synthetic", "philly", "--jobs", "30", "--write", out).out == f"{out}: 30 jobs\n"
    assert orch("simulate", out, "--json").json["policies"]["orch"]["jobs"] == 30


def test_a_picture(orch: Orch, home: Path) -> None:
    pytest.importorskip("matplotlib")
    (home / "t.csv").write_text(TRACE)
    assert orch("simulate", str(home / "t.csv"), "--plot", str(home / "p.png")).code == 0
    assert (home / "p.png").stat().st_size
    assert orch("simulate", str(home / "t.csv"), "--plot", str(home / "no" / "p.png")).code == 2


def test_the_jobs_of_a_daemon_as_a_trace() -> None:
    def view(**fields: Any) -> Any:
        usual = {
            "submitted_at": 5.0, "started_at": 7.0, "ended_at": 27.0, "num_workers": 2, "user": "ada", "priority": 60,
            "resources": {"resources_per_worker": {"gpu": 1}},
        }  # fmt: skip
        return SimpleNamespace(**{**usual, **fields})

    jobs = [view(), view(resources={}), view(started_at=None)]
    assert trace_of(cast("Any", jobs)) == [TraceJob(at=5.0, seconds=20.0, ranks=2, user="ada", priority=60)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one source of jobs is needed"),
        (("gone.csv",), "gone.csv cannot be read"),
        (("--synthetic", "x"), "unknown family 'x'"),
        (("--synthetic", "philly", "--nodes", "8"), "'8' is not a number of nodes"),
        (("--synthetic", "philly", "--policy", "x"), "unknown policy 'x'"),
        (("--synthetic", "philly", "--write", "no/such/x.csv"), "cannot be written"),
    ],
)
def test_what_cannot_be_simulated(
    orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(home)
    done = orch("simulate", *arguments)
    assert done.code == 2
    assert said in done.err


def test_a_bad_row_names_its_line(orch: Orch, home: Path) -> None:
    (home / "t.csv").write_text(TRACE + "never,1,1\n")
    done = orch("simulate", str(home / "t.csv"))
    assert done.code == 2
    assert "line 4: timestamp is 'never'" in done.err


def test_the_commands_of_the_page(orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(home)
    (home / "jobs.csv").write_text(TRACE)
    lines = (Path(__file__).parents[4] / "docs" / "simulation.md").read_text().splitlines()
    commands = [line.removeprefix("$ orch ").split() for line in lines if line.startswith("$ orch ")]
    assert len(commands) == 5
    for command in commands:
        if "--history" not in command:  # that needs a daemon with jobs
            assert orch(*command).code == 0
