"""Reads the git state of a working directory: its commit, its branch, and whether files differ from them.

Runs git only where the directory is in a repository. When git fails, the state is unknown: a submission does not depend on it.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final

from orchestrator.core.events import GitState

if TYPE_CHECKING:
    from pathlib import Path

GIT_SECONDS: Final = 5.0
_MAX_BRANCH: Final = 250
_NO_COMMIT: Final = "(initial)"
_DETACHED: Final = "(detached)"


def git_state(directory: Path, *, seconds: float = GIT_SECONDS) -> GitState | None:
    """Return the state of the repository that ``directory`` is in; None without one, and where git does not answer in time."""
    if not any((place / ".git").exists() for place in (directory, *directory.resolve().parents)):
        return None
    command = [
        "git",
        "-C",
        str(directory),
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=normal",
        "--",
        ".",
    ]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True, env=environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return read_status(done.stdout.decode("utf-8", "replace"))


def read_status(text: str) -> GitState | None:
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
    return GitState(
        commit="" if commit == _NO_COMMIT else commit,
        branch="" if branch == _DETACHED else branch[:_MAX_BRANCH],
        dirty=dirty,
    )


def _is_digest(text: str) -> bool:
    return len(text) in (40, 64) and set(text) <= set("0123456789abcdef")
