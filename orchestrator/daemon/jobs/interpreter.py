"""Finds a job's interpreter, and whether it has the modules that the job's script imports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from orchestrator.spec.model import JobSpec

ASK_SECONDS: Final = 10.0
MOST_BYTES: Final = 1024 * 1024
_IMPORTS_TORCH: Final = re.compile(
    rb"^\s*(?:import|from)\s+(?:torch|lightning|pytorch_lightning|accelerate)\b", re.MULTILINE
)
_HAS_TORCH: Final = "import sys; from importlib.util import find_spec; sys.exit(3 if find_spec('torch') is None else 0)"
_LACKS: Final = 3

_interpreters: dict[tuple[str, float], str] = {}
_with_torch: set[str] = set()


def interpreter_of(python: str) -> str:
    """Return the real interpreter behind ``python``, which may be a version manager's script. Run once per file."""
    key = (python, Path(python).stat().st_mtime)
    if key not in _interpreters:
        with open(python, "rb") as file:  # noqa: PTH123 - a user's path, unchanged
            is_script = file.read(2) == b"#!"
        _interpreters[key] = _ask(python) if is_script else python
    return _interpreters[key]


def _ask(python: str) -> str:
    command = [python, "-c", "import sys; print(sys.executable)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return python  # the job then reports the error
    found = done.stdout.strip()
    return found if os.access(found, os.X_OK) else python


def torch_notes(spec: JobSpec, python: str, directory: Path | None, source: str) -> tuple[str, ...]:
    """Return a note where the script imports torch and the job's interpreter lacks it; it contains the command to type.

    An interpreter that has torch is checked once; one that lacks it each time, since it may be installed meanwhile.
    """
    entry = parse_entrypoint(spec.entrypoint)
    if entry.kind != "script" or directory is None or spec.runtime_env.pip:
        return ()
    if not _imports_torch(directory / entry.target) or _has_torch(python):
        return ()
    problem = f"{entry.target} imports torch, and {python} has none; `{python} -m pip install torch` installs it"
    if find_spec("torch") is None or Path(sys.executable) == Path(python):
        return (problem,)
    line = shlex.join([sys.executable, *entry.python_options, entry.target, *entry.args])
    typed = not source.startswith("<")  # `orch run` and standard input have no file
    again = shlex.join(["orch", "submit", source, "--set", f"entrypoint={line}"]) if typed else line
    return (f"{problem}, or use an interpreter that has it: `{again}`",)


def _imports_torch(script: Path) -> bool:
    try:
        handle = open_plain(script, follow=True)
    except (OSError, ValueError):
        return False
    with os.fdopen(handle, "rb") as file:
        return _IMPORTS_TORCH.search(file.read(MOST_BYTES)) is not None


def _has_torch(python: str) -> bool:
    """Whether torch is installed, without importing it; also True where that is unknown."""
    if python in _with_torch:
        return True
    try:
        done = subprocess.run([python, "-c", _HAS_TORCH], capture_output=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return True
    if done.returncode == 0:
        _with_torch.add(python)
    return done.returncode != _LACKS
