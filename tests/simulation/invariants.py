"""Invariants after every step, and at the end. Each check raises AssertionError with a description of the violation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import MaxDuration
from orchestrator.core.facts.reasons import ByForce, Cancelled
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from tests.simulation.world import World

SLACK_SECONDS = 0.5
LIVE = frozenset({AttemptState.STARTING, AttemptState.RUNNING, AttemptState.DRAINING})
FAILED = frozenset({AttemptState.FAILED, AttemptState.LOST, AttemptState.PREEMPTED})
LAST_ATTEMPT = {
    JobState.SUCCEEDED: frozenset({AttemptState.SUCCEEDED}),
    JobState.CANCELLED: frozenset({*FAILED, AttemptState.ABORTED}),
    JobState.FAILED: frozenset({*FAILED, AttemptState.ABORTED}),
    JobState.SUSPENDED: frozenset({*FAILED, AttemptState.ABORTED}),
    JobState.PENDING: frozenset({*FAILED, AttemptState.ABORTED}),
}


ABANDONED_SECONDS = 60.0


def check(world: World) -> None:
    """Check everything that must hold between any two steps."""
    recorded = {**world.truth.ended, **world.jobs}
    for job_id in world.truth.promises:
        if job_id not in recorded:
            recorded[job_id] = _newly_ended(world, job_id)
    for job in [j for j in recorded.values() if world.truth.looked_at.get(j.id) is not j]:
        _attempts_agree_with_the_job(world, job)
        _budgets_are_kept(job)
        _stops_are_kept(world, job)
        world.truth.looked_at[job.id] = job
    for job in world.jobs.values():
        _waits_are_bounded(world, job)
        _gang_is_whole_or_absent(job)
        _checkpoint_is_a_real_one(world, job)
    _cluster_is_as_recorded(world, recorded)
    _no_gpu_is_held_twice(world, world.jobs.values())


def check_record(world: World) -> None:
    """Check that stored records equal the fold of their events and the daemon's jobs. Slower than the others: it reads every event."""
    _ended_jobs_stay_as_they_are(world)
    problems = world.run(world.store.verify())
    assert not problems, f"record differs from its events: {problems}"
    for job in world.jobs.values():
        assert world.run(world.store.job(job.id)) == job, f"{job.id} is shown otherwise than it is stored"
    stored = {job.id for job in world.run(world.store.load_live())}
    assert stored == set(world.jobs), "live jobs differ from those that are stored"


def check_end(world: World) -> None:
    """Check what must hold once every job has ended."""
    check(world)
    check_record(world)
    world.cluster.run_until(world.now + ABANDONED_SECONDS)  # what was given up ends once its node answers
    assert not world.cluster.gangs, "a gang is left"
    assert not list(world.cluster.processes), "a process is left"
    assert not any(node.held for node in world.cluster.nodes.values()), "something is held on a node"
    ended = world.truth.ended
    assert set(world.run(world.store.untidied())) == set(ended), "jobs that ended are not to be tidied, once"
    counts: Counter[JobState] = Counter()
    for found in world.run(world.store.finished_counts()):
        counts[found.state] += found.count
    assert counts == Counter(job.state for job in ended.values()), "ends are counted wrong"
    for job in ended.values():
        _events_agree_with_the_record(world, job)


def _newly_ended(world: World, job_id: JobId) -> Job:
    job = world.run(world.store.job(job_id))
    assert job.state.is_terminal, (
        f"accepted job {job_id} is lost: {job.state} in the store, and not among the live jobs"
    )
    if not _given_up(job):
        assert job_id not in world.cluster.gangs, f"{job_id} ended before its gang was gone"
        assert not world.cluster.processes.of(job_id), f"{job_id} ended before its processes"
    if job.state is JobState.SUCCEEDED:
        _really_succeeded(world, job)
    if isinstance(job.reason, MaxDuration) and job_id in world.truth.first_up:
        ran, limit = world.now - world.truth.first_up[job_id], job.reason.limit_seconds
        assert ran >= limit - SLACK_SECONDS, f"{job_id} ran for {ran} s and ended at its limit of {limit} s"
    promise = world.truth.promises[job_id]
    if promise.cancelled and promise.attempts is not None:
        assert job.state is not JobState.PENDING
    world.truth.ended[job_id] = job
    return job


def _given_up(job: Job) -> bool:
    """Whether the job ended by force, without a confirmed end of its gang: it is cancelled, whatever its ranks did."""
    return isinstance(job.reason, Cancelled) and isinstance(job.reason.by, ByForce)


def _really_succeeded(world: World, job: Job) -> None:
    ends = world.truth.ends.get((job.id, job.attempt_number), {})
    assert sorted(ends) == list(range(job.num_workers)), f"{job.id} SUCCEEDED, and only ranks {sorted(ends)} have ended"
    finished = any(_finished(end.how) for end in ends.values())
    for rank, end in ends.items():
        assert end.how.code == 0, f"{job.id} SUCCEEDED, and rank {rank} ended with {end.how}"
        done = _finished(end.how) or (finished and end.how.last_step is None)
        assert end.ordered is None, f"{job.id} SUCCEEDED, and rank {rank} ended by order: {end.ordered}"
        assert end.stop_seen_at is None or done, f"{job.id} SUCCEEDED, and rank {rank} ended because it was asked to"


def _finished(how: object) -> bool:
    last, total = getattr(how, "last_step", None), getattr(how, "total_steps", None)
    return last is not None and total is not None and last >= total


def _attempts_agree_with_the_job(world: World, job: Job) -> None:
    numbers = [a.number for a in job.attempts]
    assert numbers == list(range(job.past.attempts + 1, job.past.attempts + 1 + len(numbers))), f"{job.id}: {numbers}"
    for attempt, following in zip(job.attempts, job.attempts[1:], strict=False):
        assert attempt.ended_at is not None, f"attempt {attempt.number} of {job.id} never ended, and another began"
        assert attempt.state not in LIVE | {AttemptState.SUCCEEDED}, (
            f"attempt {attempt.number} of {job.id} is {attempt.state}, and another began"
        )
        # An attempt that has ended keeps the times of its clock.
        assert attempt.ended_at <= following.started_at or world.cluster.wall_ahead, (
            f"attempt {attempt.number} of {job.id} ended after the next began"
        )
    if not job.attempts:
        assert job.state in (JobState.PENDING, JobState.SUSPENDED, JobState.CANCELLED, JobState.FAILED)
        return
    last = job.attempts[-1]
    allowed = LAST_ATTEMPT.get(job.state)
    if allowed is not None:
        assert last.state in allowed, f"{job.id} is {job.state}, and its attempt {last.number} is {last.state}"
        assert last.ended_at is not None, f"{job.id} is {job.state}, and its attempt {last.number} has no end"
    assert (last.ended_at is None) == (last.state in LIVE), f"attempt {last.number} of {job.id} is {last.state}: {last}"
    assert last.ended_at is None or last.ended_at >= last.started_at, (
        f"attempt {last.number} of {job.id} ends first: {last}"
    )
    assert (last.failure is not None) <= (last.state in FAILED), f"attempt {last.number} of {job.id}: {last}"
    if job.state in (JobState.STARTING, JobState.RUNNING):
        assert last.gang == job.gang


def _budgets_are_kept(job: Job) -> None:
    limits = job.spec.retry.max_restarts
    most = {FailureClass.USER: limits.user, FailureClass.INFRA: limits.infra, FailureClass.HANG: limits.hang}
    for failure_class, limit in most.items():
        used = job.restarts.get(failure_class.value, 0)
        assert used <= limit, f"{job.id} restarted {used} times for {failure_class}, the budget is {limit}"
    assert job.no_progress <= job.spec.retry.max_no_progress, f"{job.id}: {job.no_progress} restarts without progress"


def _waits_are_bounded(world: World, job: Job) -> None:
    """Check that no step of a clock makes a wait, or the time to stop, longer than it is by itself; nor a run than it was."""
    now = world.daemon.clock.now()
    longest = max(job.spec.retry.backoff.max.total_seconds(), FENCE_SECONDS)
    assert job.not_before <= now + longest + SLACK_SECONDS, f"{job.id} waits for {job.not_before - now} s"
    if job.stop is not None:
        left = job.stop.deadline - now
        assert left <= job.spec.stop_duration.total_seconds() + SLACK_SECONDS, f"{job.id} has {left} s to stop"
    if job.limit_since is not None and job.id in world.truth.first_up:
        counted, ran = now - job.limit_since, world.now - world.truth.first_up[job.id]
        assert not world.daemon.decides or counted <= ran + SLACK_SECONDS, (
            f"{job.id} has run for {ran} s, and {counted} s count"
        )


def _stops_are_kept(world: World, job: Job) -> None:
    promise = world.truth.promises.get(job.id)
    if promise is not None and promise.attempts is not None:
        assert job.attempt_number == promise.attempts, f"{job.id} was stopped, and attempt {job.attempt_number} began"


def _gang_is_whole_or_absent(job: Job) -> None:
    assert len(job.nodes) == (job.num_workers if job.gang_open else 0), f"{job.id}: {job.nodes}"
    assert len(job.seats) in (0, job.num_workers), f"{job.id} has {len(job.seats)} seats"
    assert job.state.may_hold_gang or not job.gang_open, f"{job.id} is {job.state} and holds a gang"
    if job.gang_open:
        strategy, different = job.spec.resources.placement_strategy, len(set(job.nodes))
        assert strategy != "STRICT_PACK" or different == 1, f"{job.id} is to be on one node, and is on {job.nodes}"
        assert strategy != "STRICT_SPREAD" or different == len(job.nodes), f"{job.id} shares nodes: {job.nodes}"


def _checkpoint_is_a_real_one(world: World, job: Job) -> None:
    checkpoints = world.cluster.checkpoints
    known = [*checkpoints.stored.get(job.id, ()), *checkpoints.broken.get(job.id, ())]
    world.truth.saved.update(saved.path for saved in known)
    path = job.checkpoints.path
    assert not path or path in world.truth.saved, f"{job.id} has checkpoint {path}, which was never saved"


def _ended_jobs_stay_as_they_are(world: World) -> None:
    assert not set(world.truth.ended) & set(world.jobs), "a job that has ended lives"
    for job_id, job in world.truth.ended.items():
        now = world.run(world.store.job(job_id))
        assert (now.state, now.attempts) == (job.state, job.attempts), f"{job_id} was {job.state} and is {now.state}"


def _cluster_is_as_recorded(world: World, recorded: dict[JobId, Job]) -> None:
    for job_id, gang in world.cluster.gangs.items():
        job = recorded[job_id]
        if _given_up(job):
            continue
        assert (job.gang, job.gang_open) == (gang.number, True), (
            f"{job_id} has gang {gang.number}, and not in its record"
        )
        assert len(gang.actors) == job.num_workers, f"{job_id} has a part of a gang"
    attempts = {(p.job_id, p.attempt) for p in world.cluster.processes}
    for job_id, number in Counter(job_id for job_id, _ in attempts).items():
        assert number == 1, f"{job_id} has processes of {number} attempts"
    for process in world.cluster.processes:
        job = recorded[process.job_id]
        assert process.attempt <= job.attempt_number, f"{job.id}: attempt {process.attempt} runs and is not recorded"
        earlier = [s.step for s in world.cluster.checkpoints.stored.get(job.id, ()) if s.attempt < process.attempt]
        assert process.began >= max(earlier, default=0), f"{job.id} did not begin at its newest checkpoint"


def _no_gpu_is_held_twice(world: World, jobs: Iterable[Job]) -> None:
    held: Counter[str] = Counter()
    for job in jobs:
        for node_id in job.nodes:
            held[node_id] += job.spec.resources.resources_per_worker.gpu
    for node_id, gpus in held.items():
        assert gpus <= world.cluster.nodes[node_id].node.gpus + 1e-9, f"{gpus:g} GPUs of {node_id} are given away"


def _events_agree_with_the_record(world: World, job: Job) -> None:
    events = [stored.event for stored in world.run(world.store.events(job.id, limit=100_000))]
    ends = [e for e in events if isinstance(e, ev.JobFinished)]
    assert len(ends) == 1, f"{job.id} ended {len(ends)} times"
    restarts = Counter(e.failure.failure_class.value for e in events if isinstance(e, ev.AttemptFailed) and e.retry)
    assert restarts == Counter(job.restarts), f"{job.id}: restarts {dict(job.restarts)}, by its events {dict(restarts)}"
    _progress_is_asked_for(job, events)
    _waits_are_kept(job, events)
    started = [e.attempt for e in events if isinstance(e, ev.AttemptStarted)]
    assert started == list(range(1, job.attempt_number + 1)), f"{job.id} started the attempts {started}"
    cancels = [e for e in events if isinstance(e, ev.StopRequested) and e.purpose is StopPurpose.CANCEL]
    stopped = bool(cancels) or any(isinstance(e, ev.GangAbandoned) for e in events)
    if job.state is JobState.CANCELLED and job.attempts and job.attempts[-1].state is AttemptState.ABORTED:
        assert stopped or any(isinstance(e, ev.JobSuspended | ev.JobRequeued) for e in events), (
            f"{job.id} was not asked"
        )


def _progress_is_asked_for(job: Job, events: Iterable[ev.Event]) -> None:
    """Check, by its events alone, that a job did not restart more often in a row without a checkpoint than allowed."""
    in_a_row, most = 0, job.spec.retry.max_no_progress
    for event in events:
        if isinstance(event, ev.CheckpointSaved):
            in_a_row = 0
        elif isinstance(event, ev.AttemptFailed) and event.retry:
            in_a_row += event.failure.failure_class is not FailureClass.PREEMPTION
        assert in_a_row <= most, f"{job.id} was restarted {in_a_row} times in a row without a checkpoint, not {most}"


def _waits_are_kept(job: Job, events: Iterable[ev.Event]) -> None:
    """Check that no attempt began in its back-off, nor while a node that was cut off may still run the previous one."""
    back_off = fence = 0.0
    for event in events:
        match event:
            case ev.AttemptFailed():
                back_off = event.not_before
            case ev.GangLost():
                fence = max(fence, event.not_before)
            case ev.StopRequested() | ev.JobResumed():  # a user's request ends the back-off
                back_off = 0.0
            case ev.ClockStepped():
                back_off, fence = back_off + event.seconds, fence + event.seconds
            case ev.AttemptStarted():
                assert event.at >= back_off, f"attempt {event.attempt} of {job.id} began in its back-off"
                assert event.at >= fence, f"attempt {event.attempt} of {job.id} began before its fence"
            case _:
                pass
