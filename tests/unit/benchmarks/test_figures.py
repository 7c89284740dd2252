"""README and docs/figures.md quote what was measured, and nothing else."""

from __future__ import annotations

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


def test_the_readme_quotes_four() -> None:
    labels = [row.label for row in figures.ROWS]
    assert set(figures.HEADLINES) <= set(labels)
    assert figures.table(figures.newest(), figures.HEADLINES).count("\n| ") == len(figures.HEADLINES) == 4


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
        bare_ray_percent=value(0.2),
        free_core=result("overhead", ours=value(0.1)),
    )
    table = figures.table({"overhead": overhead})
    assert "| a step of 2 ms, both cores training | 250.00 ms" in table
    assert "| a step of 50 ms, both cores training | 50.00 ms" in table
    assert "| a step of 2 ms, one core free | 100.00 ms" in table
    assert (
        "| processor time outside the ranks (Ray alone, two idle actors: 0.20 % of a core (0.10-0.40, n=4))"
        " | 0.40 % of a core" in table
    )


def test_a_peer_that_is_neither_torchrun_nor_ray_is_named() -> None:
    found = result("exporter_cost", ours=value(0.0005), peers={"nvitop-exporter": value(0.004)})
    table = figures.table({"exporter_cost": found})
    assert "ten at a time (nvitop-exporter: 4.00 ms (2.00-8.00, n=4)) | 0.50 ms (0.25-1.00, n=4) |" in table


def test_without_results_nothing_is_claimed() -> None:
    assert figures.table({}).endswith("No results yet.")
