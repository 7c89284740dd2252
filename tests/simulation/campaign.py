"""Runs histories, and shortens those that fail."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.api.protocol import Verb
from orchestrator.core.states import JobState
from orchestrator.runtime.memory import faults as f
from tests.simulation import invariants
from tests.simulation.acts import ACTS
from tests.simulation.history import History, draw
from tests.simulation.world import IN_MEMORY, PREFIX, World
from tests.unit.core.builders import T0

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.pool import AsyncResult

    from tests.simulation.acts import Act

LENGTH = 120
MAX_ROUNDS = 3000
SHRINKING_TRIES = 400
RECORD_EVERY = 16  # steps between two readings of every event
CHUNK = 20  # seeds that one process runs at a time


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a history. ``failure`` is empty when every invariant held; ``digest`` is equal in each run of the history."""

    history: History
    failure: str
    digest: str
    faults: Counter[str]
    story: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The failure without its figures and names; a shorter history must fail with the same."""
        words = self.failure.split("\n", 1)[0].split()
        return " ".join(word for word in words if word.isalpha())[:60]


def run_history(
    history: History, *, acts: Mapping[str, Act] = ACTS, story: bool = False, homes: str | None = None
) -> Outcome:
    """Run one history, then no further fault until every job has ended. ``homes`` is the parent of the world's home."""
    world = World(homes=homes)
    notes = _Notes()
    failure = ""
    try:
        for number, step in enumerate(history.steps, 1):
            act = acts[step.act]
            what = act.do(world, step.choices())
            notes.add(number, step.act, what, world, fault=act.fault)
            invariants.check(world)
            if number % RECORD_EVERY == 0:
                invariants.check_record(world)
        settle(world, invariants.check)
        invariants.check_end(world)
        notes.digest.update(_state(world).encode())
    except Exception as error:  # of the daemon or of an invariant: a campaign searches for these
        failure = f"{type(error).__name__}: {error}"
        notes.story += [f"     {job.id}: " + " | ".join(job.story) for job in world.jobs.values()]
    finally:
        world.close()
    return Outcome(history, failure, notes.digest.hexdigest(), notes.faults, tuple(notes.story) if story else ())


@dataclass(slots=True)
class _Notes:
    """Digest, faults and story of a history's steps so far."""

    digest: Any = field(default_factory=hashlib.sha256)
    faults: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)

    def add(self, number: int, act: str, what: str, world: World, *, fault: bool) -> None:
        if fault and what:
            self.faults[act] += 1
        state = _state(world)
        self.digest.update(f"{act} {state}\n".encode())
        self.story.append(f"{number:4} +{world.now - T0:9.2f} s  {act}: {what or 'nothing to do'}\n        {state}")


def _state(world: World) -> str:
    jobs = sorted(world.jobs.values(), key=lambda job: job.submission.sequence)
    live = [f"{j.id} {j.state} v{j.version} a{j.attempt_number} {type(j.phase).__name__}" for j in jobs]
    ended = [f"{j.id} {j.state} v{j.version}" for _, j in sorted(world.truth.ended.items())]
    return f"{world.now:.6f} {'; '.join(live)} | {'; '.join(ended)}"


def settle(world: World, check: Callable[[World], None]) -> None:
    """Undo all faults and run rounds, each followed by ``check``, until every job has ended.

    Only facts and the times that the loop requests wake it.
    """
    world.store.crash_before = world.store.crash_after = world.cluster.disk_full = False
    for node_id, found in world.cluster.nodes.items():
        found.lost.clear()
        for fault in (f.NodeAnswers(node=node_id), f.NodeReturns(node=node_id), f.Slow(node=node_id, seconds=0.0)):
            fault.inject(world.cluster)
    world.daemon.look()
    for _ in range(MAX_ROUNDS):
        world.round()
        if not world.jobs:
            return
        _progress(world)
        check(world)
    left = {job.id: (job.state, job.story) for job in world.jobs.values()}
    raise AssertionError(f"jobs never end: {left}")


def _progress(world: World) -> None:
    for job in [j for j in world.jobs.values() if j.state is JobState.SUSPENDED]:
        world.truth.promises[job.id].attempts = None
        world.run(world.daemon.act(job.id, Verb.RESUME))
    for process in list(world.cluster.processes):
        job = world.jobs.get(process.job_id)
        if job is None:  # it was given up
            continue
        if job.state is JobState.RUNNING and process.actor.dead is None:
            process.end(f.Exit(code=0))
    if world.daemon.outbox or world.daemon.loop.woken:
        return
    times = [t for t in (world.cluster.agenda.next_at, world.daemon.wake_at) if t is not None]
    assert times, f"nothing wakes the loop: {[(j.id, j.state, j.story) for j in world.jobs.values()]}"
    world.cluster.run_until(max(min(times), world.now))
    world.daemon.look()


def shrink(outcome: Outcome, *, acts: Mapping[str, Act] = ACTS, tries: int = SHRINKING_TRIES) -> Outcome:
    """Return a history with the same failure and fewer steps, found by leaving steps out, within ``tries`` runs."""
    best, size = outcome, max(1, len(outcome.history.steps) // 2)
    while size and tries > 0:
        steps = best.history.steps
        for begin in range(len(steps) - size, -1, -size):
            tries -= 1
            left = (*steps[:begin], *steps[begin + size :])
            found = run_history(History(best.history.seed, left), acts=acts)
            if found.failure and found.kind == best.kind:
                best = found
                break
            if not tries:
                break
        else:
            size //= 2
    return best


@dataclass(slots=True)
class Report:
    """The totals of a campaign, and its failed histories."""

    histories: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.histories += 1
        self.steps += len(outcome.history.steps)
        self.faults += outcome.faults
        if outcome.failure:
            self.failed.append(outcome)

    def merge(self, other: Report) -> None:
        self.histories += other.histories
        self.steps += other.steps
        self.seconds += other.seconds
        self.faults += other.faults
        self.failed += other.failed


def history_of(seed: int, *, length: int = LENGTH, acts: Mapping[str, Act] = ACTS) -> History:
    """Return the history of a seed."""
    return draw(seed, length, {name: act.weight for name, act in acts.items()})


def run(
    first: int,
    *,
    faults: int,
    until: Callable[[], bool] = lambda: False,
    processes: int = 1,
    chunk: int = CHUNK,
    on_chunk: Callable[[Report], None] = lambda _: None,
    homes: str | None = IN_MEMORY,
) -> Report:
    """Run the histories of the seeds from ``first`` on, until ``faults`` faults were injected or ``until`` returns true.

    Each of the ``processes`` runs ``chunk`` seeds at a time; ``on_chunk`` gets the report of each chunk, in the order of the seeds.
    The homes of several processes are in a folder in ``homes``.
    """
    report = Report()
    chunks = (range(seed, seed + chunk) for seed in itertools.count(first, chunk))
    with _mapping(processes, homes) as mapped:
        for found in mapped(chunks):
            report.merge(found)
            on_chunk(found)
            if report.faults.total() >= faults or until():
                break
    return report


def run_seeds(seeds: Iterable[int], homes: str | None = None) -> Report:
    """Run the histories of these seeds."""
    report, began = Report(), time.monotonic()
    for seed in seeds:
        report.add(run_history(history_of(seed), homes=homes))
    report.seconds = time.monotonic() - began
    return report


@contextlib.contextmanager
def _mapping(processes: int, within: str | None) -> Iterator[Callable[[Iterable[range]], Iterator[Report]]]:
    """Yield a function that runs chunks; at any time as many are begun as there are processes, and one more."""
    if processes == 1:
        yield lambda chunks: map(run_seeds, chunks)
        return
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=within) as homes,
        multiprocessing.get_context("fork").Pool(processes) as pool,
    ):

        def mapped(chunks: Iterable[range]) -> Iterator[Report]:
            waiting: deque[AsyncResult[Report]] = deque()
            for chunk in chunks:
                waiting.append(pool.apply_async(run_seeds, (chunk, homes)))
                if len(waiting) > processes:
                    yield waiting.popleft().get()

        yield mapped  # the pool is terminated, and its worlds are removed with the folder
