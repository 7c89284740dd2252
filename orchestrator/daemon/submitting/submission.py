"""Checks a submission, first without the cluster (its text, interpreter, script and directories), then against it; archives, lays files out, makes the events of its jobs."""

from __future__ import annotations

import os
import re
import secrets as random
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.api.errors import InvalidSpecError, Problem, RefusedError, WorkdirNeededError, invalid_spec
from orchestrator.api.server.gate import user_name
from orchestrator.api.transport.submission import find_python
from orchestrator.checkpoint.storage.storage import pin
from orchestrator.core.events import JobSubmitted, MatrixCell
from orchestrator.core.ids import JobId, job_id
from orchestrator.core.lifecycle.fold import submitted
from orchestrator.core.scheduler.placement import could_ever_fit, missing_nodes, needs_home, rank_size
from orchestrator.core.stored import spec_bytes
from orchestrator.daemon.jobs.prerequisites import with_after
from orchestrator.daemon.jobs.tidying import write_secrets
from orchestrator.daemon.submitting import archives
from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.parts import install_line, missing_modules
from orchestrator.private_files import make_private
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.job import change_spec, parse_jobs
from orchestrator.spec.plain_files import NotPlainFileError, open_plain
from orchestrator.spec.problems import SpecError, nearest
from orchestrator.train.trainer.config.config import trainer_findings
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.trackers.names import TrackerPackage
    from orchestrator.api.requests import SubmitRequest
    from orchestrator.api.service import Caller
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Prerequisite
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.entrypoint import Entrypoint
    from orchestrator.spec.job import JobFile
    from orchestrator.spec.matrix import Combination
    from orchestrator.spec.model import JobSpec, MatrixSpec
    from orchestrator.spec.paths import Paths
    from orchestrator.spec.settings import Settings

ASK_SECONDS: Final = 10.0
MAX_BYTES: Final = 1024 * 1024
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
        return _IMPORTS_TORCH.search(file.read(MAX_BYTES)) is not None


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


KNOWN_FILES: Final = 64
MAX_KNOWN_CHARACTERS: Final = 16 * 1024

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
    parse = _known if len(request.yaml) <= MAX_KNOWN_CHARACTERS else _known.__wrapped__
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


def check_fits(checked: Checked, nodes: Mapping[str, Node]) -> None:
    """Refuse a job that this cluster can never hold, with the remedy. Raises RefusedError."""
    worker = checked.spec.resources.resources_per_worker
    present = [n for n in nodes.values() if n.alive] or list(nodes.values())
    _refuse_unknown_nodes(checked, nodes)
    _refuse_unknown_labels(checked, nodes)
    if worker.gpu and not any(n.gpus for n in nodes.values()):
        raise RefusedError(
            f"the job asks for {worker.gpu:g} GPU per rank, and this cluster has none",
            hint="set resources_per_worker: {gpu: 0} to train on CPUs; a daemon with --simulate-gpus 2 simulates GPUs, to try"
            " things out",
        )
    if nodes and not could_ever_fit(probe(checked), nodes):
        _refuse_unshared(checked, present)
        if missing_nodes(probe(checked), nodes):
            return  # it waits, with them as its reason
        per_node = "; ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in present)
        workers, (cpus, gpus, _) = probe(checked).size.least, rank_size(probe(checked))
        raise RefusedError(
            f"no node can fit {plural(workers, 'rank')} with {plural(gpus, 'GPU')} and {plural(cpus, 'CPU')} ({per_node})",
            hint="ask for fewer ranks, or less per rank (resources_per_worker)"
            + (", or for more nodes (resources.nodes)" if checked.spec.resources.nodes else ""),
        )


def _refuse_unknown_nodes(checked: Checked, nodes: Mapping[str, Node]) -> None:
    """Refuse a job that names nodes which this cluster does not have. Raises RefusedError."""
    known = {n.name for n in nodes.values()} | nodes.keys()
    unknown = [name for name in checked.spec.resources.nodes if name not in known]
    if unknown:
        raise RefusedError(
            f"there is no node {', '.join(map(repr, unknown))}; the nodes are {', '.join(sorted({n.name for n in nodes.values()}))}",
            hint="fix resources.nodes; `orch nodes` shows the nodes",
        )


def _refuse_unknown_labels(checked: Checked, nodes: Mapping[str, Node]) -> None:
    """Refuse a job that requests labels that no node of this cluster has, or none together. Raises RefusedError."""
    asked = checked.spec.resources.node_labels
    if not asked or any(n.labels.items() >= asked.items() for n in nodes.values()):
        return
    known: dict[str, set[str]] = {}
    for key, value in (item for n in nodes.values() for item in n.labels.items()):
        known.setdefault(key, set()).add(value)
    problems = [found for key, value in asked.items() if (found := _unknown_label(key, value, known))]
    if not problems:
        problems = [f"no node has all of the labels {', '.join(f'{key}={asked[key]}' for key in asked)}"]
    raise RefusedError(
        "; ".join(problems),
        hint="fix resources.node_labels, or set it with `orch nodes label`; `orch nodes` shows the labels",
    )


def _unknown_label(key: str, value: str, known: Mapping[str, set[str]]) -> str:
    """Return what is wrong with a label, and what may have been meant; nothing where a node has it."""
    if key not in known:
        meant = nearest(key, sorted(known))
        return f"no node has the label {key}" + (f" (did you mean {meant}?)" if meant else "")
    if value in known[key]:
        return ""
    meant = nearest(value, sorted(known[key]))
    asked = f" (did you mean {meant}?)" if meant else f" (there is {', '.join(sorted(known[key]))})"
    return f"no node has the label {key}={value}{asked}"


def _refuse_unshared(checked: Checked, present: Sequence[Node]) -> None:
    """Refuse a job that fits only on nodes with which its checkpoints would be lost."""
    apart = [n.name for n in present if not n.shares_home]
    sharing = {n.id: replace(n, shares_home=True, alive=True) for n in present}
    if apart and could_ever_fit(probe(checked), sharing):
        raise RefusedError(
            f"the job needs {', '.join(sorted(set(apart)))}, which do not share ORCH_HOME with the daemon:"
            f" {needs_home(probe(checked))}",
            hint="set checkpoint.storage_path to a directory that every node shares (and leave checkpoint.watch out), or"
            " share ORCH_HOME/jobs",
        )


def _event(checked: Checked, new_id: str, at: float, **fields: Any) -> JobSubmitted:
    """Return the event that submits the job; ``fields`` are what does not follow from its checked spec."""
    spec = checked.spec
    return JobSubmitted(
        job_id=JobId(new_id),
        at=at,
        name=spec.name,
        spec=spec,
        python=checked.python,
        spec_bytes=spec_bytes(spec),
        **fields,
    )


async def archive(directory: Path | None, settings: Settings, files: Pool, under_way: UnderWay) -> archives.Snapshot:
    """Archive the working directory, which the jobs of a matrix share; nothing without one. Raises RefusedError."""
    if directory is None:
        return archives.Snapshot()
    try:
        return await files.run(_archive, directory, settings, under_way)
    except archives.WorkdirError as error:
        raise RefusedError(str(error)) from error


def check_room(taken: archives.Snapshot, jobs: int, free_bytes: int) -> None:
    """Refuse a matrix whose working copies do not fit on the disk. Raises RefusedError."""
    needed = taken.size_bytes * jobs
    if jobs > 1 and needed > free_bytes:
        raise RefusedError(
            f"{jobs} copies of working_dir need {size(needed)}, and {size(free_bytes)} are free",
            hint="list data in .gitignore and read it from its own place, or try fewer values",
        )


async def prepare(
    checked: Checked,
    request: SubmitRequest,
    caller: Caller,
    settings: Settings,
    resume_from: str | None,
    *,
    taken: archives.Snapshot,
    files: Pool,
    at: float,
    under_way: UnderWay,
    prerequisites: tuple[Prerequisite, ...] = (),
) -> JobSubmitted:
    """Put the job's files on disk; return the event that submits the job ``at`` a wall time."""
    new_id = _new_id(checked.spec, under_way)
    paths = settings.paths
    resume_from = await files.run(
        _lay_out_all, taken.digest, checked, settings, new_id, under_way, resume_from, request.secrets
    )
    path = os.pathsep.join(dict.fromkeys([str(Path(checked.python).parent), *request.path.split(os.pathsep)]))
    return _event(
        checked,
        new_id,
        at,
        user=caller.user,
        uid=caller.uid,
        idempotency_key=_key(request.idempotency_key, checked.cell),
        path=path,
        work_dir=str(paths.work(new_id)),
        snapshot=taken.digest,
        resume_from=resume_from,
        left_out=taken.left_out,
        git=request.git,
        prerequisites=prerequisites,
        matrix=checked.cell,
    )


def _new_id(spec: JobSpec, under_way: UnderWay) -> str:
    new_id = job_id(spec.name, random.randbits(64))
    under_way.job_ids.append(new_id)
    return new_id


def _finish(paths: Paths, new_id: str, resume_from: str | None, secrets: Mapping[str, str]) -> str | None:
    """Keep the checkpoint to start from beside the new job, as its own job may remove it, and write the secrets.

    Then the names in the job's directory, and its own, are put on disk. Return where the checkpoint is kept.
    """
    if resume_from is not None:
        resume_from = pin(resume_from, paths.job(new_id) / "resume")
    write_secrets(paths, new_id, secrets)
    sync_directory(paths.job(new_id))
    sync_directory(paths.jobs)
    return resume_from


def _key(request_key: str, cell: MatrixCell | None) -> str:
    """Return a job's key, unique in a matrix; no client's key has a slash."""
    return request_key if cell is None or not cell.index or not request_key else f"{request_key}/{cell.index}"


def _archive(directory: Path, settings: Settings, under_way: UnderWay) -> archives.Snapshot:
    with under_way.writing:
        return _take(directory, settings, under_way)


def _take(directory: Path, settings: Settings, under_way: UnderWay) -> archives.Snapshot:
    return archives.take(directory, under_way.blob, max_bytes=settings.snapshot_max_bytes)


def _lay_out_all(
    digest: str,
    checked: Checked,
    settings: Settings,
    new_id: str,
    under_way: UnderWay,
    resume_from: str | None,
    secrets: Mapping[str, str],
) -> str | None:
    """Put all files of the job on disk, in one turn of a thread; return where the checkpoint to start from is kept. Raises RefusedError."""
    with under_way.writing:
        try:
            _lay_out(digest, settings, new_id, under_way)
            _take_modules(checked.modules, settings, new_id, under_way)
        except archives.WorkdirError as error:
            raise RefusedError(str(error)) from error
        return _finish(settings.paths, new_id, resume_from, secrets)


def _lay_out(digest: str, settings: Settings, new_id: str, under_way: UnderWay) -> None:
    work = settings.paths.work(new_id)
    make_private(settings.paths.checkpoints(new_id))  # a rank would create it with its own umask
    if digest:
        archives.lay_out(digest, under_way.blob, work)
    else:
        work.mkdir(parents=True, exist_ok=True)


def _take_modules(modules: Sequence[Path], settings: Settings, new_id: str, under_way: UnderWay) -> None:
    """Copy the modules for the job: a queued or restarted job runs what was submitted."""
    paths = settings.paths
    for module in modules:
        target = paths.modules(new_id) / module.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if module.is_dir():
            taken = _take(module, settings, under_way)
            archives.lay_out(taken.digest, under_way.blob, target)
        else:
            shutil.copyfile(module, target)
            sync_tree(target)


def probe(checked: Checked, prerequisites: tuple[Prerequisite, ...] = ()) -> Job:
    """Return the record that the submission would create, to compute where it would be placed."""
    unnamed = {"user": "", "uid": 0, "idempotency_key": "", "path": "", "work_dir": "", "snapshot": ""}
    return submitted(_event(checked, "probe-aaaaaa", time.time(), **unnamed, prerequisites=prerequisites), 2**62)


def _take_modules_again(job: Job, settings: Settings, new_id: str, under_way: UnderWay) -> None:
    if not job.spec.runtime_env.py_modules:
        return
    modules = settings.paths.modules(job.id)
    try:
        _take_modules(sorted(modules.iterdir()), settings, new_id, under_way)
    except (OSError, archives.WorkdirError) as error:  # the job may have changed or removed them
        raise RefusedError(
            f"the py_modules of {job.id} cannot be copied from {modules}: {error}",
            hint="submit its job.yaml again",
        ) from error


def _lay_out_rerun(
    job: Job, settings: Settings, new_id: str, under_way: UnderWay, resume_from: str | None, secrets: Mapping[str, str]
) -> str | None:
    with under_way.writing:
        _lay_out(job.submission.snapshot, settings, new_id, under_way)
        _take_modules_again(job, settings, new_id, under_way)
        return _finish(settings.paths, new_id, resume_from, secrets)


def spec_of_rerun(job: Job, overrides: Sequence[str], nodes: Mapping[str, Node]) -> JobSpec:
    """Return the job's spec with ``overrides``. Raises InvalidSpecError, RefusedError for what cannot run from its archive."""
    if not overrides:
        return replace(job.spec, hold=False, start_at=None)
    try:
        spec = change_spec(replace(job.spec, hold=False, start_at=None), overrides, rules=(trainer_findings,))
    except SpecError as error:
        raise invalid_spec(error) from error
    for key, same in (
        ("working_dir", spec.working_dir == job.spec.working_dir),
        ("runtime_env", spec.runtime_env == job.spec.runtime_env),
    ):
        if not same:
            raise RefusedError(
                f"a rerun has the files of {job.id}: {key} cannot change", hint="submit its job.yaml again"
            )
    check_fits(Checked(spec=spec, python=_rerun_python(job, spec), directory=None), nodes)
    return spec


def _rerun_python(job: Job, spec: JobSpec) -> str:
    """Return the interpreter that the entry point names in full, else the one found at the job's submission."""
    return parse_entrypoint(spec.entrypoint).interpreter(job.submission.python)


async def prepare_rerun(
    job: Job,
    spec: JobSpec,
    caller: Caller,
    settings: Settings,
    secrets: Mapping[str, str],
    resume_from: str | None,
    *,
    files: Pool,
    at: float,
    under_way: UnderWay,
    prerequisites: tuple[Prerequisite, ...] = (),
    in_matrix: bool = False,
) -> JobSubmitted:
    """Create a job that runs ``spec`` (see ``spec_of_rerun``) from ``job``'s archive; ``in_matrix``: at its place in the matrix."""
    new_id = _new_id(spec, under_way)
    resume_from = await files.run(_lay_out_rerun, job, settings, new_id, under_way, resume_from, secrets)
    checked = Checked(spec=spec, python=_rerun_python(job, spec), directory=None)
    return _event(
        checked,
        new_id,
        at,
        user=caller.user,
        uid=caller.uid,
        idempotency_key=f"rerun-{new_id}",
        path=job.submission.path,
        work_dir=str(settings.paths.work(new_id)),
        snapshot=job.submission.snapshot,
        resume_from=resume_from,
        rerun_of=job.id,
        prerequisites=prerequisites,
        matrix=job.submission.matrix if in_matrix else None,
    )
