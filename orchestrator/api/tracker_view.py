"""What the API answers about a job's experiment trackers. Only the standard library is imported: the command line loads this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerView(View):
    """A job in one experiment tracker: ``points`` were read of its records, ``waiting`` of them are not safe there yet.

    ``where`` says where to look at the run, ``facts`` the same for programs, ``problem`` what went wrong last.
    """

    name: str
    where: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    points: int = 0
    waiting: int = 0
    problem: str = ""
    finished: bool = False
    updated_at: float | None = None
