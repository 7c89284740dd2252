"""A process with children that write to a store until they are killed; driven by test_crash.

For each line on stdin (the path of a store) it forks a child, prints its pid, and reports when it is dead. The child
prints everything that was acknowledged to it, on the same pipe, as soon as it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from orchestrator.core import events as ev
from orchestrator.store.store import Store
from tests.unit.core.builders import T0, started, submission
from tests.unit.store import lives

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


async def lead(store: Store, lane: str) -> None:
    """Submit jobs for ever, lead each through its start, and write a note on three of them at once."""
    for turn in range(10**6):
        jobs: list[Job] = []
        for n in range(3):
            job, _ = await store.submit(submission(job_id=f"job-{lane}-{turn}-{n}"))
            tell(f"job {job.id} {job.version}")
            jobs.append(job)
        batch = f"{lane}-{turn}"
        jobs = await lives.write(store, [lives.note(job, batch, at=T0 + turn) for job in jobs])
        tell(f"batch {batch}")
        for job in jobs:
            begun = started(job)
            up = ev.AttemptRunning(job_id=job.id, at=T0, attempt=begun.attempt, pids=(1, 2))
            (after,) = await lives.write(store, [begun, up])
            tell(f"job {after.id} {after.version}")


async def write(path: Path) -> None:
    store = Store.open(path, reserve=path.with_name("reserve"), reserve_bytes=65536, min_free_bytes=0)
    tell("open")
    await asyncio.gather(*(lead(store, f"{os.getpid()}-{lane}") for lane in range(4)))


def child(path: Path) -> NoReturn:
    try:
        asyncio.run(write(path))
    except BaseException as error:
        tell(f"error {error!r}")
    os._exit(1)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(Path(line.strip()))
        tell(f"pid {pid}")
        os.waitpid(pid, 0)
        tell("dead")


if __name__ == "__main__":
    main()
