"""How good ``orch advise`` is: its predictions and choices against what ``orch bench`` measures, and against thresholds.

A group is a model and a precision. For each, the advisor answers first, then every cell of the group (batch size x ranks)
is measured, runs in turn. Default: 4 models x 2 precisions x 4 batch sizes x 2 numbers of ranks, 64 cells.

    python -m benchmarks.advisor --raw advisor.jsonl --json benchmarks/results/$(date +%F)-advisor.json

A group is appended to the raw file when it is complete; the same command goes on after the last complete group. The result
holds all raw data. Figures need idle cores: groups record the load average, which shows whether they were.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import commit, machine, report
from orchestrator.bench.advisor.advice import advice_json
from orchestrator.bench.advisor.advisor import run_advisor
from orchestrator.bench.advisor.thresholds import advise_by_thresholds
from orchestrator.bench.benchmark import run_benchmark
from orchestrator.bench.plan import BenchRequest, parse_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TARGET_ERROR: Final = 0.05
TARGET_SHARE: Final = 0.95
MOST_REGRET: Final = 0.01


def main() -> None:
    """Measure the groups that are missing, and evaluate all."""
    options = _options()
    wanted = [(model, precision) for model in options.models.split(",") for precision in options.precisions.split(",")]
    settings = {name: getattr(options, name) for name in ("batch_sizes", "ranks", "runs", "steps", "threads")}
    done = {(one["model"], one["precision"]): one for one in read_groups(options.raw, settings)}
    for model, precision in wanted:
        if (model, precision) not in done:
            print(f"{model} in {precision}", file=sys.stderr)
            group = measure_group(_request(options, model, precision), settings)
            done[model, precision] = group
            with options.raw.open("a") as raw:
                raw.write(json.dumps(group) + "\n")
    groups = [done[one] for one in wanted]
    found = {"measure": "advisor", **evaluate(groups), "groups": groups}
    report({**found, "machine": machine(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}, options.json)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description="Predictions and choices of orch advise against measurements.")
    made.add_argument("--raw", type=Path, required=True, help="complete groups, one a line; goes on where it ends")
    made.add_argument("--json", type=Path, help="write the result there as well")
    made.add_argument("--models", default="medium,large,conv,transformer", help="models, or FILE.py:factory")
    made.add_argument("--precisions", default="fp32,bf16")
    made.add_argument("--batch-sizes", default="16,64,256,1024", help="global")
    made.add_argument("--ranks", default="1,2")
    made.add_argument("--runs", type=int, default=10)
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--threads", type=int, default=1)
    return made.parse_args()


def _request(options: argparse.Namespace, model: str, precision: str) -> BenchRequest:
    return BenchRequest(
        model=model,
        precision=precision,
        batch_sizes=parse_numbers("--batch-sizes", options.batch_sizes),
        ranks=parse_numbers("--ranks", options.ranks),
        runs=options.runs,
        steps=options.steps,
        threads=options.threads,
        output=Path(tempfile.mkdtemp(prefix="orch-advisor-")),
    )


def read_groups(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The complete groups of a raw file; a line that a kill cut short is left out. Raises SystemExit for other settings."""
    if not path.exists():
        return []
    text = path.read_text()
    groups = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if len(groups) < len(text.splitlines()):
        path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    others = [group["settings"] for group in groups if group["settings"] != settings]
    if others:
        raise SystemExit(f"{path} was measured with {others[0]}: repeat those options, or name another file with --raw")
    return groups


def measure_group(request: BenchRequest, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The advisor's answer for a model, then the measurement of each cell."""

    def note(text: str) -> None:
        print(f"  {text}", file=sys.stderr)

    load = os.getloadavg()[0]
    try:
        answer = run_advisor(request, environ=os.environ, logs=request.output, note=note)
        outcome = run_benchmark(request, environ=os.environ, note=note)
    finally:
        shutil.rmtree(request.output)
    return {
        "model": request.model,
        "precision": request.precision,
        "settings": dict(settings),
        "load": load,
        "parameters": answer.probe.parameters,
        "probe": {"steps": answer.probe.steps, "seconds": answer.probe.seconds},
        "advice": [advice_json(one, answer.probe) for one in answer.advice],
        "measured": [
            {"batch_size": one.cell.batch, "ranks": one.cell.ranks, "samples_per_second": one.throughputs}
            for one in outcome.results
            if one.runs
        ],
    }


def evaluate(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of predictions, and regrets of choices: of the advisor, with and without its "I can't tell", and of the thresholds."""
    cells = [cell for group in groups for cell in _cells(group)]
    choices = [choice for group in groups for choice in _choices(group)]
    error = fmean(abs(cell["error"]) for cell in cells)
    share = _share([choice["regret"] for choice in choices])
    return {
        "cells": cells,
        "choices": choices,
        "mean_error": error,
        "largest_error": max(abs(cell["error"]) for cell in cells),
        "within_interval": fmean(cell["within_interval"] for cell in cells),
        "good_choices": share,
        "good_choices_that_were_certain": _share([1.0 if not c["certain"] else c["regret"] for c in choices]),
        "good_choices_of_thresholds": _share([choice["regret_of_thresholds"] for choice in choices]),
        "certain": fmean(choice["certain"] for choice in choices),
        "most_probe_steps": max(group["probe"]["steps"] for group in groups),
        "most_probe_seconds": max(group["probe"]["seconds"] for group in groups),
        "targets_met": {"mean_error": error <= TARGET_ERROR, "good_choices": share >= TARGET_SHARE},
    }


def _share(regrets: Sequence[float]) -> float:
    return fmean(regret <= MOST_REGRET for regret in regrets)


def _measured(group: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    return {(one["batch_size"], one["ranks"]): fmean(one["samples_per_second"]) for one in group["measured"]}


def _cells(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every prediction beside its measurement."""
    measured = _measured(group)
    for advice in group["advice"]:
        for one in advice["predictions"]:
            found = measured.get((advice["batch_size"], one["ranks"]))
            if found is None:
                continue
            low, high = one["interval_95"]
            yield {
                "model": group["model"],
                "precision": group["precision"],
                "batch_size": advice["batch_size"],
                "ranks": one["ranks"],
                "predicted": one["samples_per_second"],
                "measured": found,
                "error": one["samples_per_second"] / found - 1,
                "within_interval": low <= found <= high,
            }


def _choices(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of ranks beside the best measured one. Regret is the share of throughput given away; a choice not made gives all away."""
    measured = _measured(group)
    for advice in group["advice"]:
        batch = advice["batch_size"]
        by_ranks = {ranks: rate for (size, ranks), rate in measured.items() if size == batch}
        if not by_ranks:
            continue
        best = max(by_ranks.values())
        several = advise_by_thresholds(group["parameters"], batch).several
        by_thresholds = {True: max(by_ranks), False: 1, None: None}[several]
        yield {
            "model": group["model"],
            "precision": group["precision"],
            "batch_size": batch,
            "advised": advice["ranks"],
            "certain": advice["certain"],
            "best": max(by_ranks, key=lambda ranks: by_ranks[ranks]),
            "regret": 1 - by_ranks.get(advice["ranks"], 0.0) / best,
            "thresholds": by_thresholds,
            "regret_of_thresholds": 1.0 if by_thresholds is None else 1 - by_ranks.get(by_thresholds, 0.0) / best,
        }


if __name__ == "__main__":
    main()
