"""Records which gangs serve a job other than the one they were created for, and which are parked: they serve no job.

A restarted daemon has to find the gangs of running jobs, so the records are symbolic links in a directory, which are
created, read and renamed atomically: ``JOB-gN`` -> its origin, for a gang that serves another job than it was created
for; ``ORIGIN.parked`` for a parked gang. A gang that an earlier daemon parked is never taken: its actors may be of
another version.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.private_files import make_private
from orchestrator.runtime.gangs.reuse.origin import Origin, is_spotless, origin_of, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.reuse.origin import Shape

PARKED_SECONDS: Final = 10.0
MOST_RANKS: Final = 32
"""Most rank actors in parked gangs: each takes some 85 MB and checks for signals a hundred times a second."""

_PARKED: Final = ".parked"


class _Parked(NamedTuple):
    shape: Shape
    since: float


class ParkedGangs:
    """Records of the gangs, in ``directory``; None: no gang is ever parked. Called from several threads."""

    def __init__(self, directory: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._own: set[Origin] = set()
        self._serving: dict[Origin, Origin] = {}
        self._users: dict[Origin, Origin] = {}
        self._parked: dict[Origin, _Parked] = {}
        self._left: list[Origin] = []
        if directory is not None:
            self._read(directory)

    def _read(self, directory: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            for link in directory.iterdir():
                with contextlib.suppress(OSError, ValueError):  # an entry of another form was not created here
                    origin = Origin.parse(str(link.readlink()))
                    if link.name.endswith(_PARKED):
                        self._left.append(origin)
                    else:
                        self._serve(Origin.parse(link.name), origin)

    def _serve(self, user: Origin, origin: Origin) -> None:
        self._serving[user], self._users[origin] = origin, user

    def created(self, job: Job) -> None:
        """Record that this process creates the job's gang."""
        with self._lock:
            self._own.add(origin_of(job))

    def serving(self, job: Job) -> Origin | None:
        """Return the origin of the gang that serves the job; None if the one created for it serves another or none."""
        name = origin_of(job)
        with self._lock:
            if (origin := self._serving.get(name)) is not None:
                return origin
            elsewhere = name in self._users or name in self._parked or name in self._left
            return None if elsewhere else name

    def may_park(self, job: Job) -> bool:
        """Whether the job's gang may serve another job after it."""
        if self._directory is None or shape_of(job) is None or not is_spotless(job):
            return False
        origin = self.serving(job)
        with self._lock:
            ranks = sum(len(parked.shape.nodes) for parked in self._parked.values())
            return origin in self._own and ranks + job.num_workers <= MOST_RANKS

    def park(self, job: Job) -> None:
        """Keep the job's gang for another job. Raises OSError; the gang then still serves this one."""
        name, shape, directory = origin_of(job), shape_of(job), self._directory
        assert directory is not None
        assert shape is not None
        with self._lock:
            origin = self._serving.get(name, name)
            parked = directory / f"{origin.text}{_PARKED}"
            if origin == name:
                make_private(directory)
                parked.symlink_to(origin.text)
            else:
                (directory / name.text).rename(parked)
                del self._serving[name], self._users[origin]
            self._parked[origin] = _Parked(shape, self._clock())

    def take(self, job: Job) -> Origin | None:
        """Return a parked gang of the job's shape, which serves the job from now on; None if there is none.

        Of several it is the one that was parked last: if successive jobs took them in turn, none would ever expire.
        """
        shape, name, directory = shape_of(job), origin_of(job), self._directory
        if shape is None or directory is None:
            return None
        with self._lock:
            newest_first = reversed(self._parked.items())
            origin = next((origin for origin, parked in newest_first if parked.shape == shape), None)
            if origin is None:
                return None
            try:
                (directory / f"{origin.text}{_PARKED}").rename(directory / name.text)
            except OSError:  # it stays parked until it expires
                return None
            del self._parked[origin]
            self._serve(name, origin)
            return origin

    @property
    def any_parked(self) -> bool:
        """Whether a gang is parked."""
        with self._lock:
            return bool(self._parked)

    def over(self, seconds: float = PARKED_SECONDS) -> list[Origin]:
        """Return the gangs to remove: parked for ``seconds``, or by an earlier daemon.

        Each is returned until ``removed``, and no job can take it.
        """
        with self._lock:
            until = self._clock() - seconds
            old = [origin for origin, parked in self._parked.items() if parked.since <= until]
            for origin in old:
                del self._parked[origin]
            self._left += old
            return list(self._left)

    def removed(self, origin: Origin) -> None:
        """Forget a gang that does not exist any more."""
        with self._lock:
            user = self._users.pop(origin, None)
            if user is not None:
                self._serving.pop(user, None)
            self._own.discard(origin)
            self._parked.pop(origin, None)
            if origin in self._left:
                self._left.remove(origin)
            if self._directory is not None:
                (self._directory / f"{origin.text}{_PARKED}").unlink(missing_ok=True)
                if user is not None:
                    (self._directory / user.text).unlink(missing_ok=True)
