"""Resolves the jobs that a job depends on when it is accepted, and keeps their ends while jobs wait for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import InvalidSpecError, Problem
from orchestrator.core.events import Prerequisite
from orchestrator.core.states import EndCondition, JobState
from orchestrator.spec.model import Dependency
from orchestrator.store import errors as store_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.model import JobSpec
    from orchestrator.store.store import Store

_WAYS: Final = {EndCondition.SUCCESS: "succeed", EndCondition.FAILURE: "fail", EndCondition.ANY: "end"}


class PrerequisiteEnds:
    """End states of the jobs on which live jobs depend; None for one without a record."""

    def __init__(self) -> None:
        self.known: dict[JobId, JobState | None] = {}
        self.failed_fast: dict[str, JobId] = {}
        self._dependents: dict[JobId, set[JobId]] = {}

    def expect(self, job: Job, states: Mapping[JobId, JobState | None]) -> None:
        """Add a live job, and the states of its prerequisites that are not live."""
        for needed in job.submission.prerequisites:
            self._dependents.setdefault(needed.job_id, set()).add(job.id)
        self.known.update(states)

    def decided(self, job: Job) -> None:
        """Record a job whose failure ends its matrix, until ``ended`` is called for it."""
        cell = job.submission.matrix
        if cell is not None and cell.fail_fast and job.state is JobState.FAILED:
            self.failed_fast[cell.matrix_id] = job.id

    def ended(self, job: Job) -> None:
        """Record a job's end while jobs depend on it; drop prerequisites that only it had."""
        if job.submission.matrix is not None:
            self.failed_fast.pop(job.submission.matrix.matrix_id, None)
        if job.id in self._dependents:
            self.known[job.id] = job.state
        for needed in job.submission.prerequisites:
            left = self._dependents.get(needed.job_id, set())
            left.discard(job.id)
            if not left:
                self._dependents.pop(needed.job_id, None)
                self.known.pop(needed.job_id, None)


def still_needed(jobs: Collection[Job]) -> set[JobId]:
    """Return the prerequisites of ``jobs`` that must keep their records: until a job has started, or ended."""
    waiting = (job for job in jobs if not job.state.is_terminal and not job.attempts)
    return {needed.job_id for job in waiting for needed in job.submission.prerequisites}


async def prerequisite_states(job: Job, live: Mapping[JobId, Job], store: Store) -> dict[JobId, JobState | None]:
    """Return the states of ``job``'s prerequisites that are not in ``live``, which may change meanwhile."""
    found: dict[JobId, JobState | None] = {}
    needed = [needed.job_id for needed in job.submission.prerequisites]
    while missing := [job_id for job_id in needed if job_id not in live and job_id not in found]:
        for job_id in missing:
            try:
                found[job_id] = (await store.job(job_id)).state
            except (store_errors.JobNotFoundError, store_errors.UnreadableRecordError):
                found[job_id] = None
    return found


def with_after(spec: JobSpec, after: Sequence[str]) -> tuple[Dependency, ...]:
    """Return the dependencies of the spec and of ``orch submit --after JOB[:success|failure|any]``. Raises InvalidSpecError."""
    found, problems = list(spec.depends_on), []
    for text in after:
        name, _, condition = text.partition(":")
        known = condition in list(EndCondition) or (not condition and ":" not in text)
        if not name or not known:
            hint = "write --after JOB, or --after JOB:success, :failure or :any"
            problems.append(Problem(message=f"{text!r} is not a job and how it must end", path="--after", hint=hint))
            continue
        dependency = Dependency(job=name, on="success" if not condition else EndCondition(condition).value)
        if dependency not in found:
            found.append(dependency)
    if problems:
        raise InvalidSpecError(_heading("--after", problems), problems=problems)
    return tuple(found)


async def own_name_by_id(spec: JobSpec, store: Store, uid: int) -> JobSpec:
    """Return the spec with the id of an earlier job of its own name in ``depends_on``, which ``--after`` may mean.

    A spec that is read again, for a rerun with changes, would wait for itself by that name.
    """
    if all(dependency.job != spec.name for dependency in spec.depends_on):
        return spec
    try:
        earlier = (await store.find(spec.name, uid)).job.id
    except (
        store_errors.JobNotFoundError,
        store_errors.AmbiguousJobError,
        store_errors.UnreadableRecordError,
    ):  # resolve() reports it with the others
        return spec
    by_id = (replace(one, job=earlier) if one.job == spec.name else one for one in spec.depends_on)
    return replace(spec, depends_on=tuple(by_id))


async def resolve(spec: JobSpec, store: Store, source: str, uid: int) -> tuple[Prerequisite, ...]:
    """Return the ids that ``depends_on`` of this user means now. Raises InvalidSpecError with every error."""
    found: dict[JobId, Prerequisite] = {}
    problems: list[Problem] = []
    for index, dependency in enumerate(spec.depends_on):
        path = f"depends_on[{index}].job"
        try:
            job = (await store.find(dependency.job, uid)).job
        except store_errors.NamedByOthersError as error:
            hint = f"write {' or '.join(f'{name} ({job_id})' for name, job_id in error.candidates)}"
            message = f"you have no job {dependency.job!r}; other users have"
            problems.append(Problem(message=message, path=path, hint=hint, source=source))
            continue
        except store_errors.JobNotFoundError:
            hint = "submit that job first; `orch status --state all` lists the known ones"
            problems.append(Problem(message=f"there is no job {dependency.job!r}", path=path, hint=hint, source=source))
            continue
        except store_errors.UnreadableRecordError as error:
            problems.append(Problem(message=str(error), path=path, hint="leave it out", source=source))
            continue
        except store_errors.AmbiguousJobError as error:
            hint = f"write one of: {', '.join(map(str, error.candidates))}"
            problems.append(
                Problem(message=f"{dependency.job!r} fits several jobs", path=path, hint=hint, source=source)
            )
            continue
        needed = Prerequisite(job_id=job.id, on=EndCondition(dependency.on))
        message, hint = _refusal(needed, job, found.get(job.id))
        if message:
            problems.append(Problem(message=message, path=path, hint=hint, source=source))
        found.setdefault(job.id, needed)
    if problems:
        raise InvalidSpecError(_heading(source, problems), problems=problems)
    return tuple(found.values())


def _refusal(needed: Prerequisite, job: Job, before: Prerequisite | None) -> tuple[str, str]:
    """Return what is wrong with a dependency on ``job``, and what to do; nothing where it can be met."""
    if before is not None and before.on is not needed.on:
        message = f"{job.id} is to {_WAYS[before.on]} and to {_WAYS[needed.on]}"
        return message, "name each job once; `on: any` waits for its end, whichever it is"
    if job.state.is_terminal and not needed.on.met_by(job.state):
        message = f"{job.id} was required to {_WAYS[needed.on]}, and has ended {job.state}"
        return message, "run it again with `orch rerun`, or leave it out"
    return "", ""


def _heading(source: str, problems: Sequence[Problem]) -> str:
    return f"{source} has {'one error' if len(problems) == 1 else f'{len(problems)} errors'}"
