"""Advises one search in its own process: ``python -m orchestrator.analysis.search.process``.

The first line of its input describes the space, each further one all trials so far; each answer is one line. Jobs wrote the records that
it reads, and Optuna takes a second to import: neither belongs in the daemon. It ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.search.records import objectives_given, reported_by_step
from orchestrator.analysis.search.study import Range, Space, Trial, advise

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO


@dataclass(slots=True)
class Reader:
    """Reads the records of trials: once for an ended one, and whenever its file has grown for a running one."""

    space: Space
    ended: dict[tuple[str, str], tuple[Trial, str]] = field(default_factory=dict)
    growing: dict[str, tuple[tuple[int, int], dict[int, float]]] = field(default_factory=dict)

    def trial(self, record: Mapping[str, Any]) -> tuple[Trial, str]:
        """Return a trial with its results, and a text about a missing result of an ended one."""
        key = (record["directory"], record["state"])
        if key in self.ended:
            return self.ended[key]
        directory = Path(record["directory"])
        reported: dict[int, float] = {}
        if self.space.prunes and record["state"] in ("running", "complete", "pruned"):
            reported = self._reported(directory, running=record["state"] == "running")
        given, missing = None, ""
        if record["state"] == "complete":
            given, missing = objectives_given(directory, self.space.objectives)
        trial = Trial(
            number=record["number"], state=record["state"], values=record["values"], objectives=given, reported=reported
        )
        if trial.state != "running":
            self.growing.pop(record["directory"], None)
            self.ended[key] = trial, missing
        return trial, missing

    def _reported(self, directory: Path, *, running: bool) -> dict[int, float]:
        try:
            status = (directory / "metrics.jsonl").stat()
        except OSError:
            return {}
        size = (status.st_ino, status.st_size)
        ((name, order),) = self.space.objectives.items()  # with several, nothing is pruned
        if not running:
            return reported_by_step(directory, name, order, running=False)
        known = self.growing.get(str(directory))
        if known is None or known[0] != size:
            known = size, reported_by_step(directory, name, order, running=True)
            self.growing[str(directory)] = known
        return known[1]


def answer(reader: Reader, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one line: values to try, trials to end, and the results of each ended trial."""
    read = [reader.trial(record) for record in question["trials"]]
    trials = [trial for trial, _ in read]
    advice = advise(reader.space, trials, question["want"])
    return {
        "suggested": [dict(values) for values in advice.suggested],
        "pruned": [asdict(one) for one in advice.pruned],
        "given": {str(trial.number): trial.objectives for trial in trials if trial.objectives is not None},
        "missing": {str(trial.number): missing for trial, missing in read if missing},
    }


def space_of(fields: Mapping[str, Any]) -> Space:
    """Return the space that the first line describes."""
    ranges = {name: Range(**bounds) for name, bounds in fields["ranges"].items()}
    return Space(**{**fields, "ranges": ranges})


def main(lines: TextIO, out: TextIO) -> int:
    """Answer until the input ends."""
    reader = Reader(space_of(json.loads(lines.readline())))
    for line in lines:
        out.write(json.dumps(answer(reader, json.loads(line))) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main(sys.stdin, sys.stdout))
