"""Evidence about the end of a rank from outside: its keeper's record, the kernel's counts and log, the holder of a port.

Decides nothing: ``core.diagnosis.evidence`` determines whether a fact explains the end. A machine where a file is
unreadable (kernel.dmesg_restrict, a container without its control group) gives less evidence, never an error. A keeper's
record is in a directory that ranks can write to: types and ranges are checked, and invalid values count as unknown.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.diagnosis.signatures import taken_port
from orchestrator.core.events import MemoryUse
from orchestrator.core.facts.faults import KernelMessage, OomCount, OomKill, PortTaken, Xid
from orchestrator.core.states import EndOrder, OutOf, StopScope
from orchestrator.runtime.ranks.process_inspector import ProcessWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.core.events import Exit
    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.spawn.client import Ending, Exited, ExitRecord, MemoryUsed
    from orchestrator.train.script.progress_reading import ProgressSnapshot

SHUTDOWN_SECONDS: Final = 300.0
"""Longest wait of a machine that shuts down, from SIGTERM on: systemd's limit is 90 s, unless a unit sets another."""


_KMSG: Final = Path("/dev/kmsg")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")
_AT_LIMIT: Final = 0.98  # the kernel charges memory in batches of pages
_RECORD_BYTES: Final = 8192
_MAX_RECORDS: Final = 20_000  # a buffer written faster than it is read would never end
RECENT_SECONDS: Final = 15.0
_XID: Final = re.compile(r"\bXid(?: \((?:PCI:)?(?P<bus>[\w:.]+)\):)? (?P<number>\d{1,5})\b")
_OOM: Final = re.compile(r"[Oo]ut of memory: Killed process \d+(?: \((?P<process>[^)]*)\))?")
_OUR_PID: Final = r"(?:Killed process {pid}\b|\bpid='?{pid}\b)"
_HOLDING: Final = frozenset({"LISTEN", "NONE"})
"""psutil's states of a server's socket, and of one of UDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFacts:
    """Time at which a rank noticed a request to stop, the request's scope, the rank's last steps; None where unknown."""

    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None


def order_of(cause: str | None) -> EndOrder | None:
    """Return the order that preceded the end, as the keeper recorded it; None: the process ended by itself.

    A cause that no keeper writes counts as an order: an end that may have been ordered is no success.
    """
    if cause is None:
        return None
    return EndOrder(cause) if cause in set(EndOrder) else EndOrder.KILL


def was_killed(end: Exited | ExitRecord) -> bool:
    """Whether SIGKILL ended the process, and not by an order to its keeper."""
    return end.cause is None and end.signal == signal.SIGKILL


def stop_facts(ending: Ending, printed: ProgressSnapshot | None = None, *, ended_at: float, killed: bool) -> StopFacts:
    """Return the facts of an ending; for a rank that reports no steps, those read from its output.

    A SIGTERM to the keeper alone explains an end of the rank soon after it, but not that of a rank that was ``killed``
    (``was_killed``): a machine that shuts down kills the keeper with it.
    """
    by_rank, by_keeper = ending.stop_seen_at or None, ending.keeper_terminated_at or None
    if by_rank is None and by_keeper is not None and (killed or ended_at - by_keeper > SHUTDOWN_SECONDS):
        by_keeper = None
    step, total = ending.last_step, ending.total_steps
    if step is None and printed is not None:
        step, total = printed.max_step, printed.total_steps
    scope = None if by_rank is None else StopScope.RANK
    return StopFacts(
        stop_seen_at=min((at for at in (by_rank, by_keeper) if at is not None), default=None),
        stop_scope=scope if by_keeper is None else StopScope.MACHINE,
        last_step=step,
        total_steps=total,
    )


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


class OomWatch:
    """Counts memory kills in the file that ``find`` names. Call ``mark`` now and then; ``killed`` returns the new ones.

    The count belongs to a whole group of processes, so only the last moments count: since the mark before the last.
    """

    def __init__(self, find: Callable[[], Path | None]) -> None:
        self._find = find
        self._file = find()
        self._older = self._newer = _kills(self._file)

    @classmethod
    def of_process(cls, pid: int, *, root: Path = _CGROUPS) -> OomWatch:
        """Watch the control group of a process."""
        return cls(lambda: _counter_file(pid, root))

    @classmethod
    def of_machine(cls, source: Path = _VMSTAT) -> OomWatch:
        """Watch the whole machine, whose count any user may read."""
        return cls(lambda: source)

    def mark(self) -> None:
        """Remember the present count; follow a process that was moved to another group."""
        file = self._find()
        if file is not None and file != self._file:
            self._file = file
            self._older = self._newer = _kills(file)
        else:
            self._older, self._newer = self._newer, _kills(self._file)

    def killed(self) -> OomCount | None:
        """Return how far the count has risen since the mark before the last; None when no process was killed."""
        count = _kills(self._file)
        if count is None or self._older is None or count <= self._older:
            return None
        return OomCount(path=str(self._file), before=self._older, count=count)


def _kills(file: Path | None) -> int | None:
    """Return the kernel's count of memory kills in a file; None where it is unreadable."""
    try:
        found = None if file is None else re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
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
    for _ in range(_MAX_RECORDS):
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


def port_evidence(ended: Exit, env: Mapping[str, str]) -> PortTaken | None:
    """Return what holds the port that the rank's error names; None where it names none. ``env`` is the rank's environment."""
    port = taken_port(ended)
    if port is None:
        return None
    psutil = importlib.import_module("psutil")  # imported late: a rank's actor starts without it
    rendezvous = env.get("MASTER_PORT", "")
    pids = _holders(psutil, port)
    pid = next((pid for pid in pids if pid is not None), None)
    return PortTaken(
        port=port,
        rendezvous_port=int(rendezvous) if rendezvous.isdecimal() else None,
        listening=bool(pids),
        pid=pid,
        program=_program(psutil, pid),
    )


def _holders(psutil: Any, port: int) -> list[int | None]:
    """Return the process of each socket that is bound to the port and waits there; None for one of another user."""
    try:
        found = psutil.net_connections(kind="inet")
    except (psutil.Error, OSError):
        return []
    return [one.pid for one in found if one.laddr and one.laddr.port == port and one.status in _HOLDING]


def _program(psutil: Any, pid: int | None) -> str:
    """Return the program's name alone: its arguments may hold secrets of another job."""
    if pid is None:
        return ""
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError):
        return ""


class ExitEvidence:
    """Evidence about the current process; older evidence is marked and does not count."""

    def __init__(self) -> None:
        self._machine = OomWatch.of_machine()
        self._oom: OomWatch | None = None
        self._kernel: KernelWatch | None = None
        self._pid = 0
        self.processes = ProcessWatch()

    def begin(self) -> None:
        """Prepare for a new process."""
        self.close()
        self._oom, self._pid = None, 0
        self._kernel = KernelWatch()
        self.processes.begin()

    def started(self, pid: int) -> None:
        """Record the number of the started process."""
        self._pid, self._oom = pid, OomWatch.of_process(pid)

    def mark(self) -> None:
        """Exclude the evidence up to now from any end."""
        if self._oom is not None:
            self._oom.mark()
        if self._kernel is not None:
            self._kernel.mark()
        self._machine.mark()

    def facts(self) -> tuple[Fact, ...]:
        """Return the kernel's facts about the rank's processes since the last mark."""
        killed = self._oom.killed() if self._oom else None
        found = self._kernel.facts(self._pid) if self._kernel and self._pid else ()
        return found if killed is None else (killed, *found)

    def killed_by_kernel(self, event: Exited, facts: tuple[Fact, ...]) -> bool:
        """Whether the kernel has killed a process of the rank because the machine had no memory left.

        The kernel's log names the process, where it is readable; else the machine's count has risen in the last moments.
        """
        if event.cause is not None:
            return False
        if event.signal == signal.SIGKILL and self._kernel is not None and self._kernel.readable:
            return any(isinstance(fact, OomKill | OomCount) for fact in facts)
        return self._machine.killed() is not None

    def close(self) -> None:
        """Stop reading the kernel's log."""
        if self._kernel is not None:
            self._kernel.close()
