"""Facts recorded at a submission: the working directory's git state, and the prerequisite jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from orchestrator.core.codec import Integer, Number, Record, Text
from orchestrator.core.ids import JobId
from orchestrator.core.states import EndCondition


class GitState(Record):
    """Git state of a directory; ``commit`` is empty before the first. ``dirty``: files differ from the commit."""

    commit: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{40}|[0-9a-f]{64})?\Z")]
    branch: Annotated[str, Meta(max_length=250, pattern=r"\A[^\x00-\x1f\x7f]*\Z")] = ""
    dirty: bool = False


class Prerequisite(Record):
    """A job that must end as ``on`` requires before another one starts: an entry of ``depends_on``, with its resolved id."""

    job_id: JobId
    on: EndCondition


class MatrixCell(Record):
    """The combination of a matrix that a job runs: number ``index`` of ``count``, with these values.

    A rerun has the ``index`` of the job that it runs again: the newest job of each counts. ``search``: it is a trial, and the
    values of later ones are chosen while the search runs.
    """

    matrix_id: Text
    name: Text
    index: Integer
    count: Integer
    values: Mapping[Text, bool | Integer | Number | Text]
    max_concurrent: Integer | None = None
    fail_fast: bool = False
    search: bool = False


class LeftOut(Record):
    """What a job's copy of its working directory lacks.

    Files that ignore files exclude: ``largest`` names a few; ``more``: too many to count. And what the ``links_out`` lead to:
    links to places outside, which are copied as links (``links`` names a few, with their targets).
    """

    files: Integer
    size_bytes: Integer
    by: tuple[Text, ...]
    largest: tuple[Text, ...] = ()
    more: bool = False
    links_out: Integer = 0
    links: tuple[Text, ...] = ()
