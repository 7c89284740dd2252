"""The world of a history: a cluster in memory, a store, and a daemon that runs on them and is killed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from orchestrator.core.ids import JobId, job_id
from orchestrator.runtime.memory.cluster import MemoryCluster, Script
from orchestrator.spec.settings import Settings
from orchestrator.store.backup import restore
from orchestrator.store.store import Store
from tests.stateful.daemon import Crash, FaultyStore, SteppedDaemon
from tests.support.records import replace
from tests.support.stores import IN_MEMORY, in_this_thread
from tests.unit.core.builders import T0, node

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.core.states import EndOrder
    from orchestrator.runtime.memory.cluster import Exit, Process
    from orchestrator.store.store import Store

T = TypeVar("T")
Do: TypeAlias = "Callable[[World, random.Random], str]"
"""Carries out an act and returns a description; "" when there was nothing to do."""
TORN_BYTES = 700  # left at the end of the log by a write that was interrupted


@dataclass(frozen=True, slots=True)
class End:
    """The true end of a process, independent of the facts that the daemon received."""

    how: Exit
    at: float
    stop_seen_at: float | None
    ordered: EndOrder | None


@dataclass(slots=True)
class Promise:
    """Acknowledged requests for a job: ``attempts`` is its number of attempts at a stop; None: no stop is in force."""

    attempts: int | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Truth:
    """The true events, independent of the daemon's record."""

    ends: dict[tuple[JobId, int], dict[int, End]] = field(default_factory=dict)
    promises: dict[JobId, Promise] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    ended: dict[JobId, Job] = field(default_factory=dict)
    looked_at: dict[JobId, Job] = field(default_factory=dict)
    first_up: dict[JobId, float] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def note_end(self, process: Process, at: float) -> None:
        assert process.ended_as is not None
        end = End(process.ended_as, at, process.stop_seen_at, process.ordered)
        self.ends.setdefault((process.job_id, process.attempt), {})[process.rank] = end


PREFIX: Final = "orch-simulation-"


class NamedStore(FaultyStore):
    """Derives job ids from a count: real ones are random."""

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        return await super().submit_all([replace(event, job_id=_counted(event)) for event in events])


def _counted(event: ev.JobSubmitted) -> JobId:
    return job_id("job", int(event.idempotency_key.rpartition("-")[2]) * 7_919)


class World:
    """Everything that a history changes. ``close`` frees it."""

    def __init__(self, *, homes: str | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=homes or IN_MEMORY))
        self.event_loop = asyncio.new_event_loop()
        self.settings = Settings.from_environ({"ORCH_HOME": str(self.home)})
        self.scripts: dict[JobId, Script] = {}
        self.truth = Truth()
        self.cluster = MemoryCluster(
            [node("a", gpus=4, cpus=16), node("b", gpus=2, cpus=16), node("c", gpus=2, cpus=16)],
            now=T0,
            script_of=lambda job: self.scripts.get(job, Script()),
            latency=0.01,
        )
        on_end = self.cluster.processes.on_end
        self.cluster.processes.on_end = lambda process: self._note_end(process, on_end)
        self._lives = 0
        self.store = NamedStore(self._open(), self.cluster)
        self.submitted = 0
        self.told: list[ev.Event] = []
        self._begin_daemon()

    # -- the daemon

    @property
    def jobs(self) -> dict[JobId, Job]:
        """The live jobs, as they are stored."""
        return self.daemon.loop.jobs

    @property
    def now(self) -> float:
        return self.cluster.now()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call of the daemon or the store."""
        return self.event_loop.run_until_complete(coroutine)

    def attempt(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call of the daemon; None when it was killed during the call and another one was started."""
        try:
            return self.run(coroutine)
        except Crash:
            self.crash()
            return None

    def crash(self) -> None:
        """Kill the daemon, and start another one from what is on the disk."""
        self.truth.happened["daemon killed"] += 1
        self.daemon.gangs.crash()
        self.told += self.daemon.history
        self.store.store = self._reopened()
        self._begin_daemon()

    def round(self) -> None:
        """Deliver what has happened, then run one round of the daemon."""
        self.daemon.deliver(len(self.daemon.outbox))
        self.attempt(self.daemon.step())

    def _begin_daemon(self) -> None:
        self.daemon = SteppedDaemon(self.store, self.cluster, self.settings)
        self.daemon.first_up = self.truth.first_up
        self.run(self.daemon.start())

    # -- the store

    def _open(self) -> Store:
        self.store_path.parent.mkdir(exist_ok=True)
        return in_this_thread(Store.open(self.store_path, reserve=None, min_free_bytes=0))

    @property
    def store_path(self) -> Path:
        """Return the path of the store in its present life."""
        return self.home / f"life-{self._lives}" / "store.sqlite3"

    def restore(self, backup: Path) -> None:
        """Replace the store by the copy in a backup, as after the loss of its disk."""
        self.store.store.close()
        shutil.rmtree(self.store_path.parent)
        self._lives += 1
        self.store_path.parent.mkdir()
        restore(backup, self.store_path)
        self.store.store = self._open()

    def _reopened(self) -> Store:
        """Reopen the store from copies of its files as they are now, without an orderly close, and with a torn write."""
        old = self.store_path
        self._lives += 1
        self.store_path.parent.mkdir()
        log = old.with_name(old.name + "-wal")
        shutil.copyfile(old, self.store_path)
        torn = (log.read_bytes() if log.exists() else b"") + bytes(range(256)) * (TORN_BYTES // 256)
        self.store_path.with_name(log.name).write_bytes(torn)
        self.store.store.close()
        shutil.rmtree(old.parent)
        return self._open()

    # -- what is where

    def one(self, index: int, jobs: Sequence[Job]) -> Job | None:
        """Return the job at ``index`` in the order of submission, modulo their number; None without jobs."""
        found = sorted(jobs, key=lambda job: job.submission.sequence)
        return found[index % len(found)] if found else None

    def process(self, index: int) -> Process | None:
        """Return the running process at ``index``, modulo their number; None without processes."""
        running = sorted(self.cluster.processes, key=lambda p: p.pid)
        return running[index % len(running)] if running else None

    def _note_end(self, process: Process, on_end: Any) -> None:
        self.truth.note_end(process, self.now)
        on_end(process)

    def close(self) -> None:
        self.store.close()
        self.event_loop.run_until_complete(self.event_loop.shutdown_default_executor())
        self.event_loop.close()
        shutil.rmtree(self.home)
