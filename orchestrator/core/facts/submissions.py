"""What a submission records of its surroundings: where the working directory stood in git, and which jobs must end first."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.ids import JobId  # noqa: TC001  # conformance.py reads the annotations when it runs
from orchestrator.core.states import EndCondition  # noqa: TC001


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """Where a working directory stood in git; no commit before the first. ``dirty``: its files were not those of the commit."""

    commit: str
    branch: str = ""
    dirty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prerequisite:
    """A job that must have ended as ``on`` says before another one starts: an entry of ``depends_on``, with the id that it meant."""

    job_id: JobId
    on: EndCondition
