"""Reads the kernel's evidence about a rank's death: memory use, memory kills, and Xid events in the kernel's log.

Decides nothing: ``core.diagnosis.signatures`` determines whether a fact explains the end. A machine where a file is
unreadable (kernel.dmesg_restrict, a container without its control group) gives less evidence, never an error.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.core.events import MemoryUse
from orchestrator.core.facts.gpus import Xid
from orchestrator.core.facts.memory import KernelMessage, OomCount, OomKill
from orchestrator.core.states import OutOf

if TYPE_CHECKING:
    from orchestrator.runtime.spawn.lifeline import MemoryUsed

_KMSG: Final = Path("/dev/kmsg")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")
_AT_LIMIT: Final = 0.98  # the kernel charges memory in batches of pages
_RECORD_BYTES: Final = 8192
_MOST_RECORDS: Final = 20_000  # a buffer written faster than it is read would never end
RECENT_SECONDS: Final = 15.0
_XID: Final = re.compile(r"\bXid(?: \((?:PCI:)?(?P<bus>[\w:.]+)\):)? (?P<number>\d{1,5})\b")
_OOM: Final = re.compile(r"[Oo]ut of memory: Killed process \d+(?: \((?P<process>[^)]*)\))?")
_OUR_PID: Final = r"(?:Killed process {pid}\b|\bpid='?{pid}\b)"


def memory_use(used: MemoryUsed | None, *, machine: bool) -> MemoryUse | None:
    """Return what a rank used. With ``machine``, the kernel has just killed some process of the machine for memory.

    A group's count of kills includes processes for which the machine, or a group above it, had no memory left.
    """
    if used is None:
        return None
    at_limit = used.limit_bytes is not None and (used.peak_bytes or 0) >= used.limit_bytes * _AT_LIMIT
    killed = OutOf.LIMIT if used.kills and at_limit else OutOf.MACHINE if used.kills or machine else None
    # The limit counts the group's own pages; a process's size also includes pages shared with the fork server.
    counted = used.peak_bytes if killed is OutOf.LIMIT else None
    return MemoryUse(
        used_bytes=counted or max(used.peak_bytes or 0, used.max_rss_bytes),
        limit_bytes=used.limit_bytes,
        killed=killed,
    )


class MachineWatch:
    """Counts the memory kills of the whole machine, which any user may read. Call ``mark`` now and then.

    A kill counts when it happened since the mark before the last, as with ``OomWatch``.
    """

    def __init__(self, *, source: Path = _VMSTAT) -> None:
        self._source = source
        self._older = self._newer = self._count()

    def mark(self) -> None:
        """Remember the present count."""
        self._older, self._newer = self._newer, self._count()

    def killed(self) -> bool:
        """Whether the kernel has killed a process of this machine for memory since the mark before the last."""
        count = self._count()
        return count is not None and self._older is not None and count > self._older

    def _count(self) -> int | None:
        try:
            found = re.search(r"^oom_kill (\d+)$", self._source.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) if found else None


class OomWatch:
    """Counts memory kills in the control group of a process. Call ``mark`` now and then; ``killed`` returns the new ones.

    The count belongs to the whole group, so only the last moments count: since the mark before the last.
    """

    def __init__(self, pid: int, *, root: Path = _CGROUPS) -> None:
        self._pid = pid
        self._root = root
        self._file = _counter_file(pid, root)
        self._older = self._newer = self._count()

    def mark(self) -> None:
        """Remember the present count; follow a process that was moved to another group."""
        file = _counter_file(self._pid, self._root)
        if file is not None and file != self._file:
            self._file = file
            self._older = self._newer = self._count()
            return
        self._older, self._newer = self._newer, self._count()

    def killed(self) -> OomCount | None:
        """Return how far the count has risen since the mark before the last, when the group lost a process to a memory kill."""
        count = self._count()
        if count is None or self._older is None or count <= self._older:
            return None
        return OomCount(path=str(self._file), before=self._older, count=count)

    def _count(self) -> int | None:
        if self._file is None:
            return None
        try:
            found = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) if found else None


def _counter_file(pid: int, root: Path) -> Path | None:
    """Return the file with the memory kills of the process's group: ``memory.events`` (v2) or ``memory.oom_control``."""
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


class KernelWatch:
    """Reads what the kernel has logged about a process in its last moments, and little else.

    The log of a machine that has run for long holds thousands of records; reading all of them would delay a recovery.
    So two positions in it are kept, the older at most twice ``RECENT_SECONDS`` back; ``mark`` now and then moves them
    forward. Create it before the process starts: one that dies at once is in the log before its start is known.
    """

    def __init__(self, *, source: Path = _KMSG) -> None:
        self._places = _opened(source)
        """Two handles of the log, at the older and the newer position; None where it is unreadable."""
        self._moved = _now()

    def mark(self, now: float | None = None) -> None:
        """Move the positions forward; ``now`` is seconds since the boot."""
        now = _now() if now is None else now
        if now - self._moved >= RECENT_SECONDS and self._places is not None:
            older, newer = self._places
            os.lseek(older, 0, os.SEEK_END)
            self._places = (newer, older)
            self._moved = now

    def facts(self, pid: int, now: float | None = None) -> tuple[OomKill | Xid | KernelMessage, ...]:
        """Return the facts about the process in the log of the last ``RECENT_SECONDS``."""
        mine = re.compile(_OUR_PID.format(pid=pid))
        since = (_now() if now is None else now) - RECENT_SECONDS
        records = [] if self._places is None else _records(self._places[0])
        return tuple(_fact_of(pid, text) for at, text in records if at >= since and mine.search(text))

    @property
    def readable(self) -> bool:
        """Whether the kernel's log is readable here."""
        return self._places is not None

    def close(self) -> None:
        """Close the log. Idempotent."""
        for handle in self._places or ():
            os.close(handle)
        self._places = None


def _fact_of(pid: int, text: str) -> OomKill | Xid | KernelMessage:
    """Return the fact in one line of the log about the process that it names."""
    if found := _XID.search(text):
        return Xid(number=int(found["number"]), bus_id=found["bus"] or "", said=text)
    if found := _OOM.search(text):
        return OomKill(pid=pid, process=found["process"] or "", said=f"kernel: {text}")
    return KernelMessage(said=text)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _opened(source: Path) -> tuple[int, int] | None:
    """Open the log twice, after its last record; None where it is unreadable."""
    handles: list[int] = []
    try:
        for _ in range(2):
            handles.append(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            os.lseek(handles[-1], 0, os.SEEK_END)
    except OSError:
        for handle in handles:
            os.close(handle)
        return None
    return handles[0], handles[1]


def _records(handle: int) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for _ in range(_MOST_RECORDS):
        try:
            data = os.read(handle, _RECORD_BYTES)
        except BrokenPipeError:  # records were overwritten meanwhile; the next read continues after them
            continue
        except OSError:  # no more records
            break
        if not data:
            break
        found += _parsed(data)
    return found


def _parsed(data: bytes) -> list[tuple[float, str]]:
    """Parse records into (seconds since the boot, text); the device gives one a read, a file any number."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        head, _, text = line.partition(";")
        fields = head.split(",")
        if text and len(fields) >= 3 and fields[2].isdigit():
            found.append((int(fields[2]) / 1e6, text))
    return found
