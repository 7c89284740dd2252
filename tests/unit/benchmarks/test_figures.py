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


def test_a_row_needs_a_result_and_shows_its_peers() -> None:
    table = figures.table({"recovery": result("recovery", peers={"ray_train": value(8.0)})})
    assert table.count("\n| ") == 1
    assert (
        "| SIGKILL of a rank to the next new step, of a script that saves at every step | 0.25 s (0.12-0.50, n=4) |  | 8.00 s (4.00-16.00, n=4) |"
        in table
    )
    assert "2 cores (C)" in table


def test_values_lie_where_the_benchmarks_put_them() -> None:
    overhead = result(
        "overhead",
        also=result("overhead", ours=value(0.05)),
        cpu_outside_percent=value(0.4),
        bare_ray_percent=value(0.02),
        free_core=result("overhead", ours=value(0.1)),
    )
    table = figures.table({"overhead": overhead})
    assert "| a step of 2 ms, both cores training | 250.00 ms" in table
    assert "| a step of 50 ms, both cores training | 50.00 ms" in table
    assert "| a step of 2 ms, one core free | 100.00 ms" in table
    assert (
        "| processor time outside the ranks (Ray alone, two idle actors: 0.02 % of a core (0.01-0.04, n=4))"
        " | 0.40 % of a core" in table
    )


def test_a_peer_that_is_neither_torchrun_nor_ray_is_named() -> None:
    found = result("exporter_cost", ours=value(0.0005), peers={"nvitop-exporter": value(0.004)})
    table = figures.table({"exporter_cost": found})
    assert "ten at a time (nvitop-exporter: 4.00 ms (2.00-8.00, n=4)) | 0.50 ms (0.25-1.00, n=4) |" in table


def test_without_results_nothing_is_claimed() -> None:
    assert figures.table({}).endswith("No results yet.")
