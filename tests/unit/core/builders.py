"""Builders of jobs and their events, with defaults for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from orchestrator.core import events as ev
from orchestrator.core.cluster import Node
from orchestrator.core.facts import faults
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.reasons import ByUser
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Job, LostGang, Submission
from orchestrator.core.lifecycle.fold import Change, change_of, fold, submitted
from orchestrator.core.states import FailureClass, JobState, StopPurpose
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.facts.fact import Fact

T0 = 1_700_000_000.0
ID = JobId("digits-abc234")


def make_spec(
    *, workers: Any = 2, gpu: float = 1.0, cpu: float = 1.0, memory_bytes: int | None = None, **keys: Any
) -> JobSpec:
    """Return a spec of ``workers`` ranks (a number, a range, "auto"); ``strategy``, ``nodes``, ``node_labels`` and ``gpu_model`` are for its resources, the rest for itself."""
    worker = WorkerResources(
        gpu=float(gpu), cpu=float(cpu), memory_bytes=memory_bytes, gpu_model=keys.pop("gpu_model", None)
    )
    resources = ResourcesSpec(
        num_workers=workers,
        auto=keys.pop("auto", None),
        resources_per_worker=worker,
        placement_strategy=keys.pop("strategy", "PACK"),
        nodes=keys.pop("nodes", ()),
        node_labels=keys.pop("node_labels", {}),
    )
    defaults = {"name": "digits", "entrypoint": "python train.py", "stop_duration": timedelta(seconds=30)}
    return JobSpec(**{**defaults, **keys, "resources": resources})


def submission(spec: JobSpec | None = None, *, job_id: str = ID, at: float = T0, **fields: Any) -> ev.JobSubmitted:
    """Return a submission of ``spec``; its idempotency key is made from the id unless given."""
    spec = spec or make_spec()
    return ev.JobSubmitted(
        **{
            "job_id": JobId(job_id),
            "at": at,
            "name": spec.name,
            "spec": spec,
            "user": "ada",
            "uid": 1000,
            "idempotency_key": f"key-{job_id}",
            "python": "/usr/bin/python3",
            "path": "/usr/bin",
            "work_dir": f"/home/ada/.orch/jobs/{job_id}/work",
            "snapshot": "sha256:1",
            **fields,
        }
    )


def pending(spec: JobSpec | None = None, *, sequence: int = 1, **fields: Any) -> Job:
    """Return a waiting job."""
    return submitted(submission(spec, **fields), sequence)


def after(job: Job, *events: ev.Event) -> Job:
    """Return the record after ``events``."""
    for event in events:
        job = fold(job, event)
    return job


def chain(job: Job, *events: ev.Event) -> list[Change]:
    """Return the changes that ``events`` make, one after the other."""
    changes = []
    for event in events:
        change = change_of(job, event)
        assert change is not None, f"{event.kind} changes nothing"
        changes.append(change)
        job = change.after
    return changes


def started(job: Job, *, at: float = T0 + 1, nodes: tuple[str, ...] = (), gang: int | None = None) -> ev.AttemptStarted:
    """Return the start of the next attempt of ``job``, by default on node "a" and in a new gang."""
    nodes = nodes or ("a",) * job.num_workers
    gang = job.gang + 1 if gang is None else gang
    return ev.AttemptStarted(job_id=job.id, at=at, attempt=job.attempt_number + 1, gang=gang, nodes=nodes)


def seats(job: Job, nodes: Iterable[str]) -> tuple[ev.RankPlacement, ...]:
    """Return a seat for every rank."""
    return tuple(
        ev.RankPlacement(rank=r, node_id=n, node_name=n, gpu_ids=(str(r),), gpu_uuids=(f"GPU-{r}",), actor_pid=100 + r)
        for r, n in enumerate(nodes)
    )


def starting(job: Job | None = None, **fields: Any) -> Job:
    """Return a job with a placed gang and ranks that are not up."""
    job = job or pending()
    job = fold(job, started(job, **fields))
    return fold(job, ev.GangPlaced(job_id=job.id, at=T0 + 2, gang=job.gang, seats=seats(job, job.nodes)))


def running(job: Job | None = None, *, at: float = T0 + 3, **fields: Any) -> Job:
    """Return a job with ranks that are up."""
    job = starting(job, **fields)
    pids = tuple(200 + r for r in range(job.num_workers))
    return fold(job, ev.AttemptRunning(job_id=job.id, at=at, attempt=job.attempt_number, pids=pids))


def up(job: Job, *, at: float = T0 + 3, attempt: int = 1) -> ev.AttemptRunning:
    """Return the event that every rank of a newly ordered attempt is up, without their process ids."""
    return ev.AttemptRunning(job_id=job.id, at=at, attempt=attempt, pids=())


def exited(job: Job, rank: int = 0, **fields: Any) -> ev.RankExited:
    """Return the end of rank ``rank``, with exit code 1 unless given."""
    values: dict[str, Any] = {"exit_code": 1, "signal": None, "at": T0 + 10, **fields}
    if values["signal"] is not None:
        values["exit_code"] = None
    end = ev.Exit(rank=rank, **values)
    return ev.RankExited(job_id=job.id, at=end.at, attempt=job.attempt_number, exit=end)


def cause(code: str, rank: int | None = 0) -> Fact:
    """Return a cause with this code."""
    known: dict[str, Fact] = {
        "signal": faults.ProcessSignal(rank=rank, signal=9),
        "exception": faults.PythonException(rank=rank, error_type="ValueError"),
        "peer_lost": faults.PeerLost(rank=rank),
        "retry_exit_code": faults.RetryExitCode(rank=rank, exit_code=75),
        "gang_lost": faults.ActorLost(rank=rank),
        "gpu_lost": faults.GpuLost(rank=rank),
        "gpu_ecc": faults.GpuEcc(rank=rank),
        "gpu_xid": faults.Xid(rank=rank, number=119),
        "host_oom_kill": faults.OomKill(rank=rank),
        "startup_timeout": faults.StartupTimeout(limit_seconds=600.0),
        "disk_full": faults.DiskFull(rank=rank),
        "stopped_from_outside": faults.TerminatedFromOutside(rank=rank, signal=15),
    }
    return known[code]


def failure(failure_class: FailureClass = FailureClass.INFRA, *, code: str = "signal", **fields: Any) -> ev.Failure:
    """Return a failure of a class, by default of rank 0 by SIGKILL."""
    rank = fields.get("rank")
    return ev.Failure(**{"failure_class": failure_class, "cause": cause(code, 0 if rank is None else rank), **fields})


def failed(job: Job, *, retry: bool = True, keep_gang: bool = True, **fields: Any) -> ev.AttemptFailed:
    """Return the failure of the current attempt."""
    values: dict[str, Any] = {"failure": failure(), "failed_at": T0 + 10, "at": T0 + 10, "not_before": 0.0, **fields}
    return ev.AttemptFailed(job_id=job.id, attempt=job.attempt_number, retry=retry, keep_gang=keep_gang, **values)


def stop(job: Job, purpose: StopPurpose, *, at: float = T0 + 20, by: str = "ada") -> ev.StopRequested:
    """Return a request to stop."""
    return ev.StopRequested(job_id=job.id, at=at, purpose=purpose, by=ByUser(name=by), deadline=at + 30)


def gone(job: Job, *, at: float = T0 + 21) -> ev.AttemptGone:
    """Return the confirmation that the current attempt is gone."""
    return ev.AttemptGone(job_id=job.id, at=at, attempt=job.attempt_number)


def released(job: Job, *, at: float = T0 + 22) -> ev.GangReleased:
    """Return the confirmation that the current gang is gone."""
    return ev.GangReleased(job_id=job.id, at=at, gang=job.gang)


def leaves_files(job: Job, *, at: float = T0 + 22) -> ev.GangReleased:
    """Return the release of the job's gang, whose files are still to be collected."""
    return ev.GangReleased(job_id=job.id, at=at, gang=job.gang, files=True)


def collected(job: Job, *, at: float = T0 + 23) -> ev.FilesCollected:
    """Return the end of the collection of files."""
    return ev.FilesCollected(job_id=job.id, at=at, gang=job.gang)


def lost(job: Job, *, at: float = T0 + 11, not_before: float = 0.0, reason: Fact | str = "node a died") -> ev.GangLost:
    """Return the loss of a node by the current gang; a text stands for a fact that cannot be read."""
    return ev.GangLost(job_id=job.id, at=at, gang=job.gang, rank=0, reason=fact_from(reason), not_before=not_before)


def checkpoint(job: Job, step: int, *, path: str = "", at: float = T0 + 5) -> ev.CheckpointSaved:
    """Return a checkpoint of the current attempt, in memory unless ``path`` is given."""
    return ev.CheckpointSaved(job_id=job.id, at=at, attempt=job.attempt_number, step=step, path=path)


def finished(job: Job, state: JobState, *, at: float = T0 + 30, **fields: Any) -> ev.JobFinished:
    """Return the end of the job."""
    return ev.JobFinished(
        **{"job_id": job.id, "at": at, "state": state, **fields, "reason": fact_from(fields.get("reason", "because"))}
    )


def in_state(state: JobState) -> Job:
    """Return a job in ``state``, reached by legal events."""
    waits, runs = pending(), running()
    match state:
        case JobState.PENDING:
            return waits
        case JobState.STARTING:
            return starting()
        case JobState.RUNNING:
            return runs
        case JobState.RECOVERING:
            return after(runs, exited(runs), failed(runs))
        case JobState.DRAINING:
            return after(runs, stop(runs, StopPurpose.PAUSE))
        case JobState.SUSPENDED:
            return after(waits, ev.JobSuspended(job_id=waits.id, at=T0 + 1, by=ByUser(name="ada")))
        case JobState.SUCCEEDED:
            zeros = [exited(runs, rank=r, exit_code=0) for r in range(runs.num_workers)]
            won = ev.AttemptSucceeded(job_id=runs.id, at=T0 + 11, attempt=1)
            return after(runs, *zeros, won, released(runs), finished(runs, state, exit_code=0))
        case JobState.FAILED:
            return after(
                runs, exited(runs), failed(runs, retry=False), released(runs), finished(runs, state, exit_code=1)
            )
        case JobState.CANCELLED:
            return after(waits, finished(waits, state))


def node(node_id: str, *, gpus: float = 8, cpus: float = 64, **fields: Any) -> Node:
    """Return a node with eight GPUs."""
    return Node(**{"id": node_id, "name": node_id, "gpus": gpus, "cpus": cpus, "memory_bytes": 2**38, **fields})


def nodes(*found: Node) -> dict[str, Node]:
    """Return nodes by their ids."""
    return {n.id: n for n in found}


_SUBMITTED = frozenset(Submission.__struct_fields__)
_HELD = frozenset({"nodes", "seats", "pids", "degraded"})


def changed(job: Job, **fields: Any) -> Job:
    """Return the record with fields of it, its submission, its phase or its gang set, for values that would take many events to reach."""
    phase = {name: fields.pop(name) for name in list(fields) if name in job.phase.__struct_fields__}
    held = {name: fields.pop(name) for name in list(fields) if name in _HELD}
    if fields.pop("gang_lost", False):
        phase["gang"] = LostGang(nodes=job.nodes, seats=job.seats)
    if held:
        phase["gang"] = replace(job.held, **held)  # type: ignore[type-var]  # it has one
    sent = {name: fields.pop(name) for name in list(fields) if name in _SUBMITTED}
    return replace(job, submission=replace(job.submission, **sent), phase=replace(job.phase, **phase), **fields)
