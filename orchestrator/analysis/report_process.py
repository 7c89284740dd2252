"""Writes the report of one job in its own process: ``python -m orchestrator.analysis.report_process JOB_DIRECTORY``.

The job wrote much of the input. A record that crashes the reader, exhausts memory or never ends affects only this
process, which has limits and low priority, not the daemon that started it. The report appears atomically, by a rename.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Final

from orchestrator import trees
from orchestrator.analysis import REPORT

DRAFT: Final = "report.draft-"
MEMORY_BYTES: Final = 4 << 30
CPU_SECONDS: Final = 600
FILE_BYTES: Final = 256 << 20
EXIT_FAILED: Final = 1


def write_job_report(job: Path) -> int:
    """Write ``report`` in a job's directory; return the exit code. An existing report stays."""
    from orchestrator.analysis.report import write_report
    from orchestrator.analysis.runs import SourceError, read_run

    remove_drafts(job)
    if (job / REPORT).exists():
        return 0
    draft = job / f"{DRAFT}{os.getpid()}"
    try:
        run = read_run(job)
        draft.mkdir()  # without its parents: no report for a job that is being removed
        write_report([run], draft)
        if not (job / REPORT).exists():  # the writer of an earlier daemon may have been faster
            draft.rename(job / REPORT)
    except (SourceError, OSError) as error:
        print(f"the report cannot be written: {error}", file=sys.stderr)  # noqa: T201 - for the daemon's log
        return EXIT_FAILED
    finally:
        trees.remove(draft)
    return 0


def remove_drafts(job: Path) -> None:
    """Remove the drafts of killed writers, but not the draft of a live one."""
    for leftover in job.glob(f"{DRAFT}*"):
        owner = leftover.name.removeprefix(DRAFT)
        if owner.isdecimal() and len(owner) < 12 and Path("/proc", owner).exists():
            continue
        trees.remove(leftover)


def _yield_and_bound() -> None:
    os.nice(19)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (bound, bound))


if __name__ == "__main__":
    _yield_and_bound()
    sys.exit(write_job_report(Path(sys.argv[1])))
