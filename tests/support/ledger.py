"""The ledger of the fault tests: the actions of every rank of every attempt, and the rules that they must satisfy.

Jobs append to it themselves (``ledger_job.py``), each line in one write to a file opened with O_APPEND, with the
machine's monotonic clock. Nothing of orch is between a job and its ledger, so the ledger is independent evidence.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("ledger_job.py").read_text()
TINY = {"gpu": 0, "cpu": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One action of a rank. ``at`` is seconds of the monotonic clock."""

    job: str
    attempt: int
    rank: int
    pid: int
    what: str
    step: int
    at: float


@dataclass(slots=True)
class Ledger:
    """A ledger file."""

    path: Path
    _by_job: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list), repr=False)
    _read: int = field(default=0, repr=False)  # bytes; written lines never change
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def lines(self, job: str) -> list[Line]:
        """Return every line of a job so far."""
        self._read_on()
        return list(self._by_job.get(job, ()))

    def jobs(self) -> list[str]:
        """Return the jobs that ever started."""
        self._read_on()
        return sorted(self._by_job)

    def _read_on(self) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            for text in whole.splitlines():
                line = Line(**json.loads(text))
                self._by_job[line.job].append(line)

    def last_step(self, job: str, rank: int = 0) -> int:
        """Return the newest step that a rank has done; 0 before the first."""
        steps = [line.step for line in self.lines(job) if line.rank == rank and line.what == "step"]
        return steps[-1] if steps else 0

    def attempts(self, job: str) -> list[int]:
        """Return the attempts that have written a line."""
        return sorted({line.attempt for line in self.lines(job)})

    def ended(self, job: str, ranks: int) -> bool:
        """Whether every rank reached the end of its script."""
        return len({line.rank for line in self.lines(job) if line.what == "end"}) == ranks

    def resumed(self, job: str, attempt: int, rank: int = 0) -> int:
        """Return the step from which an attempt began."""
        key = (attempt, rank, "resume")
        return next(line.step for line in self.lines(job) if (line.attempt, line.rank, line.what) == key)

    def pids(self, job: str, attempt: int) -> dict[int, int]:
        """Return process ids by rank."""
        return {line.rank: line.pid for line in self.lines(job) if line.attempt == attempt}

    def problems(self, job: str) -> list[str]:
        """Return violations in the ledger: an attempt must be launched once and only after the previous one."""
        lines = self.lines(job)
        return [*_launches(lines), *_overlaps(lines), *_steps(lines, self.stored(job))]

    def stored(self, job: str) -> dict[int, int] | None:
        """Return each attempt's newest step that must survive it; None: every step that its rank was told is saved."""
        return None

    def check(self, *jobs: str) -> None:
        """Fail with every problem of the jobs, or of all jobs on the ledger."""
        found = [f"{job}: {problem}" for job in jobs or self.jobs() for problem in self.problems(job)]
        assert not found, "\n".join(found)


def _launches(lines: list[Line]) -> list[str]:
    starts: dict[tuple[int, int], int] = defaultdict(int)
    processes: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in lines:
        starts[line.attempt, line.rank] += line.what == "start"
        processes[line.attempt, line.rank].add(line.pid)
    return [
        f"attempt {attempt} rank {rank} was launched {starts[attempt, rank]} times, by {sorted(pids)}"
        for (attempt, rank), pids in processes.items()
        if starts[attempt, rank] != 1 or len(pids) != 1
    ]


def _overlaps(lines: list[Line]) -> list[str]:
    """Return the actions of an attempt after the first line of a later one: both were alive."""
    found, newest = [], 0
    for line in sorted(lines, key=lambda each: each.at):
        if line.attempt < newest:
            found.append(f"attempt {line.attempt} rank {line.rank} did {line.what} while {newest} was alive")
        newest = max(newest, line.attempt)
    return found


def _steps(lines: list[Line], stored: Mapping[int, int] | None) -> list[str]:
    """Return the ranks of attempts that began at a step not saved before, or left steps out."""
    found = []
    by_rank: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in lines:
        by_rank[line.attempt, line.rank].append(line)
    least = most = 0  # a later attempt begins between the newest saved step and the newest done step
    for attempt in sorted({line.attempt for line in lines}):
        for (number, rank), mine in by_rank.items():
            if number != attempt:
                continue
            done = [line.step for line in mine if line.what == "step"]
            begin = next((line.step for line in mine if line.what == "resume"), None)
            if begin is not None and done and done != list(range(begin + 1, begin + 1 + len(done))):
                found.append(f"attempt {attempt} rank {rank} resumed at {begin} and did the steps {done}")
            if begin is not None and not least <= begin <= most:
                found.append(f"attempt {attempt} rank {rank} resumed at {begin}; saved was {least}, done {most}")
        mine = [line for line in lines if line.attempt == attempt and line.rank == 0]
        saved = [line.step for line in mine if line.what in ("saved", "stopped")]
        least = max([least, *(saved if stored is None else [stored.get(attempt, 0)])])
        most = max([most, *(line.step for line in mine if line.what == "step")])
    return found


def job_spec(
    ledger: Ledger, *, name: str = "led", ranks: int = 1, spec: dict[str, Any] | None = None, **job: Any
) -> str:
    """Return the job.yaml of a ledger job: ``job`` are ledger_job.py's options, ``spec`` further keys of the file."""
    options = json.dumps({"ledger": str(ledger.path), **job})
    return json.dumps(
        {
            "version": 1,
            "name": name,
            "entrypoint": f"python train.py {shlex.quote(options)}",
            "resources": {"num_workers": ranks, "resources_per_worker": TINY},
            **(spec or {}),
        }
    )
