"""README and docs/figures.md quote what was measured, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks import figures

MACHINE = {"cpus": 2, "cpu": "C", "memory_gib": 1.0, "python": "3", "torch": "2", "ray": "2", "load": 0.5}


def value(median: float) -> dict[str, float]:
    return {"median": median, "low": median / 2, "high": median * 2, "p99": median * 3, "n": 4}


def result(measure: str, **more: Any) -> dict[str, Any]:
    return {"measure": measure, "ours": value(0.25), "machine": MACHINE, "date": "2026-01-01", "peers": {}, **more}


def test_the_pages_quote_the_newest_results() -> None:
    for path, text in figures.pages().items():
        assert path.read_text() == text, "run: python -m benchmarks.figures"


def test_the_readme_quotes_nothing_that_shows_no_difference() -> None:
    results = figures.newest()
    rows = [row for row in figures.ROWS if row.label in figures.HEADLINES]
    assert len(rows) == len(figures.HEADLINES) == 5
    assert [row.label for row in rows if not figures.shows_a_difference(row, results[row.measure])] == []


def test_an_overlap_and_a_missed_aim_are_shown() -> None:
    missed = {"torch.save with fsync": {"median": 0.06, "low": 0.04, "high": 0.08}}
    met = {"dcp.async_save": {"median": 0.1, "low": 0.1, "high": 0.2}}
    save = {"ours": value(0.1), "peers": {"torch.save with fsync": value(0.3)}, "ratio": missed | met}
    (row,) = [line for line in table_of("checkpoint_stall", sizes={"2M": save}).splitlines() if "save" in line]
    assert "(`torch.save` with fsync: 300.0 ms (150.0-600.0, n=4); `dcp.async_save`: ); no difference shown |" in row
    assert row.endswith("| 0.05 of `torch.save`: missed (0.040-0.080); 0.5 of `dcp.async_save`: met (0.100-0.200) |")
    assert "| 0.2 s: missed |" in table_of("recovery")
    assert "| 5 s: met |" in table_of("hang")


def table_of(measure: str, **more: Any) -> str:
    return figures.table({measure: result(measure, **more)})


def test_the_pages_in_words_quote_the_results() -> None:
    """verified.md and benchmark.md give the numbers of the newest results, and agree."""
    results, docs = figures.newest(), figures.PAGE.parent
    verified, benchmark = (" ".join((docs / name).read_text().split()) for name in ("verified.md", "benchmark.md"))
    advisor, overhead = results["advisor"], results["bench_overhead"]["ratio"]["by_hand"]
    simulated = json.loads((figures.ROOT / "tests" / "simulation" / "results.json").read_text())
    for text in (
        f"mean error was {100 * advisor['mean_error']:.0f} %",
        f"{100 * advisor['within_interval']:.0f} % of the measurements were in the intervals",
        f"in {100 * advisor['good_choices']:.0f} % of the answers",
        f"lost {100 * advisor['mean_regret']:.1f} % of the throughput",
        f"{overhead['median']:.3f} times as long ({overhead['low']:.3f} to {overhead['high']:.3f};",
    ):
        assert text in benchmark
    cells = f"{advisor['distinct_cells']} cells of two gloo ranks"
    assert cells in benchmark
    for text in (
        cells,
        f"{results['soak']['ours']['kills']:,} random kills of the daemon under {results['soak']['ours']['jobs']} jobs",
        f"{results['hosts']['ours']['n']} faults of hosts and of the network",
        f"{simulated['faults']:,} simulated faults of {len(simulated['kinds'])} kinds in {simulated['histories']:,} histories",
        f"{results['disturbances']['ours']['n']:,} (`make soak`)",
    ):
        assert text in verified
    assert re.search(r"\[benchmark\.md\]\(benchmark\.md#the-error-of-predictions\)", verified)
