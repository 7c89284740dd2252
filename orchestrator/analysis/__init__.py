"""Reports, plots, A/B comparison, time estimates: on files alone, without a daemon.

Begin with ``runs.py``, which reads every file into one form. Must not import Ray, nor a driver.
"""

from __future__ import annotations

from typing import Final

REPORT: Final = "report"
"""The directory, in a job's own, of the report that is written after its end."""
PAGE: Final = "report.html"
FIGURES: Final = "report.json"
