"""Waits for a daemon that may restart: watch, wait, and followed logs.

Everything uses long polls and streams; there are no requests while nothing happens. A lost request is repeated until a
``Patience`` runs out, and nothing is returned twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from orchestrator.api.errors import DaemonUnreachableError, DeadlineError, NotEndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from orchestrator.api.views import JobView, LogLine

    LogKey = tuple[int, int, str]

Seen = TypeVar("Seen")

RECONNECT_SECONDS = 60.0
POLL_SECONDS = 25.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0

Absence = (DaemonUnreachableError, DeadlineError)


class Clock(Protocol):
    """Monotonic time and pauses."""

    def now(self) -> float:
        """Return seconds, from any origin."""
        ...

    def pause(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...


class _Monotonic:
    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class Daemon(Protocol):
    """The requests to a daemon; ``Client`` implements them."""

    def job(self, ref: str) -> JobView:
        """Return one job."""
        ...

    def wait_change(self, after: int | None, *, job_ids: Sequence[str], timeout_seconds: float) -> int:
        """Return the change counter, once it differs from ``after`` or at the timeout."""
        ...

    def logs(
        self, ref: str, *, rank: int | None, attempt: int | None, tail: int | None, since: float | None, follow: bool
    ) -> Iterator[LogLine]:
        """Yield lines of the job's log."""
        ...


class Patience:
    """Bounds the wait for an absent daemon. ``notice`` is called once per absence."""

    def __init__(
        self,
        reconnect_seconds: float = RECONNECT_SECONDS,
        notice: Callable[[DaemonUnreachableError | DeadlineError], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or _Monotonic()
        self._reconnect_seconds = reconnect_seconds
        self._notice = notice
        self._until: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def present(self) -> None:
        """Record an answer of the daemon: the next absence is a new one."""
        self._until = None
        self._pause = FIRST_PAUSE_SECONDS

    def absent(self, error: DaemonUnreachableError | DeadlineError, deadline: float | None = None) -> None:
        """Record an absence: return after a pause; raise ``error`` after ``reconnect_seconds`` or at ``deadline``."""
        if deadline is not None and time.monotonic() >= deadline:
            raise error
        now = self.clock.now()
        if self._until is None:
            self._until = now + self._reconnect_seconds
            if self._notice is not None and self._reconnect_seconds > 0:
                self._notice(error)
        if now + self._pause > self._until:
            raise error
        self.clock.pause(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def watch(
    client: Daemon,
    read: Callable[[], Seen],
    *,
    job_ids: Sequence[str] = (),
    patience: Patience | None = None,
    deadline: float | None = None,
    rest_seconds: float = 0.0,
) -> Iterator[Seen]:
    """Yield what ``read`` returns now, and again after each change of ``job_ids`` (none: of any job), for ever.

    Also yields every ``POLL_SECONDS`` without a change, and at ``deadline`` (monotonic), so that a caller can check the
    clock; then it does not wait for an absent daemon. Changes within ``rest_seconds`` after a reading are read
    together.
    """
    patience = patience or Patience()
    version: int | None = None
    clock = patience.clock
    rested: float | None = None
    while True:
        if rested is not None:
            clock.pause(max(0.0, rested - clock.now()))
        held = POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
        try:
            version = client.wait_change(version, job_ids=job_ids, timeout_seconds=held)
            value = read()
        except Absence as error:
            version = None  # the next answer arrives at once, because there may have been changes
            patience.absent(error, deadline)
            continue
        patience.present()
        rested = clock.now() + rest_seconds
        yield value


def wait(
    client: Daemon, ref: str, *, timeout_seconds: float | None = None, patience: Patience | None = None
) -> JobView:
    """Return the job, once it has ended. Raises NotEndedError after ``timeout_seconds``, NoSuchJobError."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    patience = patience or Patience()
    first = present(lambda: client.job(ref), patience, deadline)
    if first.is_terminal:
        return first

    def read() -> JobView:
        return client.job(first.id)

    for job in watch(client, read, job_ids=[first.id], patience=patience, deadline=deadline):
        if job.is_terminal:
            return job
        if deadline is not None and time.monotonic() >= deadline:
            raise not_ended(job)
    raise AssertionError("a watch has no end")


def not_ended(job: JobView) -> NotEndedError:
    """Return the error about a job that has not ended in time."""
    return NotEndedError(
        f"job {job.id} has not ended yet: {job.state} ({job.reason})",
        hint=f"it keeps running: `orch wait {job.id}` continues to wait, `orch cancel {job.id}` ends it",
    )


def present(ask: Callable[[], Seen], patience: Patience, deadline: float | None = None) -> Seen:
    """Return the result of ``ask``, once the daemon answers. Do not wait for it after ``deadline`` (monotonic)."""
    while True:
        try:
            value = ask()
        except Absence as error:
            patience.absent(error, deadline)
        else:
            patience.present()
            return value


def follow_logs(
    client: Daemon,
    ref: str,
    *,
    rank: int | None = None,
    attempt: int | None = None,
    tail: int | None = None,
    since: float | None = None,
    patience: Patience | None = None,
) -> Iterator[LogLine]:
    """Yield lines of the job's log until the job has ended; each line once, even if the daemon restarts in between."""
    patience = patience or Patience()
    job_id = present(lambda: client.job(ref), patience).id  # after a reconnect, a name must not refer to a newer job
    given = _Given()
    while True:
        try:
            for line in client.logs(job_id, rank=rank, attempt=attempt, tail=tail, since=since, follow=True):
                patience.present()
                if given.is_new(line):
                    yield line
        except Absence as error:
            patience.absent(error)
            since, tail = given.resume(since, tail)
        else:
            return


class _Given:
    """Records the yielded lines: per attempt, rank and stream the newest time, and how many lines had it."""

    def __init__(self) -> None:
        self._newest: dict[LogKey, tuple[float, int]] = {}
        self._repeats: dict[LogKey, int] = {}

    def is_new(self, line: LogLine) -> bool:
        """Record ``line``; return False if it was yielded before the last reconnect."""
        key = (line.attempt, line.rank, line.stream)
        at, count = self._newest.get(key, (float("-inf"), 0))
        if line.at < at:
            return False
        if line.at == at and self._repeats.get(key, 0) > 0:
            self._repeats[key] -= 1
            return False
        self._newest[key] = (line.at, count + 1 if line.at == at else 1)
        return True

    def resume(self, since: float | None, tail: int | None) -> tuple[float | None, int | None]:
        """Return the query after an interruption: everything since the newest line of the rank that is furthest behind."""
        self._repeats = {key: count for key, (_, count) in self._newest.items()}
        if not self._newest:
            return since, tail
        return min(at for at, _ in self._newest.values()), None
