"""Measures the cost of a long queue: submissions, ``orch status``, memory and a restart, beside an empty queue.

``python -m benchmarks.queue_depth [--queued N] [--pairs N] [--nodes 1250x8] [--slurm N] [--json FILE]``. The store, the loop, the scheduler and the
parts of the service are the daemon's own, in this process and without Ray: all nodes are full. ``ours`` are seconds of submissions to the long queue,
``empty`` those to an empty one; ``restart`` is the time for which a daemon reads before it connects to Ray. ``--slurm N`` (as root, with slurm-wlm) measures slurmctld with N queued jobs beside it: ``sbatch``, the whole
process, to an empty and to the long queue, the memory of each job, and the time from the start of slurmctld until it answers. Both are wall time, and say little on a busy machine; ``processor`` has the same as processor time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec.structs import replace

from benchmarks.measure import parser, report, result, summary
from benchmarks.peers.slurm import TUNING, Slurm, why_not
from benchmarks.simulate_scale import queue_state
from orchestrator.api.service import Caller, JobFilter, SubmitRequest
from orchestrator.core import events as ev
from orchestrator.core.ids import JobId
from orchestrator.daemon.daemon import Recovery
from orchestrator.daemon.loop import Loop
from orchestrator.daemon.metrics import Metering
from orchestrator.daemon.nodes.care import LoopNodes
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.requests.reader import JobReader, LiveFacts
from orchestrator.daemon.requests.submissions import Submissions
from orchestrator.daemon.stopping import StopRequest
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.runtime.pools import Pools
from orchestrator.spec.settings import Settings
from orchestrator.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.core.estimates import TimeLeft
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress

TARGETS: Final = {"p99_ratio": 1.2, "status_seconds": 0.5, "bytes_per_job": 2048, "restart_seconds": 5.0}
YAML: Final = "version: 1\nname: waits\nentrypoint: sleep 1\nworking_dir: null\nresources: {num_workers: 2}\n"
LIVE: Final = frozenset({"PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "SUSPENDED"})
AT_ONCE: Final = 500
WARM_UP: Final = 5
FILLING_CLIENTS: Final = 8


class _Nothing:
    """Stand-in without progress or counters."""

    def of(self, _: JobId) -> JobProgress | None:
        return None

    def left(self, _: JobId) -> TimeLeft | None:
        return None

    async def recall(self, _: object) -> None:
        pass

    def submitted(self, _: float) -> None:
        pass

    async def at_start(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    def commit_failed(self) -> None:
        pass


async def _none(*_: object) -> Any:
    return []


class Desk:
    """The daemon's parts that submissions and ``orch status`` go through, on a store in ``home``."""

    def __init__(self, home: Path, nodes: str) -> None:
        self.settings = Settings.from_environ({"ORCH_HOME": str(home)})
        self.settings.paths.jobs.mkdir(parents=True, exist_ok=True)
        self.store = SqliteStore.open(home / "store.db", reserve=None, min_free_bytes=0)
        self.loop = Loop(
            store=self.store,
            runtime=lambda: None,
            on_change=lambda _: None,
            on_end=lambda _: None,
            log=structlog.get_logger(),
        )
        self._pools, self._full = Pools(), queue_state(0, nodes)
        stop, nothing = StopRequest(), _Nothing()
        self._known = LoopNodes(self.loop, NodeQuarantine(), stop)
        self.reader = JobReader(self.loop, self.store, self.settings.paths, self._pools, nothing, LiveFacts())
        self.submissions = Submissions(
            self.loop,
            self.store,
            self.settings,
            admission=stop,
            nodes=self._known,
            counter=nothing,
            blind_to=_none,
            resume_path=_none,
            pool=self._pools.submissions,
            under_way=SubmissionsUnderWay(self.settings.paths, self._pools.submissions),
        )

    async def recover(self) -> None:
        """Read what a daemon reads when it starts."""
        nothing = _Nothing()
        history = (Metering(self.settings, time.time()).observe,)
        await Recovery(
            self.loop,
            self.store,
            intake=nothing,  # type: ignore[arg-type]  # no job has reported
            quarantine=NodeQuarantine(),
            history=history,
            log=structlog.get_logger(),
        ).run()

    def fill(self) -> None:
        """Put a gang on each node, which only the loop has."""
        for job in self._full.jobs.values():
            sequence = job.submission.sequence - len(self._full.jobs) - 1
            held = replace(job, submission=replace(job.submission, sequence=sequence))
            self.loop.jobs[job.id] = self.loop.decided[job.id] = held
        self._known.set(dict(self._full.nodes))

    async def submit(self, number: int) -> None:
        """Submit a job as the service does, which includes the loop's round after it."""
        request = SubmitRequest(
            yaml=YAML,
            source="job.yaml",
            idempotency_key=f"key-{number}",
            cwd="/",
            path="/usr/bin",
            python=sys.executable,
        )
        await self.submissions.submit(request, Caller(uid=os.getuid(), gid=os.getgid(), user="ada", is_owner=True))

    async def status(self) -> int:
        """Make the answer to ``orch status``; return its number of jobs."""
        views = await self.reader.jobs(JobFilter(states=LIVE))
        return len([view.to_json() for view in views])

    def close(self) -> None:
        """Close the pools and the store."""
        self._pools.close()
        self.store.close()


def main() -> None:
    """Measure and report."""
    made = parser("submissions, status, memory and a restart beside a long queue", 200)
    made.add_argument("--queued", type=int, default=10_000)
    made.add_argument("--nodes", default="1250x8", help="all full")
    made.add_argument("--slurm", type=int, default=0, help="queued jobs of a slurmctld beside it (default: none)")
    options = made.parse_args()
    if options.slurm and (reason := why_not()):
        sys.exit(f"no Slurm to compare with: {reason}")
    found = measure(options.queued, options.nodes, options.pairs)
    if options.slurm:
        with Slurm(TUNING, cpus=2) as slurm:
            found["slurm"] = slurm_depth(slurm, options.slurm, options.pairs)
    report(found, options.json)


def slurm_depth(slurm: Slurm, queued: int, rounds: int, clients: int = FILLING_CLIENTS) -> dict[str, Any]:
    """Return the same for a slurmctld with a node that takes no job."""
    script = slurm.home / "waits.sh"
    script.write_text("#!/bin/sh\nsleep 1\n")
    command = ["sbatch", "--quiet", "--output=/dev/null", str(script)]
    slurm.drain()
    empty = [_seconds(lambda: slurm.ask(*command)) for _ in range(rounds + WARM_UP)]
    slurm.clear()
    before, each = slurm.controller_bytes(), -(-queued // clients)
    loop = f"i=0; while [ $i -lt {each} ]; do {' '.join(command)} || exit 1; i=$((i+1)); done"
    filling = [subprocess.Popen(["sh", "-c", loop], env=slurm.environ, cwd=slurm.home) for _ in range(clients)]
    codes = [process.wait() for process in filling]
    if any(codes):
        raise RuntimeError("a submission to Slurm failed")
    size = (slurm.controller_bytes() - before) / (each * clients)
    ours = [_seconds(lambda: slurm.ask(*command)) for _ in range(rounds + WARM_UP)]
    stopping = _seconds(slurm.stop_controller)
    return {
        "version": slurm.version(),
        "queued": each * clients,
        "submission": summary(ours[WARM_UP:]),
        "empty": summary(empty[WARM_UP:]),
        "bytes_per_job": size,
        "stop_seconds": stopping,
        "restart_seconds": _seconds(slurm.start_controller),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(queued: int, nodes: str, rounds: int) -> dict[str, Any]:
    """Measure everything."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as home:
        return asyncio.run(_measure(Path(home), queued, nodes, rounds))


async def _measure(home: Path, queued: int, nodes: str, rounds: int) -> dict[str, Any]:
    empty, empty_cpu = await _submissions(home / "empty", nodes, rounds, first=0)
    await _lay_down(home / "long", queued)
    gc.collect()
    before, began, cpu = _resident(), time.perf_counter(), time.process_time()
    desk = Desk(home / "long", nodes)
    await desk.recover()
    restart = {"seconds": time.perf_counter() - began, "processor": time.process_time() - cpu}
    gc.collect()
    size = (_resident() - before) / queued
    gc.freeze()
    desk.close()
    del desk
    ours, ours_cpu = await _submissions(home / "long", nodes, rounds, first=queued)
    status = await _status(home / "long", nodes)
    return result(
        f"submissions to a queue of {queued} jobs",
        "s",
        "lower",
        ours,
        {"empty": empty},
        targets=TARGETS,
        p99_ratio=summary(ours)["p99"] / summary(empty)["p99"],
        processor={"ours": summary(ours_cpu), "empty": summary(empty_cpu)},
        restart=restart,
        bytes_per_job=size,
        status=status,
    )


async def _submissions(home: Path, nodes: str, rounds: int, *, first: int) -> tuple[list[float], list[float]]:
    home.mkdir(exist_ok=True)
    desk = Desk(home, nodes)
    await desk.loop.load()
    desk.fill()
    gc.collect()
    gc.freeze()
    running = asyncio.create_task(desk.loop.run())
    found = [await _timed(lambda n=n: desk.submit(first + n)) for n in range(rounds + WARM_UP)]  # type: ignore[misc]  # mypy cannot infer a default's type
    running.cancel()
    await asyncio.wait([running])
    desk.close()
    return [wall for wall, _ in found[WARM_UP:]], [cpu for _, cpu in found[WARM_UP:]]


async def _status(home: Path, nodes: str) -> dict[str, float]:
    desk = Desk(home, nodes)
    await desk.loop.load()
    wall, cpu = await _timed(desk.status)
    shown = await desk.status()
    desk.close()
    return {"seconds": wall, "processor": cpu, "jobs": shown}


async def _timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - began, time.process_time() - cpu


async def _lay_down(home: Path, queued: int) -> None:
    """Write the queue into the store, as accepted submissions of eight sizes."""
    home.mkdir()
    store = SqliteStore.open(home / "store.db", reserve=None, min_free_bytes=0)
    events = (_accepted(job, number) for number, job in enumerate(_jobs(queued)))
    while batch := [event for _, event in zip(range(AT_ONCE), events, strict=False)]:
        await asyncio.gather(*(store.submit(event) for event in batch))
    store.close()


def _jobs(queued: int) -> list[Job]:
    return list(queue_state(queued, "1x8").jobs.values())[1:]


def _accepted(job: Job, number: int) -> ev.JobSubmitted:
    return ev.JobSubmitted(
        job_id=JobId(f"waits-{number:06}"),
        at=time.time(),
        name=job.name,
        spec=job.spec,
        user="ada",
        uid=os.getuid(),
        idempotency_key=f"laid-{number}",
        python=sys.executable,
        path="/usr/bin",
        work_dir=f"/home/ada/.orch/jobs/waits-{number:06}/work",
        snapshot="",
    )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
