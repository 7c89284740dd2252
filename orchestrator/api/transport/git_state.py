"""Reads the git state of the submitter's working directory: its commit, its branch, and whether files differ from them.

The submitter's own process runs git, never the daemon: the configuration of a repository can name programs, which git
runs as its caller. When git fails, the state is unknown: a submission does not depend on it.
"""

from __future__ import annotations

import os
from typing import Any

GIT_SECONDS = 5.0
MAX_BRANCH = 250
_NO_COMMIT = "(initial)"
_DETACHED = "(detached)"


def git_state(directory: str, *, seconds: float = GIT_SECONDS) -> dict[str, Any] | None:
    """Return the state of the repository that ``directory`` is in; None without one, and where git does not answer in time."""
    if not _in_repository(directory):
        return None
    import subprocess

    command = ["git", "-c", "core.fsmonitor=false", "-C", directory, "status", "--porcelain=v2", "--branch"]
    command += ["--untracked-files=normal", "--", "."]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True, env=environ)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return read_status(done.stdout.decode("utf-8", "replace"))


def _in_repository(directory: str) -> bool:
    place = os.path.realpath(directory)
    while not os.path.lexists(f"{place}/.git"):
        above = os.path.dirname(place)
        if above == place:
            return False
        place = above
    return True


def read_status(text: str) -> dict[str, Any] | None:
    """Parse the output of `git status --porcelain=v2 --branch`; None for anything else."""
    commit: str | None = None
    branch, dirty = "", False
    for line in text.splitlines():
        if line.startswith("# branch.oid "):
            commit = line.removeprefix("# branch.oid ")
        elif line.startswith("# branch.head "):
            branch = line.removeprefix("# branch.head ")
        elif line and not line.startswith("#"):
            dirty = True
    if commit is None or not (commit == _NO_COMMIT or _is_digest(commit)):
        return None
    return {
        "commit": "" if commit == _NO_COMMIT else commit,
        "branch": "" if branch == _DETACHED else branch[:MAX_BRANCH],
        "dirty": dirty,
    }


def _is_digest(text: str) -> bool:
    return len(text) in (40, 64) and set(text) <= set("0123456789abcdef")
