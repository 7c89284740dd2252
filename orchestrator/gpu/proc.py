"""Reads from /proc a process's work, its memory, and whether it waits for other ranks.

Linux only, and without errors: a process that has ended, or is not readable, gives None.
"""

from __future__ import annotations

import enum
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_FUTEX_SYSCALLS: Final = frozenset({b"202", b"98", b"449", b"455"})
"""futex on x86-64 and on arm64, futex_waitv, futex_wait."""
_NANOSLEEP: Final = {"x86_64": {b"35", b"230"}, "aarch64": {b"101", b"115"}}.get(platform.machine(), set())
"""nanosleep and clock_nanosleep."""
_COLLECTIVE_THREADS: Final = (b"pt_gloo", b"gloo_", b"pt_nccl", b"pt_mpi")


class Sleep(enum.Enum):
    """Reasons for which a thread sleeps."""

    LOCK = enum.auto()  # another thread, or a collective
    TIMER = enum.auto()  # a time that it has chosen
    OUTSIDE = enum.auto()  # a file, a pipe, the network


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Processor time and memory that a process has used up to now.

    `busy_nanoseconds` is for each living thread the time in which it ran or was ready to run and waited for a
    processor: on a crowded machine that is still work. `started` distinguishes two processes with the same id.
    """

    started: int
    busy_nanoseconds: dict[str, int]
    resident_bytes: int

    def busy_seconds_since(self, before: ProcessUse | None) -> float:
        """Return the busy time of all threads since an earlier reading; 0 for a process that was not seen before."""
        if before is None or before.started != self.started:
            return 0.0
        return (
            sum(busy - before.busy_nanoseconds.get(thread, 0) for thread, busy in self.busy_nanoseconds.items()) / 1e9
        )


def read_use(pid: int, proc: Path = PROC) -> ProcessUse | None:
    """Return the use of the process up to now, or None when it has ended."""
    try:
        # The command's name, in parentheses, may hold spaces and parentheses of its own.
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        state, started, pages = fields[0], int(fields[19]), int(fields[21])
        if state in {b"Z", b"X"}:
            return None
        busy = _thread_times(f"{proc}/{pid}/task")
    except (OSError, ValueError, IndexError):
        return None
    return ProcessUse(started=started, busy_nanoseconds=busy, resident_bytes=pages * _PAGE_BYTES)


def ancestors(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Return the process and its ancestors, itself first; empty when it is not visible from here."""
    line: list[int] = []
    while pid > 0 and pid not in line:
        try:
            parent = int((proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        line.append(pid)
        pid = parent
    return tuple(line)


def _thread_times(tasks: str) -> dict[str, int]:
    """Return nanoseconds running or ready to run, by thread. Plain strings, as a rank has dozens of threads."""
    busy: dict[str, int] = {}
    for thread in os.listdir(tasks):
        try:
            with open(f"{tasks}/{thread}/schedstat", "rb") as file:
                run, ready, _slices = file.read().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # that thread ended meanwhile
        busy[thread] = int(run) + int(ready)
    return busy


def in_process_group(pid: int, proc: Path = PROC) -> bool:
    """Whether the process has threads of a collective library, which means that it belongs to a process group."""
    tasks = f"{proc}/{pid}/task"
    try:
        return any(_read(f"{tasks}/{task}/comm").startswith(_COLLECTIVE_THREADS) for task in os.listdir(tasks))
    except OSError:
        return False


def waits_on_lock(pid: int, proc: Path = PROC) -> bool:
    """Whether the main thread sleeps on a futex: in a member of a process group, it waits for the other ranks."""
    return sleeps_in(pid, proc) is Sleep.LOCK


def sleeps_in(pid: int, proc: Path = PROC) -> Sleep | None:
    """Return the reason for which the main thread sleeps; None where it runs or the kernel does not report it."""
    try:
        where = _read(f"{proc}/{pid}/wchan")
        if where not in {b"", b"0"}:
            return Sleep.LOCK if where.startswith(b"futex") else Sleep.TIMER if b"nanosleep" in where else Sleep.OUTSIDE
        number = _read(f"{proc}/{pid}/syscall").partition(b" ")[0]
    except OSError:
        return None
    if not number.isdigit():
        return None  # it runs again
    if number in _FUTEX_SYSCALLS:
        return Sleep.LOCK
    return Sleep.TIMER if number in _NANOSLEEP else Sleep.OUTSIDE


def _read(path: str) -> bytes:
    """Return a file's first 4096 bytes, read by a plain descriptor, as each rank is read every second."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 4096)
    finally:
        os.close(handle)
