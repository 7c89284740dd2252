"""The trials of a search as files: ``trials.csv``, ``search.json``, and charts."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.matrices.trial_plots import write_front, write_history
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.matrices.trials import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The trials of a search in order, and its objectives: `min` or `max` by name."""

    objectives: Mapping[str, str]
    trials: Sequence[TrialResult]

    def files(self) -> dict[str, Callable[[Path], None]]:
        """Return the function that writes each file, by the file's name."""
        return {"trials.csv": self._write_csv, "search.json": self._write_json}

    def charts(self) -> dict[str, Callable[[Path], Path]]:
        """Return the function that draws each chart, by name: ``objective_`` and the objective, or ``pareto_front``."""
        found: dict[str, Callable[[Path], Path]] = {}
        if len(self.objectives) > 1:
            found["pareto_front"] = partial(write_front, self.trials, self.objectives)
        for name, order in self.objectives.items():
            found[f"objective_{name}"] = partial(write_history, self.trials, name, order)
        return found

    def text(self) -> str:
        """Return a line for each best trial, and one with the numbers of trials."""
        best = [trial for trial in self.trials if trial.is_best]
        lines = []
        for trial in sorted(best, key=lambda trial: next(iter(trial.given.values()))):
            given = ", ".join(f"{name}={number(value, 6)}" for name, value in trial.given.items())
            values = ", ".join(f"{name}={value}" for name, value in trial.values.items())
            lines.append(f"best trial {trial.number} ({trial.job_id}): {given} with {values}")
        pruned = sum(trial.pruned for trial in self.trials)
        lines.append(f"trials: {len(self.trials)}, of which pruned: {pruned}")
        return "\n".join(lines) + "\n"

    def _write_json(self, target: Path) -> None:
        body = {"objectives": dict(self.objectives), "trials": [asdict(trial) for trial in self.trials]}
        target.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    def _write_csv(self, target: Path) -> None:
        parameters = list(dict.fromkeys(name for trial in self.trials for name in trial.values))
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", "job", "state", *parameters, *self.objectives, "best"])
            for trial in self.trials:
                values = [as_cell(trial.values.get(name, "")) for name in parameters]
                given = [trial.given.get(name, "") for name in self.objectives]
                state = "PRUNED" if trial.pruned else trial.state
                writer.writerow([trial.number, trial.job_id, state, *values, *given, int(trial.is_best)])


def as_cell(value: Any) -> Any:
    """Return the value; text that a spreadsheet would take for a formula is quoted."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@" else value
