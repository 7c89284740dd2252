"""API views of matrices. Only the standard library is imported: the command line loads this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.api.view import NESTED, View


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCellView(View):
    """The matrix of a job, the job's place among the ``count`` combinations, and its values.

    ``search``: it is a trial of a search. ``pruned``: it was ended because it did worse than the other trials.
    """

    id: str
    name: str
    index: int
    count: int
    values: dict[str, Any] = field(default_factory=dict)
    search: bool = False
    pruned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationView(View):
    """One job that a matrix would make: the values of its parameters, and its name."""

    index: int
    name: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixJobView(View):
    """One combination: its newest job, how many jobs have run it, and the best value of `checkpoint.score_attribute`.

    ``best`` is over all ``runs``. ``last`` is the value that the newest job reported last. The last four fields are
    those of a trial: ``given`` has its value for each objective, or ``missing`` says why there is none; ``is_best``: no
    other is better.
    """

    index: int
    values: dict[str, Any]
    job_id: str
    name: str
    state: str
    reason: str = ""
    runs: int = 1
    best: float | None = None
    last: float | None = None
    fraction: float | None = None
    eta_seconds: float | None = None
    eta_low_seconds: float | None = None
    eta_high_seconds: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    pruned: bool = False
    given: dict[str, float] = field(default_factory=dict)
    missing: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView(View):
    """A matrix and its jobs, by combination.

    ``state``: PENDING, RUNNING or SUSPENDED; SUCCEEDED if every combination succeeded, else FAILED if one failed, else
    CANCELLED. ``counts`` are the combinations by state. ``count`` may be more than the jobs listed: `orch prune`
    removes jobs. ``eta_seconds`` is the time until the last job ends, if that is known; ``eta_low_seconds`` and
    ``eta_high_seconds`` are its bounds, with every job at its own bound.

    For a search, ``objectives`` has `min` or `max` by name; ``searching``: further trials will start; ``paused``: none
    starts until it is resumed; ``problem`` says why none starts at present. It is SUCCEEDED if every trial has
    succeeded or was pruned.
    """

    id: str
    name: str
    user: str
    uid: int
    state: str
    submitted_at: float
    count: int
    counts: dict[str, int] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    max_concurrent: int | None = None
    fail_fast: bool = False
    score_attribute: str | None = None
    score_order: str | None = None
    eta_seconds: float | None = None
    eta_low_seconds: float | None = None
    eta_high_seconds: float | None = None
    ended_at: float | None = None
    objectives: dict[str, str] = field(default_factory=dict)
    searching: bool = False
    paused: bool = False
    problem: str = ""
    jobs: tuple[MatrixJobView, ...] = ()

    @property
    def is_terminal(self) -> bool:
        """Whether every job has ended."""
        return self.state in ("SUCCEEDED", "FAILED", "CANCELLED")


NESTED[MatrixView] = {"jobs": MatrixJobView}
