"""Measures a gang of 1,024 ranks in the daemon: processor time of its bookkeeping, and the longest slice of its event loop.

The production loop, scheduler, fold and SQLite store take one job from its submission to its end, on the in-memory runtime:
every rank is placed, launched, up, and ends with 0, and all of them report at the same moment. The launch plan that each rank
gets on Ray is made, and pickled, once every actor has answered. The time that the simulated nodes take is left out, the store's
own threads are counted. Slices are measured in processor time of the loop's thread, so that other load on the machine does not
lengthen them; a full collection of Python's garbage collector falls into some of them and shows in their 99th percentile.
``growth`` is the cost of 1,024 ranks over that of 256, per rank: 1 is linear. With ``--ray-ranks N`` a job of that many ranks runs on a real daemon, too, and the daemon's processor time is read.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple

import structlog

from benchmarks import contenders
from benchmarks.measure import cpu_seconds, parser, report, result, summary
from orchestrator.core.cluster import Node
from orchestrator.core.events import JobSubmitted
from orchestrator.core.ids import JobId
from orchestrator.core.states import JobState
from orchestrator.daemon.loop import Loop
from orchestrator.runtime.gangs.launching import Places, rank_plans
from orchestrator.runtime.memory.cluster import MemoryCluster, Script
from orchestrator.runtime.memory.gangs import MemoryGangs
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.spec.job import parse_job
from orchestrator.spec.paths import Paths
from orchestrator.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    from orchestrator.core.job.record import Job

Given = TypeVarTuple("Given")

RANKS: Final = 1024
FEWER: Final = 256
GPUS_PER_NODE: Final = 8
BEGAN_AT: Final = 1_700_000_000.0
TARGET_SECONDS: Final = 0.100
TARGET_SLICE_SECONDS: Final = 0.010
JOB: Final = """
version: 1
name: wide
entrypoint: python train.py
working_dir: null
resources: {{num_workers: {ranks}, resources_per_worker: {{gpu: {gpu}, cpu: {cpu}}}}}
"""


@dataclass(slots=True)
class Slices:
    """Longest turn of an event loop's callbacks, and the time spent on the simulated nodes meanwhile."""

    longest: float = 0.0
    aside: float = 0.0
    _before: float = field(default=0.0)

    def simulated(self, do: Callable[[], Any]) -> None:
        """Call a function of the simulated nodes; its time is not the daemon's."""
        began = time.thread_time()
        do()
        self.aside += time.thread_time() - began

    def taken(self, seconds: float) -> None:
        """Record a callback that took ``seconds``."""
        self.longest = max(self.longest, seconds - (self.aside - self._before))
        self._before = self.aside


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that times every callback."""

    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self._slices = slices

    def call_soon(
        self, callback: Callable[[*Given], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, timed."""
        return super().call_soon(self._timed, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Given], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, timed."""
        return super().call_soon_threadsafe(self._timed, callback, *args, context=context)

    def _timed(self, callback: Callable[[*Given], object], *args: *Given) -> None:
        began = time.thread_time()
        try:
            callback(*args)
        finally:
            self._slices.taken(time.thread_time() - began)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of one gang's life, and the longest slice of the event loop."""

    seconds: float
    slice_seconds: float


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=10)
    options.add_argument("--ray-ranks", type=int, default=0, help="ranks of a job on a real daemon (default: none)")
    options.add_argument("--note", default="", help="what a reader of the result has to know of the machine")
    arguments = options.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    costs: dict[int, list[Cost]] = {RANKS: [], FEWER: []}
    for number in range(-2, arguments.pairs):
        for ranks in costs if number % 2 == 0 else reversed(costs):
            cost = life(ranks)
            if number >= 0:
                costs[ranks].append(cost)
    wide = [cost.seconds for cost in costs[RANKS]]
    fewer = [cost.seconds for cost in costs[FEWER]]
    found = result(
        "gang_scale",
        "s",
        "lower",
        wide,
        {},
        ranks=RANKS,
        longest_slice_seconds=summary([cost.slice_seconds for cost in costs[RANKS]]),
        fewer={"ranks": FEWER, **summary(fewer)},
        growth=(summary(wide)["median"] / RANKS) / (summary(fewer)["median"] / FEWER),
        targets={"seconds": TARGET_SECONDS, "slice_seconds": TARGET_SLICE_SECONDS},
        ray=_on_ray(arguments.ray_ranks) if arguments.ray_ranks else None,
        note=arguments.note,
    )
    report(found, arguments.json)


def life(ranks: int) -> Cost:
    """Run one job of this many ranks from its submission to its end; return its cost."""
    gc.collect()  # garbage of an earlier call is not collected during this one
    slices, home = Slices(), Path(tempfile.mkdtemp(prefix="orch-gang-scale-"))
    try:
        with asyncio.Runner(loop_factory=lambda: MeasuredLoop(slices)) as runner:
            return runner.run(_run(ranks, slices, home))
    finally:
        shutil.rmtree(home)


async def _run(ranks: int, slices: Slices, home: Path) -> Cost:
    nodes = [
        Node(id=f"node-{n}", name=f"node-{n}", gpus=GPUS_PER_NODE, cpus=4 * GPUS_PER_NODE, memory_bytes=2**40)
        for n in range(ranks // GPUS_PER_NODE)
    ]
    cluster = MemoryCluster(nodes, now=BEGAN_AT, script_of=lambda _: Script(seconds=60.0))
    store = Store.open(home / "store.sqlite3", reserve=None, min_free_bytes=0)
    ended: list[Job] = []
    loop = Loop(
        store=store,
        runtime=lambda: gangs,
        on_change=lambda _: None,
        on_end=ended.append,
        log=structlog.get_logger(),
        clock=cluster.clock(),
    )
    gangs = MemoryGangs(cluster, post=loop.post)
    loop.set_nodes(cluster.views())
    submission = _submission(ranks)
    await loop.load()
    await asyncio.sleep(0)
    slices.longest = slices.aside = 0.0
    began = time.process_time()
    launched = 0
    job, _ = await store.submit(submission)
    loop.add(job)
    wake_at = await loop.step()
    while loop.jobs:
        until = cluster.agenda.next_at or wake_at or BEGAN_AT
        slices.simulated(lambda until=until: cluster.run_until(until))  # type: ignore[misc]  # mypy cannot infer a default's type
        wake_at = await loop.step()
        launched = _planned(loop.jobs.get(job.id), launched, home)
    seconds = time.process_time() - began - slices.aside
    store.close()
    assert [job.state for job in ended] == [JobState.SUCCEEDED], ended
    return Cost(seconds, slices.longest)


def _planned(job: Job | None, launched: int, home: Path) -> int:
    """Make an attempt's plans after its actors answered, as ``runtime.gangs.launching`` does; return its number."""
    if job is None or not job.seats or job.attempt_number == launched:
        return launched
    places = Places(
        paths=Paths(home=home, socket=home / "socket"),
        work_dir=job.submission.work_dir,
        node_dir=home / "node",
        page_dir=home / "pages",
        base_env=dict(os.environ),
        secrets={},
        log_limits=LogLimits(),
        previous_step=0,
        simulated=False,
    )
    plans = rank_plans(job, job.seats, ("10.0.0.1", 29500), dict.fromkeys(job.nodes, places))
    sizes = [len(pickle.dumps(plan)) for plan in plans]  # a plan is freed once Ray has it
    assert len(sizes) == job.num_workers
    return job.attempt_number


def _submission(ranks: int) -> JobSubmitted:
    spec = parse_job(JOB.format(ranks=ranks, gpu=1, cpu=1), source="job.yaml")
    return JobSubmitted(
        job_id=JobId("wide-aaaaaa"),
        at=BEGAN_AT,
        name=spec.name,
        spec=spec,
        user="ada",
        uid=1000,
        idempotency_key="",
        python="/usr/bin/python3",
        path="/usr/bin",
        work_dir="/work",
        snapshot="",
    )


def _on_ray(ranks: int) -> dict[str, Any]:
    """Return the processor time of a real daemon for a job of this many ranks that do nothing."""
    orch = contenders.Orch()
    try:
        orch.up()
        pid = orch.client.health().pid
        text = JOB.format(ranks=ranks, gpu=0, cpu=0.01).replace("python train.py", "python -c pass")
        before, began = cpu_seconds(pid), time.monotonic()
        reply = orch.client.submit_text(text, cwd=str(orch.home))
        job = orch.client.wait(reply.job_id or "", timeout_seconds=600)
        return {
            "ranks": ranks,
            "state": job.state,
            "daemon_seconds": round(cpu_seconds(pid) - before, 4),
            "wall_seconds": round(time.monotonic() - began, 2),
        }
    finally:
        orch.close()


if __name__ == "__main__":
    main()
