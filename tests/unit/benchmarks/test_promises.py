"""The bars: a figure within its limit, one beyond it, none; both commits side by side, and a commit's own environment."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import promises
from benchmarks.promises import BARS, HERE, Bar, Figure, main
from orchestrator.process_ends import wait_ended

PRINTS = ("-c", "import json; print(json.dumps({'ours': {'median': 0.25}, 'rate': 100.0}))")


def bar(limit: float, *, keys: tuple[str, ...] = ("ours", "median"), at_least: bool = False) -> Bar:
    return Bar(PRINTS, (Figure("start", limit, keys, at_least=at_least),))


@pytest.mark.parametrize(
    ("made", "code", "word"),
    [
        (bar(0.3), 0, "yes"),
        (bar(0.2), 1, "NO"),
        (bar(99.9, keys=("rate",), at_least=True), 0, "yes"),
        (bar(100.1, keys=("rate",), at_least=True), 1, "NO"),
        (bar(0.3, keys=("other",)), 1, "NO"),
    ],
)
def test_a_figure_beyond_its_limit_or_missing_fails(
    made: Bar, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--bars", "start"], {"start": made}) == code
    assert capsys.readouterr().out.splitlines()[-1].endswith(word)


def test_a_command_that_fails_is_no_figure_and_its_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Bar(("-c", "raise SystemExit('no Ray here')"), (Figure("start", 0.3),))
    assert main([], {"start": broken}) == 1
    assert "no Ray here" in capsys.readouterr().out


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    left = f"import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid, file=open('{pid}', 'w'))"
    main([], {"start": Bar(("-c", left), (Figure("start", 0.3),))})
    assert (
        wait_ended([psutil.Process(int(pid.read_text()))] if psutil.pid_exists(int(pid.read_text())) else [], 30.0)
        == []
    )


@pytest.mark.parametrize(("body", "code"), [("assert True", 0), ("assert False", 1)])
def test_tests_are_a_bar_that_counts_the_failed_ones(tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_one():\n    {body}\n")
    assert main([], {"tests": promises._tests("tests", str(tmp_path / "test_it.py"))}) == code
    assert main([], {"tests": promises._tests("tests", str(tmp_path / "test_gone.py"))}) == 1, "no test ran"


def test_the_long_form_is_another_command_and_the_figures_are_written(tmp_path: Path) -> None:
    made = Bar(PRINTS, (Figure("start", 0.3),), long=("-c", 'print(\'{"ours": {"median": 7}}\')'))
    target = tmp_path / "found.json"
    assert main(["--long", "--json", str(target)], {"start": made}) == 1
    assert [row["figure"] for row in json.loads(target.read_text())["rows"]] == [7.0]


def test_an_unknown_bar_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--bars", "strat"])
    assert "no bar is named strat; there are: start, recovery" in capsys.readouterr().err


def test_two_sides_are_measured_in_turns_and_what_is_gone_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    (other / ".venv" / "bin").mkdir(parents=True)
    (other / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (other / "old").touch()
    names = "import json, os; print(json.dumps({'names': ['a', 'b'] if os.path.exists('old') else ['b', 'c']}))"
    surface = Bar(("-c", names), (Figure("gone", 0, ("gone",)),), compared=True)
    (row,) = promises.measured("surface", surface, {"before": other, promises.THIS: HERE}, rounds=2)
    assert (row["figure"], row["ok"]) == (1.0, False)
    assert "gone: a" in capsys.readouterr().err


def test_the_surface_has_commands_options_keys_and_metrics() -> None:
    ran = subprocess.run([sys.executable, "-c", promises.SURFACE], capture_output=True, text=True, check=True)
    wanted = {"orch submit", "orch report --output-dir", "job.yaml.resources.num_workers", "orch_submission_seconds"}
    assert wanted <= set(json.loads(ran.stdout)["names"])


def test_a_commit_is_measured_with_its_own_files_and_these_packages() -> None:
    with promises.worktree("HEAD") as place:
        command = "import benchmarks, orchestrator, numpy; print(benchmarks.__file__, orchestrator.__file__)"
        python, orch = place / ".venv" / "bin" / "python", place / ".venv" / "bin" / "orch"
        ran = subprocess.run([python, "-c", command], cwd="/", capture_output=True, text=True, check=True)
        assert all(path.startswith(str(place)) for path in ran.stdout.split())
        assert orch.read_text().splitlines()[0] == f"#!{python}"
    listed = subprocess.run(["git", "-C", str(HERE), "worktree", "list"], capture_output=True, text=True, check=True)
    assert str(place) not in listed.stdout


def test_every_bar_names_a_benchmark_or_tests_that_exist() -> None:
    for one in BARS.values():
        for command in (one.command, one.long):
            for flag, name in itertools.pairwise(command):
                if flag == "-m" and name != "pytest":
                    path = HERE / name.replace(".", "/")
                    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
            assert all((HERE / name).exists() for name in command if name.startswith("tests/")), command
