"""Findings on the boards: the table at the top, and the variable for its links to the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import words
from dashboards.widgets import Query, Section, table, text_variable

if TYPE_CHECKING:
    from grafanalib import core as g

DOCS = "docs"
"""Name of the board variable with the address of the documentation; `orch dashboards --docs-url` sets it."""


def _table(expr: str) -> g.Panel:
    return table(
        "Findings",
        "Open findings of the diagnosis. For figures and remedies: orch status JOB. A finding links to its section of the documentation, at the address in Documentation.",
        Query(expr=expr),
        missing=words.NO_FINDINGS,
        columns={"kind": "Finding", "job_id": "Job", "rank": "Rank", "gpu_uuid": "GPU", "node": "Node"},
        height=5,
    )


def findings(expr: str) -> Section:
    """Return the first section of a board; `expr` selects the open findings of the jobs chosen on it."""
    return Section(title="Findings", panels=(_table(expr),))


def docs_variable() -> g.Template:
    """Return the variable with the address of the documentation, for links to it."""
    return text_variable(DOCS, "Documentation", "")
