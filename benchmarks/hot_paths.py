"""The hot paths of the daemon, the exporter and a save, on fixed inputs: ``python -m benchmarks.hot_paths NAME REPEATS``.

``benchmarks.instructions`` runs this under an instruction counter. Each path is prepared once and then run REPEATS times, so
the difference of two runs is the work of the path alone. Inputs hold no clock, no randomness and no machine's facts.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.cluster import Node
from orchestrator.core.facts.faults import ProcessSignal
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import change_of, fold, submitted
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.states import FailureClass, JobState
from orchestrator.spec.job import parse_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.job.record import Job

T0: Final = 1_700_000_000.0
QUEUED: Final = 300
RANKS: Final = 8
YAML: Final = """\
version: 1
name: digits
entrypoint: python train.py --epochs 5 --lr 0.1
outputs: ["out/**"]
env: {TOKENIZERS_PARALLELISM: "false"}
resources:
  num_workers: 8
  resources_per_worker: {gpu: 1, cpu: 2, memory: 8GB}
priority: 60
max_duration: 24h
stop_duration: 5m
retry:
  max_restarts: {user: 0, infra: 10, hang: 2, preemption: unlimited}
  backoff: {initial: 1s, max: 10m}
  exit_codes: {retry: [75]}
checkpoint: {keep: 3, score_attribute: loss, score_order: min}
labels: {team: vision}
"""


def parse(_: ExitStack) -> Callable[[], object]:
    """Return a call that parses a job.yaml of usual size into a typed spec."""
    return lambda: parse_job(YAML)


def _submission(number: int) -> ev.JobSubmitted:
    spec = parse_job(YAML)
    job_id = JobId(f"digits-{number:06d}")
    return ev.JobSubmitted(
        job_id=job_id,
        at=T0 + number,
        name=spec.name,
        spec=spec,
        user="ada",
        uid=1000,
        idempotency_key=f"key-{number}",
        python="/usr/bin/python3",
        path="/usr/bin",
        work_dir=f"/home/ada/.orch/jobs/{job_id}/work",
        snapshot="sha256:1",
    )


def _life(job_id: JobId) -> Sequence[ev.Event]:
    """Return the events of a job that runs, loses rank 3 and starts again."""
    seats = tuple(
        ev.RankPlacement(
            rank=rank,
            node_id="n0",
            node_name="n0",
            gpu_ids=(str(rank),),
            gpu_uuids=(f"GPU-{rank}",),
            actor_pid=10 + rank,
        )
        for rank in range(RANKS)
    )
    failure = ev.Failure(failure_class=FailureClass.INFRA, cause=ProcessSignal(rank=3, signal=9), rank=3)
    return (
        ev.AttemptStarted(job_id=job_id, at=T0 + 1, attempt=1, gang=1, nodes=("n0",) * RANKS),
        ev.GangPlaced(job_id=job_id, at=T0 + 2, gang=1, seats=seats),
        ev.AttemptRunning(job_id=job_id, at=T0 + 3, attempt=1, pids=tuple(range(100, 100 + RANKS))),
        *(
            ev.RankExited(job_id=job_id, at=end.at, attempt=1, exit=end)
            for end in (ev.Exit(rank=n, at=T0 + 4 + n / 100, exit_code=None, signal=9) for n in range(RANKS))
        ),
        ev.AttemptFailed(
            job_id=job_id,
            at=T0 + 5,
            attempt=1,
            failure=failure,
            failed_at=T0 + 4,
            retry=True,
            keep_gang=True,
            not_before=T0 + 5,
        ),
    )


def fold_life(_: ExitStack) -> Callable[[], object]:
    """Return a call that folds the events of a failing attempt of eight ranks into a job's record."""
    submission = _submission(1)
    events = _life(submission.job_id)

    def run() -> Job:
        job = submitted(submission, 1)
        for event in events:
            job = fold(job, event)
        return job

    if run().state is not JobState.RECOVERING:
        raise AssertionError("the events of this benchmark no longer make a job recover")
    return run


def decide_queue(_: ExitStack) -> Callable[[], object]:
    """Return a call that decides with 300 queued jobs and eight nodes with one free GPU each, for the first job."""
    jobs = {job.id: job for job in (submitted(_submission(n), n) for n in range(QUEUED))}
    nodes = {
        f"n{n}": Node(id=f"n{n}", name=f"n{n}", cpus=64.0, gpus=8.0, other_gpus=7.0, memory_bytes=1 << 40)
        for n in range(8)
    }
    state = State(jobs=jobs, nodes=nodes)
    return lambda: decide(state, T0 + 1000)


def write(resources: ExitStack) -> Callable[[], object]:
    """Return a call that folds a submission and the events of its life and writes them to the SQLite store."""
    from orchestrator.store.store import Store

    folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="orch-hot-")))
    store = Store.open(folder / "store.sqlite3", reserve=folder / "reserve", reserve_bytes=4096)
    resources.callback(store.close)
    numbers = itertools.count(1)

    async def once() -> None:
        submission = _submission(next(numbers))
        job, _ = await store.submit(submission)
        for event in _life(submission.job_id):
            change = change_of(job, event)
            if change is None:
                raise AssertionError(f"{event.kind} of this benchmark no longer changes the job")
            await store.append([change])
            job = change.after

    return lambda: asyncio.run(once())


def exporter_page(_: ExitStack) -> Callable[[], object]:
    """Return a call that renders a page of eight GPUs, each with a new sample."""
    from prometheus_client import generate_latest

    from orchestrator.gpu.drivers.simulated import open_simulated
    from orchestrator.gpu.exporter import GpuExporter
    from orchestrator.gpu.sample import Sample

    exporter = GpuExporter(open_simulated(8, "n0", None), "n0")
    counter = itertools.count(1)

    def run() -> bytes:
        number = next(counter)
        for gpu in exporter.gpus:
            gpu.sampler.latest = Sample(
                gpu_uuid=gpu.sampler.info.uuid,
                timestamp=T0 + number,
                monotonic=time.monotonic(),
                utilization=number % 100 / 100,
                memory_used_bytes=(number % 80) << 30,
                memory_total_bytes=80 << 30,
                power_watts=300.0 + number % 100,
                energy_joules=300.0 * number,
                temperatures=(("gpu", 40.0 + number % 40),),
                clocks=(("sm", 1.7e9), ("memory", 2.6e9)),
            )
        return generate_latest(exporter.registry)

    return run


def snapshot_plan(_: ExitStack) -> Callable[[], object]:
    """Return a call that recognises the next state of a model of 100 arrays as one with a copy plan."""
    import numpy as np

    from orchestrator.checkpoint.snapshots.encode_plan import PartPlan

    def state(step: int) -> dict[str, object]:
        arrays = {f"layers.{n}.weight": np.zeros((8, 8), dtype=np.float32) for n in range(100)}
        return {"model": arrays, "step": step, "lr": 0.1, "history": [0.1, 0.2, 0.3]}

    plan = PartPlan(state(0))
    states = [state(step) for step in range(4)]
    turn = itertools.count()

    def run() -> None:
        if not plan.update(states[next(turn) % len(states)]):
            raise AssertionError("the plan was not recognised again")

    return run


PATHS: Final = {
    "parse": parse,
    "decide": decide_queue,
    "fold": fold_life,
    "write": write,
    "exporter_page": exporter_page,
    "snapshot_plan": snapshot_plan,
}


def main(name: str, repeats: int) -> None:
    """Prepare a path, run it once to fill every cache, then ``repeats`` times."""
    with ExitStack() as resources:
        run = PATHS[name](resources)
        run()
        for _ in range(repeats):
            run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
