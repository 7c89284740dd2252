"""Reads the processor use of processes: nanoseconds, and how often one of their threads fell asleep and had to be woken."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Use:
    """Processor time of one process up to now, and by thread name how often a thread fell asleep."""

    nanoseconds: int
    sleeps: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Shares:
    """Percent of a core and wake-ups a second by process, and wake-ups a second by thread."""

    percent: Mapping[str, float]
    wakeups: Mapping[str, float]
    threads: Mapping[str, float]

    def shown(self) -> dict[str, Any]:
        """Return the largest first, as a result has them."""
        by_process = sorted(self.percent, key=lambda name: -self.percent[name])
        by_thread = sorted(self.threads.items(), key=lambda item: -item[1])
        return {
            "processes": {
                name: {"percent": round(self.percent[name], 3), "wakeups": round(self.wakeups[name], 1)}
                for name in by_process
            },
            "threads": {name: round(count, 1) for name, count in by_thread if count >= 0.1},
            "percent": round(sum(self.percent.values()), 3),
            "wakeups": round(sum(self.wakeups.values()), 1),
        }


def use_of(pid: int) -> Use:
    """Return the use of a process; nothing if it has ended. A thread that ends meanwhile does not count."""
    nanoseconds, sleeps = 0, Counter[str]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                nanoseconds += int((task / "schedstat").read_text().split()[0])
                status = (task / "status").read_text().splitlines()
                sleeps[_field(status, "Name")] += int(_field(status, "voluntary_ctxt_switches"))
    return Use(nanoseconds, sleeps)


def shares(names: Mapping[int, str], seconds: float) -> Shares:
    """Watch these processes for ``seconds``; several of one name are added up."""
    before, began = uses(names), time.monotonic()
    time.sleep(seconds)
    return between(before, uses(names), names, time.monotonic() - began)


def uses(pids: Iterable[int]) -> dict[int, Use]:
    """Return the use of each process."""
    return {pid: use_of(pid) for pid in pids}


def between(before: Mapping[int, Use], after: Mapping[int, Use], names: Mapping[int, str], seconds: float) -> Shares:
    """Return the shares that the processes used in the ``seconds`` between two readings."""
    percent, wakeups, threads = (defaultdict[str, float](float) for _ in range(3))
    for pid in before.keys() & after.keys():
        first, last, name = before[pid], after[pid], names[pid]
        percent[name] += 100.0 * max(0, last.nanoseconds - first.nanoseconds) / 1e9 / seconds
        for thread, count in last.sleeps.items():
            slept = max(0, count - first.sleeps[thread]) / seconds
            wakeups[name] += slept
            threads[f"{name}: {thread}"] += slept
    return Shares(percent, wakeups, threads)


def _field(status: list[str], name: str) -> str:
    return next(line.partition(":")[2].strip() for line in status if line.startswith(f"{name}:"))
