"""The production loop and service on the in-memory runtime: a daemon that is stepped, and may be killed in between."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from orchestrator.api.protocol import Verb
from orchestrator.api.requests import ActionRequest, SubmitRequest
from orchestrator.api.service import Caller
from orchestrator.daemon.loop import Loop
from orchestrator.daemon.requests.actions import JobActions
from orchestrator.daemon.requests.reader import JobReader, LiveFacts
from orchestrator.daemon.requests.submissions import Submissions
from orchestrator.daemon.stopping import StopRequest
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.runtime.memory.gangs import MemoryGangs
from orchestrator.runtime.pools import Pools
from orchestrator.store.errors import DiskFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.runtime.memory.cluster import MemoryCluster
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.settings import Settings
    from orchestrator.store.store import Store

ADA = Caller(uid=1000, gid=1000, user="ada", is_owner=True)
TRIES_ON_A_FULL_DISK = 3  # the disk has space again after these
T = TypeVar("T")
_unused = cast("Any", None)


class Crash(BaseException):
    """The daemon is killed."""


class Log:
    """A log that may contain no error except that of a full disk."""

    def __getattr__(self, name: str) -> Any:
        return self._fail if name in ("error", "exception") else self._drop

    def _drop(self, *_: object, **__: object) -> None:
        pass

    def _fail(self, event: str, **fields: object) -> None:
        assert event == "store.write_failed", (event, fields)


class FaultyStore:
    """A store on a disk that may be full; the daemon may be killed before or after its next write.

    The next write takes ``slow_seconds``, while everything else continues.
    """

    def __init__(self, store: Store, cluster: MemoryCluster) -> None:
        self.store = store
        self._cluster = cluster
        self.crash_before = self.crash_after = False
        self.slow_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        return cast("tuple[list[Job], bool]", await self._write(self.store.submit_all(events)))

    async def append(self, changes: Sequence[Change], **clock: Any) -> None:
        await self._write(self.store.append(changes, **clock))

    async def _write(self, write: Coroutine[Any, Any, Any]) -> Any:
        slow, self.slow_seconds = self.slow_seconds, 0.0
        if slow:
            self._cluster.run_until(self._cluster.now() + slow)
        before, self.crash_before = self.crash_before, False
        if before or self._cluster.disk_full:
            write.close()
            raise Crash if before else DiskFullError(Path("/store"), "and nothing can be written")
        done = await write
        after, self.crash_after = self.crash_after, False
        if after:
            raise Crash
        return done


class NothingElse:
    """Fake of the service's other dependencies: nodes exist, nothing is counted, nothing was reported."""

    async def wait(self, seconds: float) -> None:
        pass

    def submitted(self, seconds: float) -> None:
        pass

    def commit_failed(self) -> None:
        pass

    def of(self, job_id: JobId) -> None:
        return None

    def left(self, _: JobId) -> None:
        return None

    async def recall(self, jobs: Any) -> None:
        pass


class AtOnce:
    """Fake of the pools of threads that read users' files: runs the work at once."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


class SteppedDaemon:
    """One life of a daemon. Facts that the runtime posts are kept in ``outbox`` until they are delivered."""

    def __init__(self, store: FaultyStore, cluster: MemoryCluster, settings: Settings) -> None:
        self.cluster = cluster
        self.outbox: list[ev.Event] = []
        self.history: list[ev.Event] = []  # facts that the loop has processed
        self._posted: list[ev.Event] = []
        self.wake_at: float | None = None  # by the cluster's time
        self.decides = False  # after its first round, which takes in how far the clock has stepped since the last life
        self.first_up: dict[JobId, float] = {}  # likewise: when all ranks of a job were up for the first time
        self.clock = cluster.clock()
        self.gangs = MemoryGangs(cluster, post=self._post, now=self.clock.now)
        self.loop = Loop(
            store=cast("Store", store),
            runtime=lambda: self.gangs,
            on_change=lambda _: None,
            on_end=lambda _: None,
            log=cast("Any", Log()),
            clock=self.clock,
            pause=self._pause,
        )
        self.submissions, self.actions = self._parts(cast("Store", store), settings)
        self._keys = itertools.count()
        self._tries = 0

    def _parts(self, store: Store, settings: Settings) -> tuple[Submissions, JobActions]:
        other = NothingElse()
        reader = JobReader(self.loop, store, settings.paths, Pools(), other, LiveFacts())
        submissions = Submissions(
            self.loop,
            store,
            settings,
            admission=StopRequest(),
            nodes=other,
            counter=other,
            blind_to=_unused,
            resume_path=reader.checkpoint_path,
            pool=cast("Pool", AtOnce()),
            under_way=SubmissionsUnderWay(settings.paths, cast("Pool", AtOnce())),
        )
        return submissions, JobActions(self.loop, reader, submissions, settings, end_collection=lambda _job: False)

    async def start(self) -> None:
        """Load the jobs from the store, and read the nodes."""
        await self.loop.load()
        await self.gangs.survey(list(self.loop.jobs.values()))
        self.look()

    def look(self) -> None:
        """Update the loop's nodes, and which of them answer."""
        self.loop.set_nodes(self.cluster.views())
        self.gangs.report_reachability(self.loop.jobs.values())

    def deliver(self, count: int) -> None:
        """Post the oldest ``count`` facts of the runtime to the loop."""
        facts, self.outbox = self.outbox[:count], self.outbox[count:]
        self._posted += facts
        self.loop.post(facts)

    async def step(self) -> None:
        """Run one round. Raises Crash."""
        self._tries = 0
        if self.clock.step:  # a real runtime posts at once: what it has posted is by the clock before the step
            self.deliver(len(self.outbox))
        wake_at = await self.loop.step()
        self.wake_at = None if wake_at is None else wake_at - self.clock.now() + self.cluster.now()
        self.decides = True
        self.history += self._posted
        self._posted = []

    async def submit(self, text: str, key: str) -> JobId:
        """Submit a job to the daemon. Raises Crash, and the errors of the API."""
        request = SubmitRequest(
            yaml=text, source="job.yaml", idempotency_key=key, cwd="/", path="/usr/bin", python=sys.executable
        )
        reply = await self.submissions.submit(request, ADA)
        assert reply.job_id is not None
        return cast("JobId", reply.job_id)

    async def act(self, job_id: JobId, verb: Verb, priority: int | None = None, *, force: bool = False) -> None:
        """Request an action on a job from the service; run rounds until it answers. Raises Crash."""
        await self._until_done(self.actions.act(job_id, ActionRequest(verb=verb, priority=priority, force=force), ADA))

    async def command(self, make: Callable[[], Sequence[ev.Event]]) -> None:
        """Run a command of another part of the daemon in the loop. Raises Crash."""
        await self._until_done(self.loop.command(make))

    async def _until_done(self, work: Coroutine[Any, Any, Any]) -> None:
        acting = asyncio.ensure_future(work)
        try:
            while not acting.done():
                await asyncio.sleep(0)
                if self.loop.woken:
                    await self.step()
        finally:
            acting.cancel()
        await acting

    def _post(self, events: Sequence[ev.Event]) -> None:
        self.outbox += events
        for event in events:
            if event.kind == "attempt_running":
                self.first_up.setdefault(event.job_id, self.cluster.now())

    async def _pause(self, seconds: float) -> None:
        """Let time pass while the loop waits for space on the disk; the last try finds space."""
        self._tries += 1
        self.cluster.run_until(self.cluster.now() + seconds)
        if self._tries >= TRIES_ON_A_FULL_DISK:
            self.cluster.disk_full = False
