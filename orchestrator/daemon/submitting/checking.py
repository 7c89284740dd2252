"""Checks a submission without the cluster: its text, interpreter, script and directories."""

from __future__ import annotations

import os
import secrets as random
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.api.errors import InvalidSpecError, Problem, WorkdirNeededError, invalid_spec
from orchestrator.api.server.gate import user_name
from orchestrator.api.transport.submission import find_python
from orchestrator.core.events import MatrixCell
from orchestrator.core.ids import job_id
from orchestrator.daemon.jobs.interpreter import interpreter_of
from orchestrator.daemon.jobs.prerequisites import with_after
from orchestrator.parts import install_line, missing_modules
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.job import parse_jobs
from orchestrator.spec.plain_files import NotPlainFileError, open_plain
from orchestrator.spec.problems import SpecError
from orchestrator.train.trainer.config.config import trainer_findings
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.analysis.trackers.names import TrackerPackage
    from orchestrator.api.requests import SubmitRequest
    from orchestrator.spec.entrypoint import Entrypoint
    from orchestrator.spec.job import JobFile
    from orchestrator.spec.model import JobSpec, MatrixSpec
    from orchestrator.spec.search import Combination


KNOWN_FILES: Final = 64
MOST_KNOWN_CHARACTERS: Final = 16 * 1024

TRACKIO_REMOTE: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A checked submission: its spec, interpreter and working directory (None: an empty one).

    ``modules`` are what ``runtime_env.py_modules`` names, ``cell`` is its place in a matrix, ``search`` the search whose first
    trials these are. ``notes`` are for the submitter.
    """

    spec: JobSpec
    python: str
    directory: Path | None
    modules: tuple[Path, ...] = ()
    cell: MatrixCell | None = None
    search: MatrixSpec | None = None
    notes: tuple[str, ...] = ()


def check(request: SubmitRequest) -> tuple[Checked, ...]:
    """Parse and check everything that needs no cluster: the job, or each of a matrix. Raises InvalidSpecError with every error."""
    parse = _known if len(request.yaml) <= MOST_KNOWN_CHARACTERS else _known.__wrapped__
    try:
        file = parse(request.yaml, request.source, tuple(request.overrides), tuple(sorted(request.passed.items())))
    except SpecError as error:
        raise invalid_spec(error) from error
    matrix_id = job_id(file.name, random.randbits(64))
    interpreters: dict[str, str] = {}
    notes = _notes(file)
    search = file.matrix if file.matrix is not None and file.matrix.strategy == "optuna" else None
    if search is not None:
        _check_search(request)
    return tuple(
        replace(_checked(request, spec, _cell(file, combination, matrix_id), interpreters), search=search, notes=notes)
        for combination, spec in file.jobs
    )


@lru_cache(KNOWN_FILES)
def _known(text: str, source: str, overrides: tuple[str, ...], passed: tuple[tuple[str, str], ...]) -> JobFile:
    """Parse a job file. A file is often submitted many times: its specs are made once, and so is their stored form."""
    return parse_jobs(text, source=source, overrides=overrides, rules=(trainer_findings,), environ=dict(passed))


def _notes(file: JobFile) -> tuple[str, ...]:
    """Return notes on likely mistakes in ``env``, and on what a search does after its first trials."""
    notes = [f"env.pass: no variable of the submitter's environment is passed for {name}" for name in file.unset]
    if "pass" in file.jobs[0][1].env:
        notes.append("env.pass is a text, and so a variable called pass; a list passes variables: pass: [NAME]")
    if file.matrix is not None and file.matrix.strategy == "optuna":
        trials = plural(file.matrix.trials or 0, "trial")
        notes.append(f"a search of {trials}: values after the first {len(file.jobs)} are chosen from results")
    return tuple(notes)


def _cell(file: JobFile, combination: Combination | None, matrix_id: str) -> MatrixCell | None:
    matrix = file.matrix
    if matrix is None or combination is None:
        return None
    searched = matrix.strategy == "optuna"
    return MatrixCell(
        matrix_id=matrix_id,
        name=file.name,
        index=combination.index,
        count=matrix.trials or len(file.jobs),
        values=combination.values,
        max_concurrent=matrix.max_concurrent or (1 if searched else None),
        fail_fast=matrix.fail_fast,
        search=searched,
    )


def _check_search(request: SubmitRequest) -> None:
    """Check that the packages which a search needs are installed. Raises InvalidSpecError."""
    if missing := missing_modules("search"):
        message = f"{', '.join(missing)} cannot be imported by the daemon's {sys.executable}"
        raise _one(request, "matrix.strategy", message, f"{install_line('search')}; then submit again")


def _checked(request: SubmitRequest, spec: JobSpec, cell: MatrixCell | None, interpreters: dict[str, str]) -> Checked:
    if request.after:
        spec = replace(spec, depends_on=with_after(spec, request.after))
    entry = parse_entrypoint(spec.entrypoint)
    python = _interpreter(request, entry, interpreters)
    directory = _directory(request, spec)
    if directory is not None and not _is_directory(request, directory):
        raise _one(request, "working_dir", f"{directory} is not a directory", "make it, or set working_dir: null")
    if entry.kind == "script" and directory is not None:
        script = directory / entry.target
        if (trouble := _file_problem(script)) is not None:
            hint = "the path is relative to working_dir"
            shown = entry.target if request.upload else script
            raise _one(request, "entrypoint", f"{shown} {trouble}", hint)
    modules = _modules(request, spec, directory or Path(request.cwd))
    _check_pip(request, spec, python or sys.executable)
    check_trackers(request, spec)
    return Checked(spec=spec, python=python or sys.executable, directory=directory, modules=modules, cell=cell)


def _directory(request: SubmitRequest, spec: JobSpec) -> Path | None:
    """Return the working directory; for a submission from another machine its upload. Raises WorkdirNeededError."""
    if spec.working_dir is None:
        return None
    if not request.remote:
        return Path(request.cwd, spec.working_dir)
    if not request.upload:
        raise WorkdirNeededError(
            f"working_dir {spec.working_dir} is on the submitter's machine",
            hint="submit it with a version of orch that uploads it",
            problems=[Problem(message=spec.working_dir, path="working_dir", source=request.source)],
        )
    return Path(request.cwd)


def _interpreter(request: SubmitRequest, entry: Entrypoint, known: dict[str, str]) -> str | None:
    """Return the interpreter that the command means; ``known`` are those of other jobs of the file."""
    python = entry.interpreter(_own_python() if request.remote else request.python)
    if entry.python is not None and python is None:
        raise _one(request, "entrypoint", f"there is no {entry.python!r} on your PATH", "activate an environment")
    if python is None or python in known:
        return None if python is None else known[python]
    if not os.access(python, os.X_OK):
        raise _one(request, "entrypoint", f"{python} cannot be executed here", "name an interpreter of this machine")
    if (trouble := _file_problem(Path(python))) is not None:
        raise _one(request, "entrypoint", f"{python} {trouble}", "name an interpreter of this machine")
    known[python] = interpreter_of(python)
    return known[python]


def _own_python() -> str:
    """Return the meaning of ``python`` for a submission from another machine, whose PATH does not apply here."""
    return find_python(os.environ.get("PATH", os.defpath)) or sys.executable


def _file_problem(path: Path) -> str | None:
    """Return why the daemon cannot read a regular file at a user's path; None where it can. Never waits."""
    try:
        os.close(open_plain(path, follow=True))
    except FileNotFoundError:
        return "does not exist"
    except NotPlainFileError:
        return "is not a regular file"
    except PermissionError:
        return f"cannot be read by the daemon, which runs as {user_name(os.getuid())}"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def _is_directory(request: SubmitRequest, directory: Path) -> bool:
    """Whether it is a directory. Raises InvalidSpecError for one that the daemon's user may not enter."""
    try:
        found = directory.is_dir()
        readable = not found or os.access(directory, os.R_OK | os.X_OK)
    except PermissionError:
        found = readable = False
    except OSError:  # for example, a name that is too long
        found, readable = False, True
    if not readable:
        reason = f"{directory} cannot be read by the daemon, which runs as {user_name(os.getuid())}"
        raise _one(request, "working_dir", reason, "let that user read it, and pass through the directories above it")
    return found


def _modules(request: SubmitRequest, spec: JobSpec, base: Path) -> tuple[Path, ...]:
    """Return the directories and wheels of ``py_modules``. Raises InvalidSpecError."""
    found: list[Path] = []
    for index, entry in enumerate(spec.runtime_env.py_modules):
        where, path = f"runtime_env.py_modules[{index}]", Path(os.path.realpath(Path(base, entry)))
        if request.remote and spec.working_dir is None:
            hint = "set working_dir to a directory that holds it: that is what is uploaded"
            raise _one(request, where, f"{entry} is on the submitter's machine, and no working_dir is uploaded", hint)
        if request.remote and not path.is_relative_to(os.path.realpath(base)):
            hint = "put it into working_dir, or into the interpreter's environment on the daemon's machine"
            raise _one(request, where, f"{entry} is not uploaded: it is outside working_dir", hint)
        if not (os.path.isdir(path) or (path.suffix == ".whl" and _file_problem(path) is None)):  # noqa: PTH112 - never raises
            hint = "name a package's directory or a wheel; a relative path counts from working_dir"
            raise _one(request, where, f"{path} is neither a directory nor a wheel", hint)
        if path.name in (other.name for other in found):
            raise _one(
                request, where, f"two of them are called {path.name}", "rename one, or put both into one directory"
            )
        found.append(path)
    return tuple(found)


def _check_pip(request: SubmitRequest, spec: JobSpec, python: str) -> None:
    """Check the condition for ``pip``: Ray builds its environment on its own interpreter, with virtualenv. Raises InvalidSpecError."""
    if not spec.runtime_env.pip:
        return
    if find_spec("virtualenv") is None:
        raise _one(request, "runtime_env.pip", "virtualenv is not installed here", install_line("runtime-env"))
    if Path(python).parent.resolve() != Path(sys.executable).parent.resolve():
        hint = "install the packages into that interpreter instead, or write python without a path"
        raise _one(request, "runtime_env.pip", f"packages are added to {sys.executable}, not to {python}", hint)


def check_trackers(request: SubmitRequest, spec: JobSpec, known: Mapping[str, TrackerPackage] = TRACKERS) -> None:
    """Check the trackers' packages in the interpreter of the daemon, which feeds them. Raises InvalidSpecError."""
    needed = {package: name for name in spec.trackers for package in known[name].missing()}
    if needed:
        message = f"{', '.join(dict.fromkeys(needed.values()))} cannot be imported by the daemon's {sys.executable}"
        hint = f"{sys.executable} -m pip install {' '.join(needed)}; then submit again"
        raise _one(request, "trackers", message, hint)
    remote = [name for name in TRACKIO_REMOTE if name in spec.env or name in spec.secrets]
    if "trackio" in spec.trackers and remote:
        message = f"{remote[0]} has no effect: orch writes Trackio's local store"
        raise _one(request, "trackers", message, "remove it, and send the project to a Space with `trackio sync`")


def _one(request: SubmitRequest, path: str, message: str, hint: str) -> InvalidSpecError:
    problem = Problem(message=message, path=path, hint=hint, source=request.source)
    return InvalidSpecError(f"{request.source} has one error", problems=[problem])
