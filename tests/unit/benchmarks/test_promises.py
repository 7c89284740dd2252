"""Bars, hot paths and the policy's quality: each names what exists, and still runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import hot_paths, policy_quality, promises
from benchmarks.promises import BARS, HERE, Bar, Figure, main
from orchestrator.core.simulation import TraceJob

if TYPE_CHECKING:
    pass


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


@pytest.mark.parametrize("name", hot_paths.PATHS)
def test_every_hot_path_runs(name: str) -> None:
    hot_paths.main(name, 1)


TWO = [TraceJob(at=0.0, seconds=100.0, ranks=8), TraceJob(at=1.0, seconds=10.0, ranks=8)]


def test_each_family_is_held_against_fifo_and_the_bound() -> None:
    found = policy_quality.measure(jobs=40, nodes="1x8", seeds=2, trace=TWO)
    assert set(found["families"]) == {"philly", "bursty", "large", "exponential", "trace"}
    assert found["ours"]["n"] == 8
    ratios = policy_quality.ratios(TWO, "1x8")
    assert ratios["mean_over_bound"] == (100 + 109) / (110 + 10)
    assert ratios["mean_over_fifo"] == ratios["mean_over_bound"] / ratios["fifo_over_bound"] == 1


def test_the_bound_stops_the_longer_job_for_the_shorter_one() -> None:
    trace = [
        TraceJob(at=at, seconds=seconds, ranks=ranks) for at, seconds, ranks in ((0, 100, 8), (10, 5, 8), (20, 1, 9))
    ]
    outcome = policy_quality.shortest_remaining(trace, 8)
    assert sorted((one.job.at, one.started_at, one.ended_at) for one in outcome.ran) == [(0, 0, 105), (10, 10, 15)]
    assert sum(one.preemptions for one in outcome.ran) == 1
    assert len(outcome.refused) == 1
