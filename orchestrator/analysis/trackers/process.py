"""Follows one job's records into one tracker: ``python -m orchestrator.analysis.trackers.process JOB_DIRECTORY TRACKER``.

The first line of its input is a JSON object with the fields of ``RunFacts``; a line ``end STATE`` reports that the job
has ended. When its input closes, the daemon has ended, and this process ends at once, which the journal allows at any moment. It
also ends when the tracker does not answer. No other process waits for it.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.analysis.trackers import journal as j
from orchestrator.analysis.trackers.records import read_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.analysis.trackers.journal import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a job's run: ``job_id`` is also the run's id, ``folder`` the directory of local trackers' files."""

    job_id: str
    name: str = ""
    group: str = ""
    folder: Path = Path()
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


class TrackerRun(Protocol):
    """One run of one job. Each call may block, and may raise anything."""

    where: str
    """Short text for people about how to look at the run."""

    facts: Mapping[str, str]
    """The same for programs."""

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points that the tracker does not have; a process that was killed may have written some."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points to the tracker."""

    def kept(self) -> int | None:
        """Return the number of the newest point that the tracker has kept; None for all written ones."""

    def close(self, outcome: str) -> None:
        """End the run; ``outcome`` is the state in which the job has ended."""


RUNS: Final = {
    "wandb": ("orchestrator.analysis.trackers.wandb", "WandbRun"),
    "trackio": ("orchestrator.analysis.trackers.trackio", "TrackioRun"),
    "tensorboard": ("orchestrator.analysis.trackers.tensorboard", "EventFileRun"),
    "mlflow": ("orchestrator.analysis.trackers.mlflow", "MlflowRun"),
}
POLL_SECONDS: Final = 2.0
LAST_ROWS_SECONDS: Final = 3.0
"""Time after a job's end in which the last samples of its GPUs arrive."""
ANSWER_SECONDS: Final = 180.0
PREDECESSOR_SECONDS: Final = 10.0
MAX_PENDING: Final = 5000
EXIT_FAILED: Final = 1
EXIT_HUNG: Final = 75
EXIT_BUSY: Final = 76


@dataclass(slots=True)
class Orders:
    """Reports of the daemon: ``ended`` is set once the job has ended, in the state ``outcome``."""

    ended: threading.Event = field(default_factory=threading.Event)
    outcome: str = ""


class Answers:
    """Ends the process when a call to the tracker takes too long. The journal still has the call's points."""

    def __init__(self, seconds: float, hung: Callable[[], None]) -> None:
        self._seconds = seconds
        self._hung = hung

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Limit the time of a call to the tracker made inside."""
        timer = threading.Timer(self._seconds, self._hung)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class Following:
    """Copies one job's records into one tracker, until the job has ended and everything is copied."""

    def __init__(self, job: Path, tracker: str, orders: Orders, *, poll: float, answer_seconds: float) -> None:
        self._job = job
        self._orders = orders
        self._poll = poll
        self._path = j.path_of(job, tracker)
        self._journal = j.load(self._path)
        self._answers = Answers(answer_seconds, self._hung)
        self._answer_seconds = answer_seconds

    def follow(self, open_run: Callable[[], TrackerRun]) -> int:
        """Copy the existing records, then new ones; return the exit code."""
        if self._journal.finished:
            return 0
        try:
            with self._answers.awaited():
                run = open_run()
            self._note(where=run.where, facts=dict(run.facts), problem="")
            with self._answers.awaited():
                run.write(run.missing(self._journal.pending))
            while not self._round(run):
                pass
            with self._answers.awaited():
                run.close(self._orders.outcome)
        except Exception as error:
            self._note(problem=f"{type(error).__name__}: {error}")
            return EXIT_FAILED
        self._note(finished=True, pending=())
        return 0

    def _round(self, run: TrackerRun) -> bool:
        """Copy new records, then wait for more; return whether everything of an ended job is copied."""
        last = self._orders.ended.is_set()
        now = float("inf") if last else time.time()
        points: Sequence[Point] = ()
        if len(self._journal.pending) < MAX_PENDING:
            points, cursor = read_on(self._job, self._journal.cursor, now)
            if cursor != self._journal.cursor:
                pending = (*self._journal.pending, *points)
                self._note(cursor=cursor, pending=pending, points=self._journal.points + len(points))
        with self._answers.awaited():
            run.write(points)
            kept = run.kept()
        left = () if kept is None else tuple(one for one in self._journal.pending if one.number > kept)
        if len(left) < len(self._journal.pending):
            self._note(pending=left)
        if points:
            return False
        if not last:
            self._orders.ended.wait(self._poll)
        return last

    def _note(self, **changes: Any) -> None:
        self._journal = j.save(self._path, replace(self._journal, **changes))

    def _hung(self) -> None:
        with suppress(OSError, ValueError):
            self._note(problem=f"it did not answer for {self._answer_seconds:g} s")
        _end_group(EXIT_HUNG)


def main(
    arguments: Sequence[str],
    *,
    runs: Mapping[str, tuple[str, str]] = RUNS,
    poll: float = POLL_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
) -> int:
    """Run until the job has ended; return the exit code. ``runs`` has the module and the class of each tracker."""
    job, tracker = Path(arguments[0]), arguments[1]
    module, name = runs[tracker]
    os.nice(10)
    facts = _facts(json.loads(sys.stdin.readline()))
    orders = Orders()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    with j.own_folder(job, make=True) as folder:  # a job that was removed has no directory, and is not copied
        lock = os.open(folder / f"{tracker}.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _locked(lock):
            return EXIT_BUSY
        following = Following(job, tracker, orders, poll=poll, answer_seconds=answer_seconds)
        return following.follow(lambda: getattr(importlib.import_module(module), name)(facts))
    finally:
        os.close(lock)


def _locked(handle: int, seconds: float = PREDECESSOR_SECONDS) -> bool:
    """Lock the job and the tracker; return whether that succeeded. An earlier daemon's process is about to end."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
        else:
            return True


def _facts(body: dict[str, Any]) -> RunFacts:
    return RunFacts(**{**body, "folder": Path(body["folder"]), "tags": tuple(body["tags"])})


def _listen(orders: Orders) -> None:
    for line in sys.stdin:
        word, _, outcome = line.strip().partition(" ")
        if word == "end":
            orders.outcome = outcome
            # Exporters write their last samples, and the daemon the last report, a moment later.
            threading.Event().wait(LAST_ROWS_SECONDS)
            orders.ended.set()
    _end_group(EXIT_FAILED)


def _end_group(code: int) -> None:
    """End this process and the processes that its libraries have started, at once."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
