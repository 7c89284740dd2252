"""Names of a report's files."""

from __future__ import annotations

from typing import Final

REPORT: Final = "report"
"""The directory, in a job's own, of the report that is written after its end."""
PAGE: Final = "report.html"
FIGURES: Final = "report.json"
