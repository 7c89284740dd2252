"""Samples a rank's processes by a few reads of /proc a second: processor time, memory, the training thread's wait.

This is the evidence about scripts that report nothing. A failed sample is skipped.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.observation import ProcessSeen
from orchestrator.gpu.proc import Sleep, in_process_group, sleeps_in
from orchestrator.runtime.ranks.evidence.process_inspector import process_tree

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_SECONDS: Final = 0.9
REPORT_SECONDS: Final = 5.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessWatch:
    """Samples of a rank: ``newest`` is the last reported, ``number`` its number. ``clock`` gives monotonic seconds."""

    def __init__(self, *, procfs: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = procfs
        self._clock = clock
        self.number = 0
        self.newest: ProcessSeen | None = None
        self.begin()

    def begin(self) -> None:
        """Prepare for a new process."""
        self.newest = None
        self._seen = ProcessSeen(at=0.0)
        self._grouped_pid = 0
        self._looked_at = self._reported_at = self._clock() - REPORT_SECONDS

    def look(self, root_pid: int, training_pid: int | None) -> None:
        """Sample the training thread, and less often all processes of the rank, when due."""
        now = self._clock()
        if not root_pid or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        pid = training_pid or root_pid
        fields = _stat(self._proc, pid)
        if fields is None:
            return
        sleep = sleeps_in(pid, self._proc) if fields[0] == "S" else None
        locked, asleep = sleep is Sleep.LOCK, fields[0] == "D" or sleep is Sleep.OUTSIDE
        seen = self._seen
        self._seen = replace(seen, looks=seen.looks + 1, asleep=seen.asleep + asleep, locked=seen.locked + locked)
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._publish(root_pid, pid, now)

    def _publish(self, root_pid: int, pid: int, now: float) -> None:
        cpu, pages = 0, 0
        for process in process_tree(root_pid, self._proc):
            fields = _stat(self._proc, process)
            if fields is not None:
                cpu += sum(map(int, fields[11:15]))
                pages += int(fields[21])
        self._seen = replace(
            self._seen,
            at=now,
            cpu_seconds=cpu / _TICKS,
            resident_bytes=pages * _PAGE_BYTES,
            available_bytes=_available(self._proc),
            grouped=(self._seen.grouped and pid == self._grouped_pid) or in_process_group(pid, self._proc),
        )
        self._grouped_pid = pid  # a process does not leave its group: forty threads need not be read again
        self.newest = self._seen
        self.number += 1


def _stat(proc: Path, pid: int) -> list[str] | None:
    """Return the fields of the process from its state on; None when it has ended."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  # a Path costs more than the read
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 21 and fields[0] not in ("Z", "X") else None


def _available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found is not None and found.isdigit() else None
