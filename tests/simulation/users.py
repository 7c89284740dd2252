"""Requests of users in a history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import DiskFullError, OrchError, RefusedError
from orchestrator.api.protocol import Verb
from orchestrator.core.facts.reasons import ByShutdown
from orchestrator.core.lifecycle.advance import FORCE_SECONDS, request_stop
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.runtime.memory.cluster import Script
from tests.simulation.world import Promise

if TYPE_CHECKING:
    import random

    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from tests.simulation.world import Do, World

MAX_JOBS = 6
JOB = """
version: 1
name: job
entrypoint: python -c pass
working_dir: null
resources:
  num_workers: {workers}
  resources_per_worker: {{gpu: {gpu}, cpu: 1}}
  placement_strategy: {strategy}
priority: {priority}
max_duration: {limit}
stop_duration: 30s
retry:
  max_restarts: {{user: {user}, infra: {infra}, hang: 1}}
  max_no_progress: {max_no_progress}
  backoff: {{initial: 8s}}
  exit_codes: {{retry: [75]}}
health: {{startup_timeout: 30m}}
"""
SCRIPTS = (
    Script(stop_takes=5.0),
    Script(stop_takes=None),
    Script(stop_takes=1.0, stop_exit_code=143),
    Script(seconds=100.0, save_every=30.0),
    Script(seconds=20.0, stop_takes=None),
    Script(seconds=40.0, exit_code=1),
    Script(seconds=60.0, save_every=20.0, collect_seconds=120.0),
    Script(stop_takes=5.0, collect_seconds=30.0),
)


def submit(world: World, dice: random.Random) -> str:
    if len(world.jobs) >= MAX_JOBS:
        return ""
    text = JOB.format(
        workers=dice.choice(["1", "2", "3", "4", "{min: 1, max: 3}", "{min: 2, max: 4}", "auto"]),
        gpu=dice.choice(["1", "1", "1", "0.5", "2"]),
        strategy=dice.choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
        priority=dice.choice([40, 50, 60]),
        limit=dice.choice(["2h", "2h", "90s"]),
        user=dice.randrange(2),
        infra=dice.randrange(4),
        max_no_progress=dice.randint(1, 3),
    )
    script = dice.choice(SCRIPTS)
    world.submitted += 1
    key = f"key-{world.submitted}"
    try:
        job_id = world.attempt(world.daemon.submit(text, key)) or world.run(world.daemon.submit(text, key))
    except DiskFullError:
        assert world.cluster.disk_full, "refused for a full disk that is not full"
        return "refused: the disk is full"
    except RefusedError as error:  # it fits on no existing node
        assert all(job.submission.idempotency_key != key for job in world.jobs.values()), "a refused job is stored"
        return f"refused: {error}"
    assert world.run(world.daemon.submit(text, key)) == job_id, "a request that is repeated submits twice"
    world.truth.promises[job_id] = Promise()
    world.scripts[job_id] = script
    return f"{job_id}, {script}"


def _ask(world: World, job: Job, verb: Verb, priority: int | None = None, *, force: bool = False) -> bool:
    """Request an action; return whether the daemon acknowledged it."""
    before = world.truth.happened["daemon killed"]
    try:
        world.attempt(world.daemon.act(job.id, verb, priority, force=force))
    except OrchError:  # it has ended, or drains, meanwhile
        return False
    return world.truth.happened["daemon killed"] == before


def stop(verb: Verb) -> Do:
    def do(world: World, dice: random.Random) -> str:
        job = world.one(dice.randrange(1000), list(world.jobs.values()))
        return "" if job is None else _stop(world, job, verb)

    return do


def force(world: World, dice: random.Random) -> str:
    """Cancel by force, and again when the gang may be given up: by then its end may have happened, and not be known."""
    job = world.one(dice.randrange(1000), [j for j in world.jobs.values() if j.gang_open])
    if job is None:
        return ""
    said = _stop(world, job, Verb.CANCEL, force=True)
    if dice.random() < 0.5:
        world.cluster.run_until(world.now + FORCE_SECONDS + 1.0)
        if job.id in world.jobs:
            said += f"; again: {_stop(world, job, Verb.CANCEL, force=True)}"
    return said


def _stop(world: World, job: Job, verb: Verb, *, force: bool = False) -> str:
    acknowledged = _ask(world, job, verb, force=force)
    if acknowledged:
        now = world.run(world.store.job(job.id))
        promise = world.truth.promises[job.id]
        if promise.attempts is None and not now.succeeded:
            promise.attempts = now.attempt_number
        promise.cancelled |= verb is Verb.CANCEL
    return f"{verb} {job.id}, {'acknowledged' if acknowledged else 'not acknowledged'}"


def resume(world: World, dice: random.Random) -> str:
    job = world.one(dice.randrange(1000), [j for j in world.jobs.values() if j.state is JobState.SUSPENDED])
    if job is None:
        return ""
    world.truth.promises[job.id].attempts = None  # it may begin again, whether this is acknowledged or not
    return f"{job.id}, {_ask(world, job, Verb.RESUME)}"


def reprioritise(world: World, dice: random.Random) -> str:
    job = world.one(dice.randrange(1000), list(world.jobs.values()))
    return "" if job is None else f"{job.id}, {_ask(world, job, Verb.UPDATE, dice.randint(40, 60))}"


def preempt(world: World, dice: random.Random) -> str:
    """Preempt a job as `orch down --stop-jobs` and a drained node do."""
    job = world.one(dice.randrange(1000), [j for j in world.jobs.values() if j.state.may_hold_gang])
    if job is None:
        return ""
    daemon = world.daemon

    def make() -> list[ev.Event]:
        live = daemon.loop.decided.get(job.id)
        return request_stop(live, StopPurpose.PREEMPT, ByShutdown(), daemon.clock.now()) if live else []

    world.attempt(daemon.command(make))
    return job.id
