"""Facts recorded at a submission: the working directory's git state, and the prerequisite jobs."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  # conformance.py reads the annotations when it runs
from dataclasses import dataclass

from orchestrator.core.ids import JobId  # noqa: TC001  # conformance.py reads the annotations when it runs
from orchestrator.core.states import EndCondition  # noqa: TC001


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """Git state of a directory; ``commit`` is empty before the first. ``dirty``: files differ from the commit."""

    commit: str
    branch: str = ""
    dirty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prerequisite:
    """A job that must end as ``on`` requires before another one starts: an entry of ``depends_on``, with its resolved id."""

    job_id: JobId
    on: EndCondition


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """The combination of a matrix that a job runs: number ``index`` of ``count``, with these values.

    A rerun has the ``index`` of the job that it runs again: the newest job of each counts. ``search``: it is a trial, and the
    values of later ones are chosen while the search runs.
    """

    matrix_id: str
    name: str
    index: int
    count: int
    values: Mapping[str, bool | int | float | str]
    max_concurrent: int | None = None
    fail_fast: bool = False
    search: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What a job's copy of its working directory lacks.

    Files that ignore files exclude: ``largest`` names a few; ``more``: too many to count. And what the ``links_out`` lead to:
    links to places outside, which are copied as links (``links`` names a few, with their targets).
    """

    files: int
    size_bytes: int
    by: tuple[str, ...]
    largest: tuple[str, ...] = ()
    more: bool = False
    links_out: int = 0
    links: tuple[str, ...] = ()
