"""The runs of a benchmark, round by round: each cell once a round, on ranks that are started once, and after a failure."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.bench.errors import RankError
from orchestrator.bench.gpu_watch import GpuWatch
from orchestrator.bench.plan import name_of, rounds
from orchestrator.bench.processes import RankProcesses
from orchestrator.bench.results import CellResult, run_of
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.bench.plan import BenchRequest, Cell
    from orchestrator.gpu.sample import GpuReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The ranks' device, torch's description of it, the model's parameters, readers of the GPUs in the ranks' order."""

    device: str
    torch_sees: Mapping[str, Any]
    parameters: int
    readers: tuple[GpuReader, ...] = ()


class Rounds:
    """The runs of all cells, round by round."""

    def __init__(
        self, request: BenchRequest, machine: Machine, cells: Sequence[Cell], logs: Path, environ: Mapping[str, str]
    ) -> None:
        self._request = request
        self._machine = machine
        self._results = {cell: CellResult(cell=cell) for cell in cells}
        self._logs = logs
        self._environ = environ
        self._ranks: RankProcesses | None = None

    def all(self, note: Callable[[str], None]) -> tuple[CellResult, ...]:
        """Make every run; return the results in the order of the cells."""
        began, reported = time.monotonic(), -1
        try:
            for number, cell in rounds(tuple(self._results), self._request.runs):
                if number != reported and number:
                    left = (time.monotonic() - began) / number * (self._request.runs - number)
                    note(f"round {number} of {self._request.runs} done, about {left:.0f}s left")
                reported = number
                if not self._results[cell].error:
                    self._one(number, cell, note)
        finally:
            self._close()
        return tuple(self._results.values())

    def _one(self, number: int, cell: Cell, note: Callable[[str], None]) -> None:
        result, request = self._results[cell], self._request
        command = {
            "do": "measure",
            "model": cell.model or request.model,
            "seed": request.seed,
            "ranks": cell.ranks,
            "batch": cell.batch,
            "steps": request.steps,
            "precision": cell.precision or request.precision,
            "accumulate": cell.accumulate,
            "gpus": cell.gpus,
        }
        try:
            ranks = self._joined()
            with GpuWatch(self._machine.readers[: cell.gpus or cell.ranks]) as watch:
                answers = ranks.ask(command, cell.ranks)
        except RankError as error:
            self._close()
            self._results[cell] = replace(result, error=error.message)
            note(f"{plural(cell.ranks, 'rank')}, global batch {cell.batch}: {error.message}")
            return
        self._log(number, cell, answers)
        run = run_of(number, cell, answers, request.steps, watch.use())
        self._results[cell] = replace(result, runs=(*result.runs, run))

    def _joined(self) -> RankProcesses:
        """Return the ranks, started again if one has failed."""
        if self._ranks is None:
            sizes = sorted({cell.ranks for cell in self._results})
            self._ranks = RankProcesses(self._logs, self._environ)
            self._ranks.start(sizes[-1])
            self._ranks.join(sizes, self._machine.device)
            if self._request.memory_limit_bytes is not None:
                self._ranks.ask({"do": "limit_memory", "limit_bytes": self._request.memory_limit_bytes}, sizes[-1])
        return self._ranks

    def _close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _log(self, number: int, cell: Cell, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write all measurements of the ranks in a run, including every step's time, to a file."""
        path = self._logs / f"{name_of(cell.model) or self._request.model_name}_{cell.name}_run{number:03}.json"
        path.write_text(json.dumps({"run": number, "batch_size": cell.batch, "ranks": list(answers)}) + "\n")
