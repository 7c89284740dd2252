"""Turns a checked submission into the events of its jobs: checked against the cluster, archived, files laid out."""

from __future__ import annotations

import os
import secrets as random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.api.errors import RefusedError, invalid_spec
from orchestrator.checkpoint.storage.storage import pin
from orchestrator.core.events import JobSubmitted
from orchestrator.core.ids import JobId, job_id
from orchestrator.core.lifecycle.fold import submitted
from orchestrator.core.scheduler.placement import could_ever_fit, missing_nodes, needs_home
from orchestrator.core.scheduler.resources import rank_size
from orchestrator.core.stored import spec_bytes
from orchestrator.daemon.jobs import workdir_archive as snapshot
from orchestrator.daemon.jobs.tidying import write_secrets
from orchestrator.daemon.submitting.checking import Checked
from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.private_files import make_private
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.job import change_spec
from orchestrator.spec.problems import SpecError, nearest
from orchestrator.train.trainer.config.config import trainer_findings
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.requests import SubmitRequest
    from orchestrator.api.service import Caller
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import GitState, LeftOut, MatrixCell, Prerequisite
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.model import JobSpec
    from orchestrator.spec.paths import Paths
    from orchestrator.spec.settings import Settings


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
    matrix: MatrixCell | None = None,
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
        matrix=matrix,
        spec_bytes=spec_bytes(checked.spec),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archived working directory; the jobs of a matrix share it."""

    digest: str = ""
    left_out: LeftOut | None = None
    size_bytes: int = 0


async def archive(directory: Path | None, settings: Settings, files: Pool, under_way: UnderWay) -> Archive:
    """Archive the working directory. Raises RefusedError."""
    if directory is None:
        return Archive()
    try:
        taken = await files.run(_archive, directory, settings, under_way)
    except snapshot.WorkdirError as error:
        raise RefusedError(str(error)) from error
    return Archive(digest=taken.digest, left_out=taken.left_out, size_bytes=taken.size_bytes)


def check_room(taken: Archive, jobs: int, free_bytes: int) -> None:
    """Refuse a matrix whose working copies do not fit on the disk. Raises RefusedError."""
    needed = taken.size_bytes * jobs
    if jobs > 1 and needed > free_bytes:
        raise RefusedError(
            f"{jobs} copies of working_dir need {needed / 1e6:.0f} MB, and {free_bytes / 1e6:.0f} MB are free",
            hint="list data in .gitignore and read it from its own place, or try fewer values",
        )


async def prepare(
    checked: Checked,
    request: SubmitRequest,
    caller: Caller,
    settings: Settings,
    resume_from: str | None,
    *,
    taken: Archive,
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
    who = _Who(user=caller.user, uid=caller.uid, path=path, key=_key(request.idempotency_key, checked.cell))
    work = str(paths.work(new_id))
    event = _event(checked, who, work, taken.digest, new_id, resume_from, at, left_out=taken.left_out, git=request.git)
    return structs.replace(event, prerequisites=prerequisites, matrix=checked.cell)


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


def _archive(directory: Path, settings: Settings, under_way: UnderWay) -> snapshot.Snapshot:
    with under_way.writing:
        return _take(directory, settings, under_way)


def _take(directory: Path, settings: Settings, under_way: UnderWay) -> snapshot.Snapshot:
    return snapshot.take(directory, under_way.blob, max_bytes=settings.snapshot_max_bytes)


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
        except snapshot.WorkdirError as error:
            raise RefusedError(str(error)) from error
        return _finish(settings.paths, new_id, resume_from, secrets)


def _lay_out(digest: str, settings: Settings, new_id: str, under_way: UnderWay) -> None:
    work = settings.paths.work(new_id)
    make_private(settings.paths.checkpoints(new_id))  # a rank would create it with its own umask
    if digest:
        snapshot.lay_out(digest, under_way.blob, work)
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
            snapshot.lay_out(taken.digest, under_way.blob, target)
        else:
            shutil.copyfile(module, target)
            sync_tree(target)


def probe(checked: Checked, prerequisites: tuple[Prerequisite, ...] = ()) -> Job:
    """Return the record that the submission would create, to compute where it would be placed."""
    event = _event(checked, _NOBODY, "", "", "probe-aaaaaa", None, time.time(), prerequisites=prerequisites)
    return submitted(event, 2**62)


def _take_modules_again(job: Job, settings: Settings, new_id: str, under_way: UnderWay) -> None:
    if not job.spec.runtime_env.py_modules:
        return
    modules = settings.paths.modules(job.id)
    try:
        _take_modules(sorted(modules.iterdir()), settings, new_id, under_way)
    except (OSError, snapshot.WorkdirError) as error:  # the job may have changed or removed them
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
    who = _Who(user=caller.user, uid=caller.uid, path=job.submission.path, key=f"rerun-{new_id}")
    work = str(settings.paths.work(new_id))
    digest = job.submission.snapshot
    event = _event(checked, who, work, digest, new_id, resume_from, at, rerun_of=job.id, prerequisites=prerequisites)
    return structs.replace(event, matrix=job.submission.matrix if in_matrix else None)
