"""Reads a job file: converts bytes to text, or raises one clear error.

Must not parse: the command line reads here and sends the text on; the daemon parses it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from orchestrator.spec.plain_files import NotPlainFileError, read_plain
from orchestrator.spec.problems import Problem, SpecError

MAX_JOB_BYTES = 1 << 20
"""Largest job file, in bytes (1 MiB). A long one has two thousand; a larger file is not a job file."""


def read_job_file(path: str | os.PathLike[str]) -> str:
    """Read a job file from disk.

    Raises:
        SpecError: no such file, not a regular file, unreadable, larger than MAX_JOB_BYTES, or not UTF-8.

    """
    source = os.fspath(path)
    try:
        data = read_plain(Path(source), MAX_JOB_BYTES, follow=True)
    except FileNotFoundError as error:
        raise _refused(source, "no such file", "`orch init SCRIPT` writes one") from error
    except NotPlainFileError as error:
        if error.errno == errno.EFBIG:
            raise _too_large(source) from error
        raise _refused(source, "is not a regular file", "give the path of a job.yaml") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _refused(source, f"cannot be read: {reason}", "check the path and its permissions") from error
    return decode_job(data, source=source)


def decode_job(data: bytes, *, source: str = "job.yaml") -> str:
    """Turn the bytes of a job file into text.

    Raises:
        SpecError: larger than MAX_JOB_BYTES, or not UTF-8; the line and column are those of the first bad byte.

    """
    if len(data) > MAX_JOB_BYTES:
        raise _too_large(source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", errors="replace")
        line = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1) + 1
        problem = Problem(
            line=line, column=column, path="", message="is not UTF-8 text", hint="save the file as UTF-8", source=source
        )
        raise SpecError((problem,)) from error


def _too_large(source: str) -> SpecError:
    return _refused(source, f"is larger than {MAX_JOB_BYTES} bytes", "a job file holds settings, not data")


def _refused(source: str, message: str, hint: str) -> SpecError:
    return SpecError((Problem(line=0, column=0, path="", message=message, hint=hint, source=source),))
