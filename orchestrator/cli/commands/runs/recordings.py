"""Resolves FILE or JOB of `orch replay`: a recording's file, a job's telemetry, or the directory of either."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.errors import BadRequestError, NotFoundError
from orchestrator.cli.commands.runs.sources import job_directory

if TYPE_CHECKING:
    from orchestrator.cli.session import Session
    from orchestrator.gpu.recording.recording import Recording

MULTI = "_multi_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecording:
    """A recording with at least one sample, and its title."""

    name: str
    recording: Recording


def find_recording(session: Session, ref: str) -> FoundRecording:
    """Read the recording that the argument names. Raises OrchError for a missing or invalid one."""
    path = Path(ref)
    try:
        path = path if path.exists() else job_directory(session, ref)
    except (OSError, ValueError) as error:
        raise NotFoundError(f"{ref[:100]!r} is neither a file nor a job: {error}") from error
    found = _read(path)
    if not found.recording.samples:
        cut = ": its end is cut off, and no sample before it is complete" if found.recording.repaired else ""
        raise BadRequestError(
            f"{found.recording.source} holds no samples{cut}",
            hint="`orch record` makes a recording; `telemetry: {record: true}` in job.yaml records a job's GPUs",
        )
    return found


def _read(path: Path) -> FoundRecording:
    from orchestrator.gpu.recording.gputop import RecordingError, read_recording
    from orchestrator.gpu.recording.job_record import read_job_telemetry

    try:
        if path.is_dir():
            job = path.parent if path.name == "telemetry" else path
            return FoundRecording(name=job.name, recording=read_job_telemetry(job / "telemetry"))
        if not path.is_file():
            raise BadRequestError(f"{path} is neither a file nor a directory", hint="give a recording's file")
        everything = path.with_name(f"{path.stem}{MULTI}{path.suffix}")
        chosen = everything if not path.stem.endswith(MULTI) and everything.is_file() else path
        return FoundRecording(name=chosen.name, recording=read_recording(chosen))
    except RecordingError as error:
        raise BadRequestError(str(error), hint="`orch record` makes one") from error
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be read: {error.strerror or error}", hint="check its path and permissions"
        ) from error
