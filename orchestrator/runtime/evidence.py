"""What the kernel says about a rank's death: memory kills of its control group, and lines of the kernel's log.

Reads files and decides nothing: each piece is one line that ``core.signatures`` looks at. A machine where a file cannot
be read (kernel.dmesg_restrict, a container without its control group) gives less evidence, never an error.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

_KMSG: Final = Path("/dev/kmsg")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_RECORD_BYTES: Final = 8192
_MOST_RECORDS: Final = 20_000  # a buffer that is written faster than it is read would never end
RECENT_SECONDS: Final = 15.0
_OUR_PID: Final = r"(?:Killed process {pid}\b|\bpid='?{pid}\b)"


class OomWatch:
    """Counts memory kills in the control group of a process. ``mark`` now and then; ``killed`` asks what came since.

    The count belongs to the whole group, so only what came in the last moments counts: since the mark before the last.
    """

    def __init__(self, pid: int, *, root: Path = _CGROUPS) -> None:
        self._pid = pid
        self._root = root
        self._file = _counter_file(pid, root)
        self._older = self._newer = self._count()

    def mark(self) -> None:
        """Remember the count as it is now; a process that was moved to another group is followed."""
        file = _counter_file(self._pid, self._root)
        if file is not None and file != self._file:
            self._file = file
            self._older = self._newer = self._count()
            return
        self._older, self._newer = self._newer, self._count()

    def killed(self) -> str:
        """One line when the group lost a process to a memory kill since the mark before the last; else empty."""
        count = self._count()
        if count is None or self._older is None or count <= self._older:
            return ""
        return f"cgroup: oom_kill rose from {self._older} to {count} in {self._file}"

    def _count(self) -> int | None:
        if self._file is None:
            return None
        try:
            found = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) if found else None


def _counter_file(pid: int, root: Path) -> Path | None:
    """The file with the count of memory kills of the process's group: ``memory.events`` (v2) or ``memory.oom_control``."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if "memory" in controllers.split(","):
            candidates = [root / "memory" / below / "memory.oom_control", root / "memory" / "memory.oom_control"]
        elif not controllers:
            candidates = [root / below / "memory.events", root / "memory.events"]
        else:
            continue
        for file in candidates:
            if file.is_file():
                return file
    return None


def kernel_lines(pid: int, *, source: Path = _KMSG, now: float | None = None) -> tuple[str, ...]:
    """Lines of the kernel's log of the last moments that name the process; ``now`` is seconds since the boot."""
    since = (time.clock_gettime(time.CLOCK_MONOTONIC) if now is None else now) - RECENT_SECONDS
    mine = re.compile(_OUR_PID.format(pid=pid))
    return tuple(f"kernel: {text}" for at, text in _records(source) if at >= since and mine.search(text))


def _records(source: Path) -> list[tuple[float, str]]:
    try:
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[tuple[float, str]] = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                data = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten meanwhile; the next read goes on behind them
                continue
            except OSError:  # nothing more
                break
            if not data:
                break
            found += _parsed(data)
    finally:
        os.close(handle)
    return found


def _parsed(data: bytes) -> list[tuple[float, str]]:
    """Records as (seconds since the boot, text); the device gives one a read, a file any number."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        head, _, text = line.partition(";")
        fields = head.split(",")
        if text and len(fields) >= 3 and fields[2].isdigit():
            found.append((int(fields[2]) / 1e6, text))
    return found
