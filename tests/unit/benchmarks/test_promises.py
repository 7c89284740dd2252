"""The bars: a figure within its limit, one beyond it, none; both commits side by side, and a commit's own environment."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from benchmarks import promises
from benchmarks.promises import BARS, HERE, Bar, Figure, main

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


def test_the_surface_has_commands_options_keys_and_metrics() -> None:
    ran = subprocess.run([sys.executable, "-c", promises.SURFACE], capture_output=True, text=True, check=True)
    wanted = {"orch submit", "orch report --output-dir", "job.yaml.resources.num_workers", "orch_submission_seconds"}
    assert wanted <= set(json.loads(ran.stdout)["names"])


def test_every_bar_names_a_benchmark_or_tests_that_exist() -> None:
    for one in BARS.values():
        for command in (one.command, one.long):
            for flag, name in itertools.pairwise(command):
                if flag == "-m" and name != "pytest":
                    path = HERE / name.replace(".", "/")
                    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
            assert all((HERE / name).exists() for name in command if name.startswith("tests/")), command
