"""How fast the scheduler's code is: a long trace through it, and single decisions beside a long queue.

``python -m benchmarks.simulate_scale [--jobs N] [--queued N] [--pairs N] [--json FILE]``. The trace is synthetic and plays on
64 nodes of 8 GPUs; a decision is the daemon's own ``decide`` for 1,250 full nodes of 8 GPUs and so many queued jobs of eight
sizes. Both are processor time of one thread, so other load on the machine does not lengthen them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import parser, report, result, summary
from orchestrator.analysis.simulation.comparison import parse_nodes
from orchestrator.analysis.simulation.synthetic import synthetic_trace
from orchestrator.core import events as ev
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.simulation.engine import Simulation
from orchestrator.core.simulation.policies import POLICIES
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

TARGET_SECONDS: Final = 60.0
TARGET_DECISION_SECONDS: Final = 0.010
AT: Final = 1_700_000_000.0


def main() -> None:
    """Measure both."""
    made = parser("the scheduler's code on long traces and long queues", 5)
    made.add_argument("--jobs", type=int, default=1_000_000, help="of the trace")
    made.add_argument("--queued", type=int, default=100_000, help="jobs that wait")
    made.add_argument("--nodes", default="1250x8", help="of a decision; all full")
    options = made.parse_args()
    report(measure(options.jobs, options.queued, options.nodes, options.pairs), options.json)


def measure(jobs: int, queued: int, nodes: str, rounds: int) -> dict[str, Any]:
    """Seconds of the whole trace, and of decisions."""
    state = queue_state(queued, nodes)
    decisions = [_seconds_of_a_decision(state) for _ in range(rounds)]
    return result(
        f"a trace of {jobs} jobs through the scheduler",
        "s of processor time",
        "lower",
        [_seconds_of_a_trace(jobs)],
        {},
        target=TARGET_SECONDS,
        decision={"queued": queued, "nodes": nodes, "target_p99": TARGET_DECISION_SECONDS, **summary(decisions)},
    )


def _seconds_of_a_trace(jobs: int) -> float:
    nodes = parse_nodes("64x8")
    trace = synthetic_trace("exponential", jobs=jobs, gpus=512, load=0.9, seed=1)
    simulation = Simulation(trace, nodes, POLICIES["orch"])
    began = time.process_time()
    outcome = simulation.run()
    took = time.process_time() - began
    if len(outcome.ran) != jobs:
        raise RuntimeError(f"{len(outcome.ran)} of {jobs} jobs ran")
    return took


def _seconds_of_a_decision(state: State) -> float:
    began = time.thread_time()
    commands = decide(state, AT + 1)
    took = time.thread_time() - began
    if commands.events:
        raise RuntimeError(f"a full cluster started something: {commands.events[0].kind}")
    return took


def queue_state(queued: int, nodes: str) -> State:
    """Nodes that are full, a job on each, and a queue."""
    known = parse_nodes(nodes)
    found = []
    for number, node in enumerate(known.values(), start=1):
        job = _job(number, ranks=int(node.gpus))
        event = ev.AttemptStarted(job_id=job.id, at=AT, attempt=1, gang=1, nodes=(node.id,) * int(node.gpus))
        found.append(fold(fold(job, event), ev.AttemptRunning(job_id=job.id, at=AT, attempt=1, pids=())))
    found += [_job(len(known) + number, ranks=1 + number % 8) for number in range(1, queued + 1)]
    return State(jobs={job.id: job for job in found}, nodes=known)


def _job(number: int, ranks: int) -> Job:
    resources = ResourcesSpec(num_workers=ranks, resources_per_worker=WorkerResources(gpu=1.0))
    spec = JobSpec(name="queued", entrypoint="true", resources=resources)
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
