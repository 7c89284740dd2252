"""Writes the table of metrics in docs/monitoring.md from the catalogue: `python -m orchestrator.gpu.exporter.metrics_doc FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from orchestrator.catalogue import METRICS, Metric

BEGIN: Final = "<!-- metrics: generated from orchestrator/catalogue.py, do not edit -->"
END: Final = "<!-- end of metrics -->"
_OWNERS: Final = (
    ("gpu", "GPUs, from each GPU's exporter"),
    ("job", "Jobs with a live attempt, and for 15 minutes after, from the daemon"),
    ("totals", "Queues and totals, from the daemon"),
    ("daemon", "The daemon about itself"),
)


def table() -> str:
    """Return all metrics as Markdown, a section per owner."""
    lines: list[str] = []
    for owner, title in _OWNERS:
        lines += [f"### {title}", "", "| Metric | Type | Unit | What it says |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS if metric.owner == owner]
        lines.append("")
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"| `{metric.name}{labels}` | {metric.type} | {metric.unit or '–'} | {metric.help} |"


def with_table(document: str) -> str:
    """Return the document with its table renewed. Raises ValueError where the marks that enclose it are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}{END}{after}"


def main() -> None:
    """Renew the table in the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
