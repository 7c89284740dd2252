"""The text beside a recording, `..._summary.txt`: gputop's summary, with the recording's quality."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from orchestrator.gpu.recording.rows import VENDOR_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.gpu.recording.stats import RecordStats


def summary(stats: RecordStats, started: dt.datetime) -> str:
    """Return the summary of a recording that began at `started` (local time): average, largest and smallest values per GPU.

    The duration is that between the first and the last sample, not the number of samples; readings of 0 W are
    left out.
    """
    lines = ["GPU Performance Summary", "=" * 23, ""]
    for gpu in stats.gpus.values():
        end = started + dt.timedelta(seconds=gpu.seconds)
        lines += [
            f"GPU: {gpu.info.model} (index {gpu.info.index}, {gpu.info.uuid})",
            f"Type: {VENDOR_NAMES[gpu.info.vendor]}",
            f"Duration: {gpu.seconds:.1f} s",
            f"Start: {started.isoformat(timespec='seconds')}",
            f"End: {end.isoformat(timespec='seconds')}",
        ]
        for name, values in gpu.ranges.items():
            lines.append(f"{name}: average {values.mean:.1f}, max {values.high:.1f}, min {values.low:.1f}")
        if not gpu.ranges:
            lines.append("no values: this GPU did not answer")
        lines.append("")
    return "\n".join([*lines, "Recording", "-" * 9, stats.text(), ""])


def write_summary(stats: RecordStats, recording: Path, started: dt.datetime) -> Path:
    """Write the summary beside the file `recording`; returns its path. Raises OSError when it cannot be written."""
    path = recording.with_name(f"{recording.stem}_summary.txt")
    path.write_text(summary(stats, started), encoding="utf-8")
    return path
