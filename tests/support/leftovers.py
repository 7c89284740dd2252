"""Finds what a test session has left behind: processes, and their files in the temporary directory and shared memory.

A session has its own temporary directory, which all its processes inherit. Several sessions may run on a machine at
once; only processes with the session's directory in their environment, command line or working directory belong to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from orchestrator.process_ends import wait_ended
from orchestrator.runtime.nodes.directories import namespace, page_directory

PREFIX = "o-"  # short: paths of Unix sockets are
NAMES = "namespaces"  # homes' namespaces, one a line: a name in shared memory does not show its home


def begin(environ: MutableMapping[str, str]) -> Path:
    """Give this process, and all processes that it starts, a temporary directory of the session's own.

    pytest's own temporary directories stay where they were, for inspection afterwards.
    """
    environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    directory.chmod(0o711)  # some tests become another user, which must be able to enter it
    environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None
    return directory


def note_home(home: Path) -> None:
    """Record that a daemon of the session has this home."""
    directory = Path(tempfile.gettempdir())
    if directory.name.startswith(PREFIX):
        with (directory / NAMES).open("a") as names:
            names.write(f"{namespace(home)}\n")


def processes(directory: Path) -> list[psutil.Process]:
    """Return the processes that refer to the directory, except this process and its ancestors."""
    mark = str(directory)
    above = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in above or process.status() == psutil.STATUS_ZOMBIE:
                continue
            carried = [*process.cmdline(), *process.environ().values(), process.cwd()]
            if any(part == mark or part.startswith(f"{mark}/") or f"{mark}/" in part for part in carried):
                found.append(process)
    return found


def files(directory: Path) -> list[Path]:
    """Return the files that orch has left in the directory, and in shared memory for homes of the session."""
    homes = set(_lines(directory / NAMES)) | {
        f"orch-{node.name}" for node in (directory / f"orch-{os.getuid()}").glob("*")
    }
    here = [path for path in directory.glob("orch-*") if path.name != f"orch-{os.getuid()}"]
    nodes = list((directory / f"orch-{os.getuid()}").glob("*"))
    return sorted([*here, *nodes, *(page for name in homes if (page := page_directory(name)).exists())])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def describe(process: psutil.Process) -> str:
    """Return the process's id and the beginning of its command line."""
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:160]}"
    return f"process {process.pid}"


def end(directory: Path, seconds: float = 20.0) -> list[str]:
    """Report what was left behind, and remove it; processes have ``seconds`` to end."""
    wait_ended(processes(directory), seconds)
    living = processes(directory)
    left = [*map(describe, living), *map(str, files(directory))]
    for process in living:
        with contextlib.suppress(psutil.Error):
            process.kill()
    wait_ended(living, 300.0)
    for path in files(directory):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    return left
