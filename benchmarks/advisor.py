"""Measures how good ``orch advise`` is: its predictions and choices against measurements, and against thresholds.

A group is a model, a precision and batch sizes that keep its steps short. A round asks the advisor about each group, and measures every
cell of it (batch size x ranks) right after, on the same ranks; rounds follow each other, so that a cell's measurements lie
minutes apart and share the machine's load with the answers. Default: 4 models x 4 batch sizes x 2 numbers of ranks x 2 precisions, 64 cells.

    python -m benchmarks.advisor --raw advisor.jsonl --json benchmarks/results/$(date +%F)-advisor.json

A group of a round is appended to the raw file when it is complete; the same command continues after the last one, also with more
``--rounds``. The result holds all raw data. A prediction is compared with the median of the cell's measurements; every answer of every round
counts by itself. Figures need idle cores: groups record the load average, which shows whether they were.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import commit, machine, report
from orchestrator.bench.advisor.advisor import calibrate, probe_model
from orchestrator.bench.advisor.cost_model import advice_json, advise
from orchestrator.bench.advisor.script_advice import advise_by_thresholds
from orchestrator.bench.plan import BenchRequest, cells_of, parse_numbers, rounds
from orchestrator.bench.processes import RankProcesses, rank_environ

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TARGET_ERROR: Final = 0.05
TARGET_SHARE: Final = 0.95
MAX_REGRET: Final = 0.01
CELLS: Final = "medium=16,64,256,1024 large=8,32,128,512 conv=4,8,16,32 transformer=4,8,16,32"
_WINDOW: Final = 5


def main() -> None:
    """Measure the groups that are missing, and evaluate all."""
    options = _options()
    groups = [(model, precision) for model in options.cells.split() for precision in options.precisions.split(",")]
    settings = {name: getattr(options, name) for name in ("cells", "precisions", "ranks", "runs", "steps", "threads")}
    done = read_groups(options.raw, settings)
    made = {(one["round"], one["cells"], one["precision"]) for one in done}
    for number in range(options.rounds):
        missing = [group for group in groups if (number, *group) not in made]
        if missing:
            done += _round(options, settings, number, missing if number % 2 == 0 else missing[::-1])
    found = {"measure": "advisor", "rounds": options.rounds, **evaluate(done), "groups": done}
    report({**found, "machine": machine(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}, options.json)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description="Predictions and choices of orch advise against measurements.")
    made.add_argument("--raw", type=Path, required=True, help="complete groups, one a line; goes on where it ends")
    made.add_argument("--json", type=Path, help="write the result there as well")
    made.add_argument("--cells", default=CELLS, help="MODEL=BATCH,BATCH ..., global batches, separated by blanks")
    made.add_argument("--precisions", default="fp32,bf16")
    made.add_argument("--ranks", default="1,2")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--runs", type=int, default=2, help="of each cell in a round")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--threads", type=int, default=1)
    return made.parse_args()


def _round(
    options: argparse.Namespace, settings: Mapping[str, Any], number: int, groups: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Measure the groups of a round, on ranks that are started once."""
    sizes = parse_numbers("--ranks", options.ranks)
    made = []
    with (
        tempfile.TemporaryDirectory(prefix="orch-advisor-") as scratch,
        RankProcesses(Path(scratch), rank_environ(os.environ, options.threads)) as ranks,
    ):
        ranks.start(max(sizes))
        ranks.join(sorted({1, *sizes}), "cpu")
        for cells, precision in groups:
            group = measure_group(ranks, _request(options, cells, precision))
            made.append({"round": number, "cells": cells, "settings": dict(settings), **group})
            with options.raw.open("a") as raw:
                raw.write(json.dumps(made[-1]) + "\n")
            print(f"round {number}: {cells} in {precision}, load {group['load']:.1f}", file=sys.stderr)
    return made


def _request(options: argparse.Namespace, cells: str, precision: str) -> BenchRequest:
    model, _, sizes = cells.partition("=")
    return BenchRequest(
        model=model,
        precision=precision,
        batch_sizes=parse_numbers("--cells", sizes),
        ranks=parse_numbers("--ranks", options.ranks),
        runs=options.runs,
        steps=options.steps,
        threads=options.threads,
    )


def read_groups(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the complete groups of a raw file; a line that a kill cut short is removed. Raises SystemExit for other settings."""
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


def measure_group(ranks: RankProcesses, request: BenchRequest) -> dict[str, Any]:
    """Return the advisor's answer for a model as `orch advise` gives it, and then runs of each cell in turn."""
    load = os.getloadavg()[0]
    sizes = sorted({1, *request.ranks})
    cells = cells_of(request, sizes)
    probe = probe_model(ranks, request, cells, crowded=True)
    answers = advise(cells, probe, calibrate(ranks, request.precision, sizes, probe))
    rates: dict[tuple[int, int], list[float]] = {(cell.batch, cell.ranks): [] for cell in cells}
    for _, cell in rounds(cells, request.runs):
        command = {
            "do": "measure",
            "model": request.model,
            "seed": request.seed,
            "ranks": cell.ranks,
            "batch": cell.batch,
            "steps": request.steps,
            "precision": request.precision,
            "window": _WINDOW,
        }
        seconds = max(answer["seconds"] for answer in ranks.ask(command, cell.ranks))
        rates[cell.batch, cell.ranks].append(cell.batch * request.steps / seconds)
    return {
        "model": request.model,
        "precision": request.precision,
        "load": load,
        "parameters": probe.parameters,
        "probe": {"steps": probe.steps, "seconds": probe.seconds},
        "advice": [advice_json(one, probe) for one in answers],
        "measured": [
            {"batch_size": batch, "ranks": number, "samples_per_second": found}
            for (batch, number), found in rates.items()
        ],
    }


def evaluate(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return errors of predictions, and regrets of choices: of the advisor, with and without its "I can't tell", and of the thresholds.

    ``mean_error_of_one_measurement`` and ``good_choices_of_one_measurement`` are the floor: those of one measured run of each configuration.

    ``mean_error_of_median_answers`` is the error that remains when the noise of a single answer is averaged out: the model's own error.
    """
    measured = _measured(groups)
    cells = [cell for group in groups for cell in _cells(group, measured)]
    choices = [choice for group in groups for choice in _choices(group, measured)]
    error = fmean(abs(cell["error"]) for cell in cells)
    floor = _floor(groups)
    share = _share([choice["regret"] for choice in choices])
    return {
        "distinct_cells": len({_key(cell) for cell in cells}),
        "cells": cells,
        "choices": choices,
        "mean_error": error,
        "median_error": median(abs(cell["error"]) for cell in cells),
        "mean_error_of_median_answers": fmean(_median_errors(cells)),
        "mean_spread_of_measurements": fmean(_spreads(measured)),
        "mean_error_of_one_measurement": floor.error,
        "good_choices_of_one_measurement": floor.good_choices,
        "largest_error": max(abs(cell["error"]) for cell in cells),
        "within_interval": fmean(cell["within_interval"] for cell in cells),
        "good_choices": share,
        "good_choices_that_were_certain": _share([1.0 if not c["certain"] else c["regret"] for c in choices]),
        "good_choices_of_thresholds": _share([choice["regret_of_thresholds"] for choice in choices]),
        "mean_regret": fmean(choice["regret"] for choice in choices),
        "mean_regret_of_thresholds": fmean(choice["regret_of_thresholds"] for choice in choices),
        "certain": fmean(choice["certain"] for choice in choices),
        "most_probe_steps": max(group["probe"]["steps"] for group in groups),
        "most_probe_seconds": max(group["probe"]["seconds"] for group in groups),
        "targets_met": {"mean_error": error <= TARGET_ERROR, "good_choices": share >= TARGET_SHARE},
    }


@dataclass(frozen=True, slots=True)
class Floor:
    """Error and good choices of one measured run of each configuration, in place of a prediction; None with a single round."""

    error: float | None = None
    good_choices: float | None = None


def _floor(groups: Sequence[Mapping[str, Any]]) -> Floor:
    """Compare each round's first run of each cell with the runs of the other rounds, as predictions and as choices."""
    errors, regrets = list[float](), list[float]()
    for group in groups:
        others = _measured([one for one in groups if one.get("round") != group.get("round")])
        by_batch: dict[int, list[tuple[float, float]]] = {}
        for one in group["measured"]:
            found = others.get((group["model"], group["precision"], one["batch_size"], one["ranks"]))
            if found:
                by_batch.setdefault(one["batch_size"], []).append((one["samples_per_second"][0], median(found)))
        for pairs in by_batch.values():
            errors += [abs(first / true - 1) for first, true in pairs]
            regrets.append(1 - max(pairs)[1] / max(true for _, true in pairs))
    return Floor(fmean(errors), _share(regrets)) if errors else Floor()


def _share(regrets: Sequence[float]) -> float:
    return fmean(regret <= MAX_REGRET for regret in regrets)


Key = tuple[str, str, int, int]


def _key(cell: Mapping[str, Any]) -> Key:
    return cell["model"], cell["precision"], cell["batch_size"], cell["ranks"]


def _measured(groups: Sequence[Mapping[str, Any]]) -> dict[Key, list[float]]:
    """Return the runs of each cell, over all rounds."""
    found: dict[Key, list[float]] = {}
    for group in groups:
        for one in group["measured"]:
            key = (group["model"], group["precision"], one["batch_size"], one["ranks"])
            found.setdefault(key, []).extend(one["samples_per_second"])
    return found


def _median_errors(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    by_cell: dict[Key, list[float]] = {}
    for cell in cells:
        by_cell.setdefault(_key(cell), []).append(cell["error"])
    return [abs(median(errors)) for errors in by_cell.values()]


def _spreads(measured: Mapping[Key, Sequence[float]]) -> list[float]:
    """Return the mean deviation of each cell's runs from their own median: no prediction can do better."""
    return [fmean(abs(rate / median(rates) - 1) for rate in rates) for rates in measured.values()]


def _cells(group: Mapping[str, Any], measured: Mapping[Key, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """Yield every prediction with its measurement."""
    for advice in group["advice"]:
        for one in advice["predictions"]:
            rates = measured.get((group["model"], group["precision"], advice["batch_size"], one["ranks"]))
            if not rates:
                continue
            found = median(rates)
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


def _choices(group: Mapping[str, Any], measured: Mapping[Key, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """Yield every choice of ranks with the best measured one. Regret is the share of throughput lost; all of it where no choice is made."""
    for advice in group["advice"]:
        batch = advice["batch_size"]
        by_ranks = {
            ranks: median(rates)
            for (model, precision, size, ranks), rates in measured.items()
            if (model, precision, size) == (group["model"], group["precision"], batch)
        }
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
