"""Findings on the boards: the table at the top, and what it says of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import words
from dashboards.widgets import Query, Section, table, text_variable

if TYPE_CHECKING:
    from grafanalib import core as g

DOCS = "docs"
"""The board variable with the address of the documentation; `orch dashboards --docs-url` fills it in."""


def _table(expr: str) -> g.Panel:
    return table(
        "Findings",
        "What diagnosis found wrong and is open now. Figures and remedy: orch status JOB; a finding links to its section of the documentation, at the address in Documentation.",
        Query(expr=expr),
        missing=words.NO_FINDINGS,
        columns={"kind": "Finding", "job_id": "Job", "rank": "Rank", "gpu_uuid": "GPU", "node": "Node"},
        height=5,
    )


def findings(expr: str) -> Section:
    """The first section of a board; `expr` is the open findings of what the board has chosen."""
    return Section(title="Findings", panels=(_table(expr),))


def docs_variable() -> g.Template:
    """Where the documentation is, for links to it."""
    return text_variable(DOCS, "Documentation", "")
