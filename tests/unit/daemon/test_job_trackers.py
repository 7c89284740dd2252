"""Trackers of live jobs: each fed by a process of its own, started again when it fails, and never waited for."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog

from orchestrator.core.states import JobState
from orchestrator.daemon.job_processes import JobTrackers
from orchestrator.daemon.jobs.tidying import write_secrets
from orchestrator.spec.job import parse_job
from orchestrator.spec.model import JobSpec
from orchestrator.spec.paths import Paths
from tests.support.records import replace
from tests.support.stack import PATIENCE_SECONDS

SPEC = parse_job(
    "name: digits\nentrypoint: python train.py\ntrackers: [wandb, tensorboard]\nlabels: {team: a}\n"
    "env: {WANDB_PROJECT: p, OTHER: x, LD_PRELOAD: y}\nsecrets: [WANDB_API_KEY]\n"
)


@dataclass(frozen=True)
class Job:
    id: str = "digits-abc234"
    spec: JobSpec = SPEC
    attempts: tuple[int, ...] = (1,)
    state: JobState = JobState.RUNNING
    ended_at: float | None = None
    submission: Any = field(default_factory=lambda: SimpleNamespace(user="ada", matrix=None))


class Jobs:
    def __init__(self, *jobs: Job) -> None:
        self._jobs = jobs

    async def jobs(self, query: Any) -> list[Job]:
        return [job for job in self._jobs if job.state.value in query.states]


GOOD = """
import json, os, pathlib, sys
job, name = pathlib.Path(sys.argv[1]), sys.argv[2]
facts = json.loads(sys.stdin.readline())
def whole(file, text):
    (job / (file + ".part")).write_text(text)
    (job / (file + ".part")).rename(job / file)
whole(name + ".facts", json.dumps([facts, dict(os.environ)]))
whole(name + ".end", sys.stdin.readline())
"""
FAILING = """
import pathlib, sys
path = pathlib.Path(sys.argv[1], sys.argv[2] + ".tries")
with path.open("a") as file: file.write("x")
sys.exit(3)
"""
HANGING = (
    "import pathlib, sys, threading; pathlib.Path(sys.argv[1], sys.argv[2] + '.pid').touch(); threading.Event().wait()"
)


def trackers(home: Path, *jobs: Job, script: str = GOOD, patience: float = PATIENCE_SECONDS) -> JobTrackers:
    paths = Paths(home=home, socket=home / "run" / "orch.sock")
    paths.job("digits-abc234").mkdir(parents=True)
    write_secrets(paths, "digits-abc234", {"WANDB_API_KEY": "k"})
    writer = (sys.executable, "-c", script)
    log = structlog.get_logger()
    return JobTrackers(Jobs(*jobs), paths, log, writer=writer, patience=patience, first_delay=0.01)  # type: ignore[arg-type]


async def running(parts: JobTrackers, found: Any, act: Any = lambda: None) -> None:
    task = asyncio.create_task(parts.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not found():
                assert not task.done()
                await asyncio.sleep(0.01)
            act()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_tracker_gets_its_own_settings_and_secrets_and_is_told_the_end(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "digits-abc234"

    async def main() -> None:
        parts = trackers(tmp_path)
        parts.changed(Job())  # type: ignore[arg-type]
        task = asyncio.create_task(running(parts, lambda: all((job / f"{n}.end").exists() for n in SPEC.trackers)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all((job / f"{name}.facts").exists() for name in SPEC.trackers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (job / "secrets").unlink()
        parts.ended(Job(state=JobState.FAILED))  # type: ignore[arg-type]
        await task

    asyncio.run(main())
    facts, environ = json.loads((job / "wandb.facts").read_text())
    assert (facts["job_id"], facts["tags"], facts["config"]["user"]) == ("digits-abc234", ["team=a"], "ada")
    assert "k" not in json.dumps(facts).split('"')
    assert (environ["WANDB_PROJECT"], environ["WANDB_API_KEY"]) == ("p", "k")
    assert not {"OTHER", "LD_PRELOAD"} & environ.keys()
    assert "WANDB_API_KEY" not in json.loads((job / "tensorboard.facts").read_text())[1]
    assert (job / "wandb.end").read_text() == "end FAILED\n"


def test_a_job_that_has_not_begun_or_names_no_tracker_has_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        parts = trackers(tmp_path)
        parts.changed(Job(attempts=()))  # type: ignore[arg-type]
        parts.ended(Job(attempts=(), state=JobState.CANCELLED))  # type: ignore[arg-type]
        parts.changed(Job(spec=replace(SPEC, trackers=())))  # type: ignore[arg-type]
        assert parts._followed == {}

    asyncio.run(main())


def test_a_process_that_fails_is_started_again_and_given_up_only_after_the_end(tmp_path: Path) -> None:
    tries = tmp_path / "jobs" / "digits-abc234" / "wandb.tries"

    async def main() -> None:
        parts = trackers(tmp_path, script=FAILING)
        job = Job(spec=replace(SPEC, trackers=("wandb",)))
        parts.changed(job)  # type: ignore[arg-type]
        await running(parts, lambda: tries.exists() and len(tries.read_text()) > 6)
        parts = JobTrackers(parts._store, parts._paths, parts._log, writer=parts._writer, first_delay=0.01)
        parts.ended(replace(job, state=JobState.SUCCEEDED))  # type: ignore[arg-type]
        await running(parts, lambda: not parts._followed)

    asyncio.run(main())


def test_a_tracker_that_hangs_holds_up_no_other_and_is_ended_some_time_after_its_job(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "digits-abc234"
    script = f"import sys\nif sys.argv[2] == 'wandb':\n    {HANGING}\nelse:\n    exec({GOOD!r})"

    async def main() -> None:
        parts = trackers(tmp_path, script=script, patience=2.0)
        parts.changed(Job())  # type: ignore[arg-type]
        task = asyncio.create_task(running(parts, lambda: not parts._followed))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not ((job / "tensorboard.facts").exists() and (job / "wandb.pid").exists()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        parts.ended(Job(state=JobState.SUCCEEDED))  # type: ignore[arg-type]
        await task

    asyncio.run(main())
    assert (job / "tensorboard.end").read_text() == "end SUCCEEDED\n"
    assert (job / "wandb.pid").exists()


def test_the_next_daemon_goes_on_with_live_jobs_and_those_that_ended_lately(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "digits-abc234"
    ended = Job(state=JobState.SUCCEEDED, ended_at=time.time() - 60)
    old = replace(ended, id="old-abc234", ended_at=time.time() - 90_000)

    async def main() -> None:
        parts = trackers(tmp_path, ended, old)
        await running(parts, lambda: (job / "wandb.end").exists() and not parts._followed)

    asyncio.run(main())
    assert not (tmp_path / "jobs" / "old-abc234").exists()
