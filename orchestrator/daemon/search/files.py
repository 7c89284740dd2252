"""The files of searches, below ``searches`` in the home: their plans, and the results of their trials.

    searches/ID/plan.json    the plan of further trials, written before the first trial is accepted
    searches/ID/secrets      values of the jobs' secrets, mode 0600, removed when the search is over
    searches/ID/study.json   the results of the trials, whether the search is over or paused, and what is wrong

The trials themselves are jobs in the store. ``study.json`` can be remade from them, but not ``paused``, nor ``over`` after a cancel.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.durable_files import sync_directory, write_whole
from orchestrator.private_files import make_private
from orchestrator.spec.search import objectives_of, prunes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from orchestrator.api.requests import SubmitRequest
    from orchestrator.daemon.submitting.checking import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A search as it was submitted: its file, the space in the form of ``analysis.search``, and its limits."""

    matrix_id: str
    name: str
    yaml: str
    source: str
    overrides: tuple[str, ...]
    passed: Mapping[str, str]
    space: Mapping[str, Any]
    trials: int
    max_concurrent: int
    fail_fast: bool

    @property
    def objectives(self) -> dict[str, str]:
        """The metrics to optimize: `min` or `max` by name."""
        return dict(self.space["objectives"])


def plan_of(request: SubmitRequest, first: Checked) -> SearchPlan | None:
    """Return the search that a submission requests; ``first`` is its first trial. None for any other."""
    matrix, cell = first.search, first.cell
    if matrix is None or cell is None:
        return None
    objectives = dict(objectives_of(matrix, first.spec.checkpoint))
    return SearchPlan(
        matrix_id=cell.matrix_id,
        name=cell.name,
        yaml=request.yaml,
        source=request.source,
        overrides=request.overrides,
        passed=dict(request.passed),
        space={
            "name": cell.matrix_id,
            "objectives": objectives,
            "parameters": {name: list(values) for name, values in matrix.parameters.items()},
            "ranges": {
                name: {"low": bounds.low, "high": bounds.high, "log": bounds.log}
                for name, bounds in matrix.ranges.items()
            },
            "prunes": prunes(matrix, objectives),
            "warmup_steps": matrix.warmup_steps,
        },
        trials=cell.count,
        max_concurrent=cell.max_concurrent or 1,
        fail_fast=cell.fail_fast,
    )


PLAN: Final = "plan.json"
SECRETS: Final = "secrets"
STUDY: Final = "study.json"
_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """Results of the trials, by number; what is missing of some; whether no further trial is submitted, or none at present."""

    given: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    over: bool = False
    problem: str = ""
    paused: bool = False


class SearchFiles:
    """Reads and writes the files. Blocking: for threads, and for tests."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "searches"

    def keep(self, plan: SearchPlan, secrets: Mapping[str, str]) -> None:
        """Write a new search, durably. Raises OSError."""
        folder = make_private(self._of(plan.matrix_id))
        if secrets:
            write_whole(folder / SECRETS, json.dumps(dict(secrets)).encode())
        write_whole(folder / PLAN, json.dumps(asdict(plan)).encode())
        sync_directory(folder.parent)

    def plan(self, matrix_id: str) -> SearchPlan | None:
        """Return the plan of a search; None where the matrix is no search, or its file is damaged."""
        try:
            body = json.loads((self._of(matrix_id) / PLAN).read_bytes())
            return SearchPlan(**{**body, "overrides": tuple(body["overrides"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def secrets(self, matrix_id: str) -> dict[str, str]:
        """Return the secrets of its jobs."""
        try:
            values: dict[str, str] = json.loads((self._of(matrix_id) / SECRETS).read_bytes())
        except FileNotFoundError:
            return {}
        return values

    def study(self, matrix_id: str) -> StudyRecord:
        """Return the results of its trials; an empty record where none can be read."""
        try:
            body = json.loads((self._of(matrix_id) / STUDY).read_bytes())
            return StudyRecord(
                given={int(number): tuple(map(float, values)) for number, values in body["given"].items()},
                missing={int(number): str(text) for number, text in body["missing"].items()},
                over=bool(body["over"]),
                problem=str(body["problem"]),
                paused=bool(body.get("paused", False)),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return StudyRecord()

    def note(self, matrix_id: str, study: StudyRecord) -> None:
        """Write the results of its trials, and remove the secrets of a search that is over. Raises OSError."""
        folder = self._of(matrix_id)
        write_whole(folder / STUDY, json.dumps(asdict(study)).encode())
        if study.over:
            (folder / SECRETS).unlink(missing_ok=True)

    def ids(self) -> list[str]:
        """Return the ids of all searches."""
        try:
            return sorted(path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name))
        except FileNotFoundError:
            return []

    def remove(self, matrix_id: str) -> None:
        """Forget a search."""
        trees.remove(self._of(matrix_id))

    def _of(self, matrix_id: str) -> Path:
        if not _ID.fullmatch(matrix_id):
            raise ValueError(f"not a matrix's id: {matrix_id!r}")
        return self._folder / matrix_id
