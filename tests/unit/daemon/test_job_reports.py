"""Reports of ended jobs: the jobs that get one, and failures of reports, which do not affect the daemon."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from orchestrator.daemon.job_processes import JobReports
from orchestrator.spec.paths import Paths
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Spec:
    report: bool = True


@dataclass(frozen=True)
class Ended:
    id: str
    spec: Spec = Spec()
    ended_at: float | None = None


class Jobs:
    def __init__(self, *jobs: Ended, error: Exception | None = None) -> None:
        self._jobs = jobs
        self._error = error

    async def jobs(self, _query: Any) -> list[Ended]:
        if self._error:
            raise self._error
        return list(self._jobs)


GOOD = "import pathlib, sys; job = pathlib.Path(sys.argv[1]); (job / 'report').mkdir(); (job / 'report' / 'report.html').touch()"
BAD = {
    "fails": "import sys; print('x' * 10**6, file=sys.stderr); sys.exit(1)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "hangs": "import threading; threading.Event().wait()",
}


def writing(
    home: Path, store: Jobs, script: str = GOOD, *, writer: Any = None, patience: float = PATIENCE_SECONDS
) -> Any:
    for name in ("one-aaaaaa", "two-bbbbbb", "bare-cccccc"):
        (home / "jobs" / name).mkdir(parents=True)
    for name in ("one-aaaaaa", "two-bbbbbb"):
        (home / "jobs" / name / "metrics.jsonl").write_text("{}\n")
    paths = Paths(home=home, socket=home / "run" / "orch.sock")
    command = writer or (sys.executable, "-c", script)
    return JobReports(store, paths, structlog.get_logger(), writer=command, patience=patience)  # type: ignore[arg-type]


async def until(found: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not found():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)


async def running(reports: Any, found: Any) -> None:
    task = asyncio.create_task(reports.run())
    try:
        await until(lambda: found() or task.done())
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pages(home: Path) -> set[str]:
    return {path.parent.parent.name for path in home.glob("jobs/*/report/report.html")}


def test_each_job_that_recorded_something_gets_a_report_unless_it_is_off(tmp_path: Path) -> None:
    async def main() -> None:
        reports = writing(tmp_path, Jobs())
        for job in (Ended("bare-cccccc"), Ended("one-aaaaaa", Spec(report=False)), Ended("two-bbbbbb")):
            reports.ended(job)
        await running(reports, lambda: pages(tmp_path))

    asyncio.run(main())
    assert pages(tmp_path) == {"two-bbbbbb"}


def test_the_next_daemon_writes_what_the_last_one_did_not(tmp_path: Path) -> None:
    now = time.time()
    old = Ended("one-aaaaaa", ended_at=now - 90000)
    new = replace(old, id="two-bbbbbb", ended_at=now - 60)

    async def main() -> None:
        await running(writing(tmp_path, Jobs(new, old)), lambda: pages(tmp_path))

    asyncio.run(main())
    assert pages(tmp_path) == {"two-bbbbbb"}


@pytest.mark.parametrize("how", sorted(BAD))
def test_a_report_that_cannot_be_written_holds_up_no_other(tmp_path: Path, how: str) -> None:
    script = f"import sys\nif 'one-' in sys.argv[1]:\n    {BAD[how]}\nelse:\n    {GOOD}"

    async def main() -> None:
        reports = writing(tmp_path, Jobs(), script, patience=3.0 if how == "hangs" else PATIENCE_SECONDS)
        for name in ("one-aaaaaa", "two-bbbbbb"):
            reports.ended(Ended(name))
        await running(reports, lambda: pages(tmp_path))

    asyncio.run(main())
    assert pages(tmp_path) == {"two-bbbbbb"}
