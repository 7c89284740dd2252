"""What the API answers about matrices. Only the standard library is imported: the command line loads this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.api.view import NESTED, View


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCellView(View):
    """The matrix that a job is of, its place among the ``count`` combinations, and its values.

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

    ``best`` is over all ``runs``. ``last`` is what the newest job reported last. ``pruned`` and ``given`` are those of a trial: what it
    has given for each objective, or ``missing`` says why nothing; ``is_best``: no other trial beats it.
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

    ``state``: PENDING, RUNNING or SUSPENDED; SUCCEEDED when every combination has, else FAILED when one has, else CANCELLED.
    ``counts`` are the combinations by state. ``count`` may be more than the jobs listed: `orch prune` forgets jobs. ``eta_seconds`` is until the last job ends, where that is known,
    and ``eta_low_seconds`` and ``eta_high_seconds`` are its bounds: with every job at its own.

    Of a search, ``objectives`` has `min` or `max` by name, ``searching`` tells whether further trials come, ``paused`` that none does until it is
    resumed, ``problem`` why none comes at present. It has SUCCEEDED when every trial has, or was pruned.
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
        """Every job has ended."""
        return self.state in ("SUCCEEDED", "FAILED", "CANCELLED")


NESTED[MatrixView] = {"jobs": MatrixJobView}
