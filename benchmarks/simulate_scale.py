"""Measures the speed of the scheduler's code: a long trace through it, and single decisions beside a long queue.

``python -m benchmarks.simulate_scale [--jobs N] [--queued N] [--pairs N] [--json FILE]``. The trace is synthetic and plays on
64 nodes of 8 GPUs; a decision is the daemon's own ``decide``, on the index that the daemon keeps, for 1,250 nodes of 8 GPUs and a queue
of jobs of eight sizes: after each end of a gang the decision that starts others in its place, and the one after that, which finds
nothing free; the same where every job has a ``max_duration``, so that each decision looks for jobs to backfill. All are processor time
of one thread, so other load on the machine does not add to them, though it makes a core slower.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import parser, report, result, summary
from orchestrator.analysis.simulation import parse_nodes, synthetic_trace
from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByLimit
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.simulation import Simulation
from orchestrator.core.states import StopPurpose
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

TARGET_SECONDS: Final = 30.0
TARGET_DECISION_SECONDS: Final = 0.020
AT: Final = 1_700_000_000.0


def main() -> None:
    """Measure both."""
    made = parser("the scheduler's code on long traces and long queues", 100)
    made.add_argument("--jobs", type=int, default=100_000, help="of the trace")
    made.add_argument("--queued", type=int, default=10_000, help="jobs that wait")
    made.add_argument("--nodes", default="1250x8", help="of a decision; all full")
    options = made.parse_args()
    report(measure(options.jobs, options.queued, options.nodes, options.pairs), options.json)


def measure(jobs: int, queued: int, nodes: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of the whole trace, and of decisions."""
    return result(
        f"a trace of {jobs} jobs through the scheduler",
        "s of processor time",
        "lower",
        [_seconds_of_a_trace(jobs)],
        {},
        target=TARGET_SECONDS,
        decision=_decision_of(queued, nodes, rounds, limited=False),
        decision_with_limits=_decision_of(queued, nodes, rounds, limited=True),
    )


def _decision_of(queued: int, nodes: str, rounds: int, *, limited: bool) -> dict[str, Any]:
    found = summary(_seconds_of_decisions(queued, nodes, rounds, limited=limited))
    return {"queued": queued, "nodes": nodes, "target_p99": TARGET_DECISION_SECONDS, **found}


def _seconds_of_a_trace(jobs: int) -> float:
    nodes = parse_nodes("64x8")
    trace = synthetic_trace("exponential", jobs=jobs, gpus=512, load=0.9, seed=1)
    simulation = Simulation(trace, nodes, "orch")
    gc.collect()
    gc.freeze()
    gc.disable()  # many records are kept, and none of them is garbage
    began = time.process_time()
    outcome = simulation.run()
    took = time.process_time() - began
    gc.enable()
    gc.unfreeze()
    if len(outcome.ran) != jobs:
        raise RuntimeError(f"{len(outcome.ran)} of {jobs} jobs ran")
    return took


def _seconds_of_decisions(queued: int, nodes: str, ends: int, *, limited: bool = False) -> list[float]:
    """Return the seconds of two decisions for each of ``ends`` ends of gangs."""
    full = queue_state(queued, nodes, limited=limited)
    jobs = LiveJobs(full.jobs.values())
    state = replace(full, jobs=jobs)
    _decision(state, AT + 1)
    gc.collect()
    gc.freeze()  # as the daemon does when it has read its queue
    found = []
    for number in range(ends):
        now = AT + 2 + number
        _end_one(jobs, now)
        took, commands = _decision(state, now)
        if not any(isinstance(event, ev.AttemptStarted) for event in commands.events):
            raise RuntimeError("nothing was started where a gang had ended")
        for event in commands.events:
            job = fold(jobs[event.job_id], event)
            jobs[job.id] = fold(job, ev.AttemptRunning(job_id=job.id, at=now, attempt=job.attempt_number, pids=()))
        found += [took, _decision(state, now)[0]]
    return found


def _end_one(jobs: LiveJobs, now: float) -> None:
    """End the gang that has run longest."""
    job = next(iter(jobs.holding.values()))
    for event in (
        ev.StopRequested(job_id=job.id, at=now, purpose=StopPurpose.CANCEL, by=ByLimit(key="benchmark"), deadline=now),
        ev.AttemptGone(job_id=job.id, at=now, attempt=job.attempt_number),
        ev.GangReleased(job_id=job.id, at=now, gang=job.gang),
    ):
        job = fold(job, event)
    jobs[job.id] = job
    del jobs[job.id]


def _decision(state: State, now: float) -> tuple[float, Commands]:
    began = time.thread_time()
    commands = decide(state, now)
    return time.thread_time() - began, commands


def queue_state(queued: int, nodes: str, *, limited: bool = False) -> State:
    """Return full nodes with a job on each, and a queue; where ``limited``, each job has a ``max_duration``."""
    known = parse_nodes(nodes)
    specs = {ranks: _spec(ranks, limited=limited) for ranks in {*range(1, 9), *(int(n.gpus) for n in known.values())}}
    found = []
    for number, node in enumerate(known.values(), start=1):
        job = _job(number, specs[int(node.gpus)])
        event = ev.AttemptStarted(job_id=job.id, at=AT, attempt=1, gang=1, nodes=(node.id,) * int(node.gpus))
        found.append(fold(fold(job, event), ev.AttemptRunning(job_id=job.id, at=AT, attempt=1, pids=())))
    found += [_job(len(known) + number, specs[1 + number % 8]) for number in range(1, queued + 1)]
    return State(jobs={job.id: job for job in found}, nodes=known)


def _spec(ranks: int, *, limited: bool) -> JobSpec:
    """Return one spec for all jobs of a size, as the store makes it; its limit is 1 h and 1 h for each rank."""
    resources = ResourcesSpec(num_workers=ranks, resources_per_worker=WorkerResources(gpu=1.0))
    limit = timedelta(hours=1 + ranks) if limited else None
    return JobSpec(name="queued", entrypoint="true", resources=resources, max_duration=limit)


def _job(number: int, spec: JobSpec) -> Job:
    event = ev.JobSubmitted(
        job_id=JobId(f"job-{number}"),
        at=AT,
        name=spec.name,
        spec=spec,
        user="ada",
        uid=0,
        idempotency_key="",
        python="",
        path="",
        work_dir="",
        snapshot="",
    )
    return submitted(event, number)


if __name__ == "__main__":
    main()
