"""Resolves JOB or FILE of an analysis: a job's directory on this machine, or the path itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.reading.series import Run
    from orchestrator.cli.session import Session

MOST_NAMED = 5


def find_runs(session: Session, refs: Sequence[str]) -> list[Run]:
    """Return the runs that the arguments name, with unique names. Raises OrchError for a missing or unreadable one."""
    runs = [find_run(session, ref) for ref in refs]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    from dataclasses import replace

    return [replace(run, name=f"{run.name} ({number})") for number, run in enumerate(runs, 1)]


def find_run(session: Session, ref: str) -> Run:
    """Return the run that the argument names: a file or directory that exists, else a job."""
    from orchestrator.analysis.reading.sources import SourceError, read_run

    path = Path(ref)
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise NotFoundError(f"{ref[:100]!r} is neither a file nor a job: {error}") from error
    try:
        return read_run(path if there else job_directory(session, ref))
    except SourceError as error:
        raise BadRequestError(
            str(error), hint="`telemetry: {record: true}` in job.yaml records a job's GPUs"
        ) from error


def job_directory(session: Session, ref: str) -> Path:
    """Return the directory of a job on this machine: from the daemon or, if none runs, in ORCH_HOME."""
    if ref.count("/") > 1 or ref.startswith((".", "/")) or ref.endswith((".json", ".csv", ".jsonl")):
        raise NotFoundError(f"{ref} does not exist", hint="give a recording's file, a job's directory, or a job")
    try:
        job = session.client().job(ref)
    except DaemonUnreachableError:
        return _in_home(session, ref)
    directory = Path(job.log_dir).parent
    if not job.log_dir or not directory.is_dir():
        raise BadRequestError(
            f"the files of {job.id} are not on this machine", hint="run the command on the daemon's machine"
        )
    return directory


def _in_home(session: Session, ref: str) -> Path:
    from orchestrator.api.transport.endpoint import orch_home

    jobs = Path(orch_home(session.environ)) / "jobs"
    found = sorted(path for path in jobs.glob("*") if path.name.startswith(ref)) if jobs.is_dir() else []
    exact = [path for path in found if path.name == ref]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        named = ", ".join(path.name for path in found[:MOST_NAMED])
        raise BadRequestError(
            f"{ref} is the beginning of {len(found)} jobs: {named}", hint="give more letters of the id"
        )
    raise NotFoundError(
        f"there is no file {ref}, and no running daemon has a job {ref}",
        hint="name a file or a directory, or a job of a daemon that runs",
    )
