"""From a submission's text to an accepted job: parsed, checked against the cluster, snapshotted, durable."""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets as random
import shutil
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.errors import InvalidSpecError, Problem, RefusedError, invalid_spec
from orchestrator.checkpoint.storage.pins import pin
from orchestrator.core.events import JobSubmitted
from orchestrator.core.ids import JobId, job_id
from orchestrator.core.lifecycle.fold import submitted
from orchestrator.core.scheduler.placement import could_ever_fit, needs_home, rank_size
from orchestrator.core.sentences.base import plural
from orchestrator.daemon.jobs import workdir_archive as snapshot
from orchestrator.daemon.jobs.git_state import git_state
from orchestrator.daemon.jobs.interpreter import interpreter_of
from orchestrator.daemon.jobs.prerequisites import with_after
from orchestrator.daemon.jobs.secrets import write_secrets
from orchestrator.private_files import make_private
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.job import JobSpec, change_spec, parse_job
from orchestrator.spec.plain_files import NotPlainFileError, open_plain
from orchestrator.spec.problems import SpecError
from orchestrator.train.trainer.config.check import trainer_findings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.service import Caller, SubmitRequest
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import GitState, LeftOut, Prerequisite
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.pools import Share
    from orchestrator.spec.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A submission that may be accepted: its spec, interpreter and working directory (None: an empty one).

    ``modules`` are what ``runtime_env.py_modules`` names.
    """

    spec: JobSpec
    python: str
    directory: Path | None
    modules: tuple[Path, ...] = ()


def check(request: SubmitRequest) -> Checked:
    """Parse and check everything that needs no cluster. Raises InvalidSpecError with every error at once."""
    try:
        spec = parse_job(request.yaml, source=request.source, overrides=request.overrides, rules=(trainer_findings,))
    except SpecError as error:
        raise invalid_spec(error) from error
    if request.after:
        spec = replace(spec, depends_on=with_after(spec, request.after))
    entry = parse_entrypoint(spec.entrypoint)
    python = entry.interpreter(request.python)
    if entry.python is not None and python is None:
        raise _one(request, "entrypoint", f"there is no {entry.python!r} on your PATH", "activate an environment")
    if python is not None and not os.access(python, os.X_OK):
        raise _one(request, "entrypoint", f"{python} cannot be executed here", "name an interpreter of this machine")
    if python is not None:
        if (trouble := _file_trouble(Path(python))) is not None:
            raise _one(request, "entrypoint", f"{python} {trouble}", "name an interpreter of this machine")
        python = interpreter_of(python)
    directory = None if spec.working_dir is None else Path(request.cwd, spec.working_dir)
    if directory is not None and not _is_directory(request, directory):
        raise _one(request, "working_dir", f"{directory} is not a directory", "make it, or set working_dir: null")
    if entry.kind == "script" and directory is not None:
        script = directory / entry.target
        if (trouble := _file_trouble(script)) is not None:
            hint = "the path is relative to working_dir"
            raise _one(request, "entrypoint", f"{script} {trouble}", hint)
    modules = _modules(request, spec, directory or Path(request.cwd))
    _check_pip(request, spec, python or sys.executable)
    return Checked(spec=spec, python=python or sys.executable, directory=directory, modules=modules)


def _file_trouble(path: Path) -> str | None:
    """Why there is no regular file at a user's path that the daemon can read; None where there is one. Never waits."""
    try:
        os.close(open_plain(path, follow=True))
    except FileNotFoundError:
        return "does not exist"
    except NotPlainFileError:
        return "is not a regular file"
    except PermissionError:
        return f"cannot be read by the daemon, which runs as {owner_name()}"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def _is_directory(request: SubmitRequest, directory: Path) -> bool:
    """Raises InvalidSpecError for one that the daemon's user may not look into: the submitter's is another one."""
    try:
        found = directory.is_dir()
        readable = not found or os.access(directory, os.R_OK | os.X_OK)
    except PermissionError:
        found = readable = False
    except OSError:  # a name that is too long, say
        found, readable = False, True
    if not readable:
        reason = f"{directory} cannot be read by the daemon, which runs as {owner_name()}"
        raise _one(request, "working_dir", reason, "let that user read it, and pass through the directories above it")
    return found


def _modules(request: SubmitRequest, spec: JobSpec, base: Path) -> tuple[Path, ...]:
    """The directories and wheels of ``py_modules``. Raises InvalidSpecError."""
    found: list[Path] = []
    for index, entry in enumerate(spec.runtime_env.py_modules):
        where, path = f"runtime_env.py_modules[{index}]", Path(os.path.realpath(Path(base, entry)))
        if not (os.path.isdir(path) or (path.suffix == ".whl" and _file_trouble(path) is None)):  # noqa: PTH112 - never raises
            hint = "name a package's directory or a wheel; a relative path counts from working_dir"
            raise _one(request, where, f"{path} is neither a directory nor a wheel", hint)
        if path.name in (other.name for other in found):
            raise _one(
                request, where, f"two of them are called {path.name}", "rename one, or put both into one directory"
            )
        found.append(path)
    return tuple(found)


def _check_pip(request: SubmitRequest, spec: JobSpec, python: str) -> None:
    """Ray builds the packages' environment on its own interpreter, with virtualenv. Raises InvalidSpecError."""
    if not spec.runtime_env.pip:
        return
    if find_spec("virtualenv") is None:
        raise _one(request, "runtime_env.pip", "virtualenv is not installed here", "pip install virtualenv")
    if Path(python).parent.resolve() != Path(sys.executable).parent.resolve():
        hint = "install the packages into that interpreter instead, or write python without a path"
        raise _one(request, "runtime_env.pip", f"packages are added to {sys.executable}, not to {python}", hint)


def check_fits(checked: Checked, nodes: Mapping[str, Node]) -> None:
    """Refuse what this cluster can never hold, with the remedy. Raises RefusedError."""
    worker = checked.spec.resources.resources_per_worker
    alive = [n for n in nodes.values() if n.alive]
    if worker.gpu and not any(n.gpus for n in alive):
        raise RefusedError(
            f"the job asks for {worker.gpu:g} GPU per rank, and this cluster has none",
            hint="set resources_per_worker: {gpu: 0} to train on CPUs, or try things out with `orch down` and"
            " `orch up --simulate-gpus 2`",
        )
    if alive and not could_ever_fit(probe(checked), nodes):
        _refuse_unshared(checked, alive)
        per_node = "; ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in alive)
        workers, (cpus, gpus, _) = probe(checked).size.least, rank_size(probe(checked))
        raise RefusedError(
            f"no node can fit {plural(workers, 'rank')} with {plural(gpus, 'GPU')} and {plural(cpus, 'CPU')} ({per_node})",
            hint="ask for fewer ranks, or less per rank (resources_per_worker)",
        )


def _refuse_unshared(checked: Checked, alive: Sequence[Node]) -> None:
    """The job would fit, were it not for nodes that its checkpoints would be lost with."""
    apart = [n.name for n in alive if not n.shares_home]
    if apart and could_ever_fit(probe(checked), {n.id: replace(n, shares_home=True) for n in alive}):
        raise RefusedError(
            f"the job needs {', '.join(sorted(set(apart)))}, which do not share ORCH_HOME with the daemon:"
            f" {needs_home(probe(checked))}",
            hint="set checkpoint.storage_path to a directory that every node shares (and leave checkpoint.watch out), or"
            " share ORCH_HOME/jobs",
        )


def _one(request: SubmitRequest, path: str, message: str, hint: str) -> InvalidSpecError:
    problem = Problem(message=message, path=path, hint=hint, source=request.source)
    return InvalidSpecError(f"{request.source} has one error", problems=[problem])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Who:
    user: str
    uid: int
    path: str
    key: str


_NOBODY = _Who(user="", uid=0, path="", key="")


def _event(
    checked: Checked,
    who: _Who,
    work_dir: str,
    digest: str,
    new_id: str,
    resume_from: str | None,
    at: float,
    rerun_of: str | None = None,
    left_out: LeftOut | None = None,
    git: GitState | None = None,
    prerequisites: tuple[Prerequisite, ...] = (),
) -> JobSubmitted:
    return JobSubmitted(
        job_id=JobId(new_id),
        at=at,
        name=checked.spec.name,
        spec=checked.spec,
        user=who.user,
        uid=who.uid,
        idempotency_key=who.key,
        python=checked.python,
        path=who.path,
        work_dir=work_dir,
        snapshot=digest,
        resume_from=resume_from,
        rerun_of=rerun_of,
        left_out=left_out,
        git=git,
        prerequisites=prerequisites,
    )


async def prepare(
    checked: Checked,
    request: SubmitRequest,
    caller: Caller,
    settings: Settings,
    resume_from: str | None,
    *,
    files: Share,
    at: float,
    prerequisites: tuple[Prerequisite, ...] = (),
) -> JobSubmitted:
    """Take the snapshot, lay out the working copy, write the secrets; the event that submits the job ``at`` a wall time."""
    new_id = job_id(checked.spec.name, random.randbits(64))
    paths = settings.paths
    work = paths.work(new_id)
    digest, left_out, git = "", None, None
    try:
        if checked.directory is not None:
            taken, git = await asyncio.gather(
                files.run(_take, checked.directory, settings), files.run(git_state, checked.directory)
            )
            digest, left_out = taken.digest, taken.left_out
        await files.run(_lay_out, digest, settings, new_id)
        await files.run(_take_modules, checked.modules, settings, new_id)
    except snapshot.SnapshotError as error:
        raise RefusedError(str(error)) from error
    resume_from = await _pinned(resume_from, settings, new_id, files)
    write_secrets(settings.paths, new_id, request.secrets)
    path = os.pathsep.join(dict.fromkeys([str(Path(checked.python).parent), *request.path.split(os.pathsep)]))
    who = _Who(user=caller.user, uid=caller.uid, path=path, key=request.idempotency_key)
    event = _event(checked, who, str(work), digest, new_id, resume_from, at, left_out=left_out, git=git)
    return replace(event, prerequisites=prerequisites)


async def _pinned(resume_from: str | None, settings: Settings, new_id: str, files: Share) -> str | None:
    """The checkpoint to begin with, kept beside the new job: its own job may remove it before this one starts."""
    if resume_from is None:
        return None
    return await files.run(pin, resume_from, settings.paths.job(new_id) / "resume")


def _take(directory: Path, settings: Settings) -> snapshot.Snapshot:
    return snapshot.take(directory, settings.paths.blob, max_bytes=settings.snapshot_max_bytes)


def _lay_out(digest: str, settings: Settings, new_id: str) -> None:
    work = settings.paths.work(new_id)
    make_private(settings.paths.checkpoints(new_id))  # a rank would give it the mode of its own umask
    if digest:
        snapshot.lay_out(digest, settings.paths.blob, work)
    else:
        work.mkdir(parents=True, exist_ok=True)


def _take_modules(modules: Sequence[Path], settings: Settings, new_id: str) -> None:
    """The job's own copies: what is queued or restarted runs what was submitted."""
    paths = settings.paths
    for module in modules:
        target = paths.modules(new_id) / module.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if module.is_dir():
            taken = _take(module, settings)
            snapshot.lay_out(taken.digest, paths.blob, target)
        else:
            shutil.copyfile(module, target)


def discard(settings: Settings, new_id: str) -> None:
    """Remove what ``prepare`` made for a job that was not accepted after all."""
    shutil.rmtree(settings.paths.job(new_id), ignore_errors=True)


def owner_name() -> str:
    """The daemon's user."""
    return getpass.getuser()


def probe(checked: Checked, prerequisites: tuple[Prerequisite, ...] = ()) -> Job:
    """A record as the submission would make, for asking where it would go."""
    event = _event(checked, _NOBODY, "", "", "probe-aaaaaa", None, time.time(), prerequisites=prerequisites)
    return submitted(event, 2**62)


def _copy_modules(job: Job, settings: Settings, new_id: str) -> None:
    if not job.spec.runtime_env.py_modules:
        return
    try:
        shutil.copytree(settings.paths.modules(job.id), settings.paths.modules(new_id))
    except FileNotFoundError as error:
        raise RefusedError(
            f"the py_modules of {job.id} are gone from {settings.paths.modules(job.id)}",
            hint="submit its job.yaml again",
        ) from error


def spec_of_rerun(job: Job, overrides: Sequence[str], nodes: Mapping[str, Node]) -> JobSpec:
    """The job's spec with ``overrides`` over it. Raises InvalidSpecError, RefusedError for what cannot run from its archive."""
    if not overrides:
        return job.spec
    try:
        spec = change_spec(job.spec, overrides, rules=(trainer_findings,))
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
    """The interpreter that the entry point names in full, else the one that was found at the job's submission."""
    return parse_entrypoint(spec.entrypoint).interpreter(job.submission.python)


async def prepare_rerun(
    job: Job,
    spec: JobSpec,
    caller: Caller,
    settings: Settings,
    secrets: Mapping[str, str],
    resume_from: str | None,
    *,
    files: Share,
    at: float,
    prerequisites: tuple[Prerequisite, ...] = (),
) -> JobSubmitted:
    """A new job that runs ``spec``, see ``spec_of_rerun``, from the same snapshot as ``job``."""
    new_id = job_id(spec.name, random.randbits(64))
    await files.run(_lay_out, job.submission.snapshot, settings, new_id)
    await files.run(_copy_modules, job, settings, new_id)
    resume_from = await _pinned(resume_from, settings, new_id, files)
    write_secrets(settings.paths, new_id, secrets)
    checked = Checked(spec=spec, python=_rerun_python(job, spec), directory=None)
    who = _Who(user=caller.user, uid=caller.uid, path=job.submission.path, key=f"rerun-{new_id}")
    work = str(settings.paths.work(new_id))
    digest = job.submission.snapshot
    return _event(checked, who, work, digest, new_id, resume_from, at, rerun_of=job.id, prerequisites=prerequisites)
