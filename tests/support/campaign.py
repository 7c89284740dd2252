"""Jobs of every kind, driven by users who repeat requests until they are answered, while the daemon or ranks are killed at random.

Each driver submits one job after the other, acts on it as its kind requires, waits for its end, and records the
expected outcome. ``verify`` compares that with the record, with the ledger, and with what is left in Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from orchestrator.api.errors import DaemonUnreachableError, DeadlineError, RefusedError
from orchestrator.api.views import JobView
from orchestrator.core.states import AttemptState
from orchestrator.runtime.cluster.head import ray_environment
from orchestrator.runtime.nodes.directories import namespace
from orchestrator.store import verification
from orchestrator.store.sql.requests import Reader
from orchestrator.store.sql.schema import connect
from tests.support.ledger import SCRIPT, TINY, Ledger, job_spec
from tests.support.processes import of_cwd
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until

T = TypeVar("T")
LIVE_ATTEMPTS = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.DRAINING)
KINDS = ("plain", "gang", "crash", "killed", "pause", "cancel", "early cancel", "deaf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job's end: expected state and number of attempts (each may be one of several), and the actual ones."""

    kind: str
    job: JobView
    states: tuple[str, ...]
    attempts: tuple[int, ...]

    @property
    def problem(self) -> str:
        """Description of the difference from the expectation; empty if there is none."""
        if self.job.state in self.states and self.job.attempt in self.attempts:
            return ""
        was = f"{self.job.state} after {self.job.attempt} attempts ({self.job.reason}; {self.job.failure})"
        return f"{self.job.id} ({self.kind}) was {was}, not {self.states} after {self.attempts}"


@dataclass(slots=True)
class Campaign:
    """Drives ``drivers`` jobs at a time; each takes ``steps`` steps of ``seconds``."""

    stack: Stack
    ledger: Ledger
    directory: Path
    dice: random.Random
    kinds: tuple[str, ...] = KINDS
    drivers: int = 4
    gpus: int = 0  # of each rank
    steps: int = 40
    seconds: float = 0.02
    outcomes: list[Outcome] = field(default_factory=list)
    began_at: float = field(default_factory=time.time)
    _over: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor | None = None
    _futures: list[Future[None]] = field(default_factory=list)

    def __enter__(self) -> Self:
        (self.directory / "work").mkdir(parents=True, exist_ok=True)
        (self.directory / "work" / "train.py").write_text(SCRIPT)
        self._pool = ThreadPoolExecutor(self.drivers)
        seeds = [self.dice.getrandbits(64) for _ in range(self.drivers)]
        self._futures = [self._pool.submit(self._drive, random.Random(seed)) for seed in seeds]
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        assert self._pool is not None
        self._pool.shutdown(wait=True)

    def check_drivers(self) -> None:
        """Raise a driver's error."""
        for future in self._futures:
            if future.done():
                future.result()

    def _drive(self, dice: random.Random) -> None:
        while not self._over.is_set():
            kind = dice.choice(self.kinds)
            self.outcomes.append(self._one_job(kind, dice))

    # -- what users do

    def insist(self, call: Callable[[], T]) -> T:
        """Repeat the call until the daemon answers, even if it restarts meanwhile; return the answer."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call()
            except (DaemonUnreachableError, DeadlineError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _one_job(self, kind: str, dice: random.Random) -> Outcome:
        ranks = 2 if kind in ("gang", "killed") else 1
        options: dict[str, Any] = {"steps": self.steps, "seconds": self.seconds, "deaf": kind == "deaf"}
        if kind == "crash":
            options["faults"] = [{"attempt": 1, "step": dice.randrange(6, self.steps), "kind": "sigkill"}]
        extra: dict[str, Any] = {"stop_duration": "400ms"} if kind == "deaf" else {}
        if self.gpus:
            extra["resources"] = {"num_workers": ranks, "resources_per_worker": {**TINY, "gpu": self.gpus}}
        spec = job_spec(self.ledger, name=kind.replace(" ", "-"), ranks=ranks, spec=extra, **options)
        key, cwd = uuid.UUID(int=dice.getrandbits(128)).hex, str(self.directory / "work")
        job_id = self.insist(lambda: self.stack.client.submit_text(spec, cwd=cwd, key=key)).job_id
        assert job_id is not None
        states, attempts = self._act(kind, job_id, dice)
        job = self._until(job_id, lambda job: job.is_terminal, f"{kind} ends")
        return Outcome(kind=kind, job=job, states=states, attempts=attempts)

    def _act(self, kind: str, job_id: str, dice: random.Random) -> tuple[tuple[str, ...], tuple[int, ...]]:
        client = self.stack.client
        match kind:
            case "crash":
                return ("SUCCEEDED",), (2,)
            case "killed":
                self._step(job_id, dice)
                pid = self.ledger.pids(job_id, 1)[dice.randrange(2)]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return ("SUCCEEDED",), (1, 2)  # 1: the rank had ended already
            case "pause":
                self._step(job_id, dice)
                with contextlib.suppress(RefusedError):  # the job had ended already
                    self.insist(lambda: client.pause(job_id))
                    paused = self._until(job_id, lambda job: job.state == "SUSPENDED" or job.is_terminal, "is paused")
                    if not paused.is_terminal:
                        self.insist(lambda: client.resume(job_id))
                return ("SUCCEEDED",), (1, 2)
            case "cancel" | "deaf" | "early cancel":
                if kind != "early cancel":
                    self._step(job_id, dice)
                with contextlib.suppress(RefusedError):
                    self.insist(lambda: client.cancel(job_id))
                return ("CANCELLED", "SUCCEEDED"), (0, 1)
            case _:
                return ("SUCCEEDED",), (1,)

    def _step(self, job_id: str, dice: random.Random) -> None:
        """Wait for a random step."""
        step, deadline = dice.randrange(1, self.steps), time.monotonic() + PATIENCE_SECONDS
        while self.ledger.last_step(job_id) < step:
            assert time.monotonic() < deadline, f"{job_id} does not come to step {step}: {self._where(job_id)}"
            time.sleep(0.02)

    def _until(self, job_id: str, condition: Callable[[JobView], bool], what: str) -> JobView:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(job := self.insist(lambda: self.stack.client.job(job_id))):
            assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:g} s: {what}: {self._where(job_id)}"
            time.sleep(0.1)
        return job

    def _where(self, job_id: str) -> str:
        job = self.insist(lambda: self.stack.client.job(job_id))
        events = [e.kind for e in self.insist(lambda: self.stack.client.events(job_id))]
        return f"{job.state}, {job.reason}, {events}"

    # -- outcomes

    def verify(self) -> None:
        """Check that every accepted job exists once and ended as expected, that the ledger is clean, and that nothing is left."""
        self.check_drivers()
        problems = [outcome.problem for outcome in self.outcomes if outcome.problem]
        accepted = {outcome.job.id for outcome in self.outcomes}
        known = {job.id for job in self.stack.client.jobs(since=self.began_at, limit=10_000).jobs}
        problems += [f"{job_id} was accepted and is lost" for job_id in accepted - known]
        problems += [f"{job_id} is there and nobody submitted it" for job_id in known - accepted]
        problems += [
            f"{job_id}: {problem}" for job_id in self.ledger.jobs() for problem in self.ledger.problems(job_id)
        ]
        problems += [f"{pid} still runs" for pid in of_cwd(self.stack.settings.paths.jobs)]
        problems += left_in_ray(self.stack)
        assert not problems, "\n".join(problems)


_LEFT = """
import json, ray, sys
from ray.util.placement_group import placement_group_table
from ray.util import list_named_actors
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps(groups + [name for name in list_named_actors() if name.startswith("rank-")]))
"""


def left_in_ray(stack: Stack) -> list[str]:
    """Return placement groups and rank actors that stay in Ray although no job is alive.

    Those of a job that ended well stay for some seconds, to serve the next one.
    """
    names: list[str] = []

    def none_are_left() -> bool:
        names[:] = _names_in_ray(stack)
        return not names

    with contextlib.suppress(AssertionError):
        wait_until("nothing is left in Ray", none_are_left, interval=2.0)
    return [f"{name} is left in Ray" for name in names]


def _names_in_ray(stack: Stack) -> list[str]:
    environ = {**stack.environ, **ray_environment(stack.settings.paths.ray / "token")}
    command = [sys.executable, "-c", _LEFT, stack.client.health().ray_address, namespace(stack.home)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


class RecordWatch:
    """Verifies the store of a dead daemon: rows equal the fold of their events, and no GPU is reserved twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settled = 0  # jobs up to this sequence number had ended at the last call

    def problems(self) -> list[str]:
        """Return the problems of every job that is live, was live at the last call, or is new."""
        with contextlib.closing(connect(self._path, read_only=True)) as connection:
            found = verification.problems(connection, after=self._settled)
            live = Reader(connection).live()
            (newest,) = connection.execute("SELECT coalesce(max(sequence), 0) FROM jobs").fetchone()
        self._settled = min([newest, *(job.submission.sequence - 1 for job in live)])
        held: dict[str, str] = {}
        for job in live:
            numbers = [attempt.number for attempt in job.attempts]
            if numbers != list(range(1, len(numbers) + 1)):
                found.append(f"{job.id} has the attempts {numbers}")
            if sum(attempt.state in LIVE_ATTEMPTS for attempt in job.attempts) > 1:
                found.append(f"{job.id} has several live attempts")
            for uuid_ in (u for seat in job.seats if job.gang_open for u in seat.gpu_uuids):
                if uuid_ in held:
                    found.append(f"{uuid_} is held by {held[uuid_]} and {job.id}")
                held[uuid_] = job.id
        return found


def kill_daemon_at_random(
    campaign: Campaign, kills: int, *, starting: float = 2.0, ready: float = 0.6, on_kill: Callable[[], object] = str
) -> dict[str, int]:
    """Start and kill the daemon ``kills`` times: half of the times while it starts, else soon after it is ready.

    ``starting`` and ``ready`` are the most seconds of either; the store is verified after each kill, then ``on_kill``
    is called. Returns how often a job was in each state when its daemon died.
    """
    stack, dice = campaign.stack, campaign.dice
    seen: dict[str, int] = {}
    watch = RecordWatch(stack.settings.paths.store)
    for _ in range(kills):
        daemon = stack.serve()
        try:
            if dice.random() < 0.5:
                time.sleep(dice.uniform(0.0, starting))
            else:
                wait_ready(stack, daemon)
                time.sleep(dice.uniform(0.0, ready))
                for job in stack.client.jobs(limit=campaign.drivers).jobs:
                    seen[job.state] = seen.get(job.state, 0) + 1
        finally:
            daemon.kill()
            daemon.wait()
        problems = watch.problems()
        assert not problems, "\n".join(problems)
        campaign.check_drivers()
        on_kill()
    return seen


def wait_ready(stack: Stack, daemon: subprocess.Popen[bytes], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until the daemon, a child, accepts and places jobs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert daemon.poll() is None, f"the daemon ended with {daemon.returncode}: {stack.serve_log()}"
        with contextlib.suppress(DaemonUnreachableError, DeadlineError):
            if stack.client.health().ready:
                return
        time.sleep(0.02)
    raise AssertionError(f"the daemon is not ready after {seconds:g} s: {stack.serve_log()}")
