"""The histories that were run so far, in parts: a million faults take more than one session, and each part names the commit that it ran."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from benchmarks import measure

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulation.campaign import Report


@dataclass(slots=True)
class Part:
    """The histories of the seeds from ``first`` on, run by one process tree of one commit; ``failed`` has the failures by seed."""

    first: int
    commit: str
    date: str
    machine: dict[str, Any]
    histories: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, first: int) -> Part:
        """Return a part without a history."""
        return cls(first, measure.commit(), time.strftime("%Y-%m-%d"), measure.machine())

    def add(self, report: Report) -> None:
        """Add the next histories. ``seconds`` are those of the processes, added up."""
        self.histories += report.histories
        self.steps += report.steps
        self.seconds = round(self.seconds + report.seconds, 1)
        self.faults += report.faults
        for outcome in report.failed:
            self.failed[str(outcome.history.seed)] = outcome.failure[:2000]


class Results:
    """The parts in ``path``, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else []
        self.parts = [Part(**{**part, "faults": Counter(part["faults"])}) for part in found]

    @property
    def next_seed(self) -> int:
        """First seed after all parts."""
        return max((part.first + part.histories for part in self.parts), default=0)

    @property
    def faults(self) -> Counter[str]:
        """Number of injected faults of each kind."""
        return sum((part.faults for part in self.parts), Counter())

    def write(self) -> None:
        """Replace the file atomically: the campaign may be killed at any moment."""
        kinds = self.faults
        whole = {
            "histories": sum(part.histories for part in self.parts),
            "steps": sum(part.steps for part in self.parts),
            "faults": kinds.total(),
            "kinds": dict(kinds.most_common()),
            "failed": sum(len(part.failed) for part in self.parts),
            "parts": [{each.name: getattr(part, each.name) for each in fields(Part)} for part in self.parts],
        }
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self._path)
