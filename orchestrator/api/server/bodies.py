"""Request bodies: the only untrusted JSON, read strictly and within bounds, turned into the service's records.

Other modules of the API use Pydantic only for bodies that derive from ``Body``. A refused value is named by its place
and never repeated: it may be a secret.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from orchestrator.api.errors import PROBLEM_CONTENT_TYPE, BadRequestError, Problem, RequestTooLargeError
from orchestrator.api.protocol import (
    MAX_ASKED_PIECES,
    MAX_MANIFEST_BYTES,
    MAX_NUMBER,
    MAX_PIECE_BYTES,
    MAX_TOGETHER,
    MAX_YAML_BYTES,
)
from orchestrator.api.service import ActionRequest, ProfileRequest, SubmitRequest, Verb
from orchestrator.api.transport.submission import MAX_BRANCH
from orchestrator.core.events import GitState
from orchestrator.spec.reader.passing import MOST_VARIABLES
from orchestrator.train.script.profiling import DEFAULT_STEPS, MAX_STEPS

MAX_OVERRIDES = 200
MAX_SECRETS = 100
MAX_AFTER = 100
MAX_PROFILE_SECONDS = 600.0


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("must be an absolute path")
    return path


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    return text


AbsolutePath = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_absolute)]
Text = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_no_nul)]
LongText = Annotated[str, StringConstraints(max_length=65536), AfterValidator(_no_nul)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Key = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{8,128}$")]


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Body(BaseModel):
    """Base of all bodies: no conversion of types, no unknown keys, no value in an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class GitBody(Body):
    """The git state of the submitter's working directory."""

    commit: Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})?$")]
    branch: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=MAX_BRANCH)] = ""
    dirty: bool = False


class SubmitBody(Body):
    """A job.yaml as text, with the directory and the environment of its submission."""

    yaml: str
    source: Text = "job.yaml"
    idempotency_key: Key
    cwd: AbsolutePath
    path: LongText = ""
    python: AbsolutePath | None = None
    overrides: list[Text] = Field(default_factory=list, max_length=MAX_OVERRIDES)
    secrets: dict[VariableName, LongText] = Field(default_factory=dict, max_length=MAX_SECRETS, repr=False)
    passed: dict[VariableName, LongText] = Field(default_factory=dict, max_length=MOST_VARIABLES, repr=False)
    resume_from: Annotated[str, StringConstraints(max_length=300)] | None = None
    after: list[Annotated[str, StringConstraints(max_length=300)]] = Field(default_factory=list, max_length=MAX_AFTER)

    upload: list[Digest] = Field(default_factory=list, max_length=MAX_MANIFEST_BYTES // MAX_PIECE_BYTES)
    git: GitBody | None = None

    def request(self) -> SubmitRequest:
        """Return the service's record. Raises RequestTooLargeError for a text over the bound."""
        if len(self.yaml.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
            raise RequestTooLargeError(
                f"{self.source} is larger than {MAX_YAML_BYTES // 1024} KiB",
                hint="a job.yaml describes a job; its data belongs in files of the working directory",
            )
        return SubmitRequest(
            yaml=self.yaml,
            source=self.source,
            idempotency_key=self.idempotency_key,
            cwd=self.cwd,
            path=self.path,
            python=self.python,
            overrides=tuple(self.overrides),
            secrets=dict(self.secrets),
            passed=dict(self.passed),
            resume_from=self.resume_from,
            after=tuple(self.after),
            upload=tuple(self.upload),
            git=None if self.git is None else GitState(**self.git.model_dump()),
        )


class SubmissionsBody(Body):
    """Several submissions, each as if it were sent alone."""

    submissions: list[SubmitBody] = Field(min_length=1, max_length=MAX_TOGETHER)


class MissingPiecesBody(Body):
    """Pieces of a working directory of ``size_bytes``, by their SHA-256."""

    digests: list[Digest] = Field(max_length=MAX_ASKED_PIECES)
    size_bytes: int = Field(ge=0, le=2**53)


class ActionBody(Body):
    """Details of an action: ``priority`` for ``update``; ``force`` for ``cancel``; ``from_checkpoint``, ``overrides`` and ``failed`` for ``rerun``."""

    priority: int | None = Field(default=None, ge=0, le=100)
    from_checkpoint: bool = False
    overrides: list[Text] = Field(default_factory=list, max_length=MAX_OVERRIDES)
    failed: bool = False
    force: bool = False

    def request(self, verb: Verb) -> ActionRequest:
        """Return the service's record. Raises BadRequestError for a detail that the verb lacks or does not take."""
        if (self.priority is not None) != (verb is Verb.UPDATE):
            word = "needs" if verb is Verb.UPDATE else "takes no"
            raise BadRequestError(f"{verb} {word} priority", hint="only `update` takes it: a number from 0 to 100")
        if self.from_checkpoint and verb is not Verb.RERUN:
            raise BadRequestError(f"{verb} takes no from_checkpoint", hint="only `rerun` takes it")
        if self.failed and verb is not Verb.RERUN:
            raise BadRequestError(f"{verb} takes no failed", hint="only `rerun` takes it")
        if self.force and verb is not Verb.CANCEL:
            raise BadRequestError(f"{verb} takes no force", hint="only `cancel` takes it")
        if self.overrides and verb is not Verb.RERUN:
            raise BadRequestError(f"{verb} takes no overrides", hint="only `rerun` takes them")
        return ActionRequest(
            verb=verb,
            priority=self.priority,
            from_checkpoint=self.from_checkpoint,
            overrides=tuple(self.overrides),
            failed=self.failed,
            force=self.force,
        )


class ProfileBody(Body):
    """Number of steps to trace, the rank, and the time limit."""

    steps: int = Field(default=DEFAULT_STEPS, ge=1, le=MAX_STEPS)
    rank: int = Field(default=0, ge=0, le=MAX_NUMBER)
    timeout_seconds: float = Field(default=60.0, gt=0, le=MAX_PROFILE_SECONDS)

    def request(self) -> ProfileRequest:
        """Return the service's record."""
        return ProfileRequest(steps=self.steps, rank=self.rank, timeout_seconds=self.timeout_seconds)


class StacksBody(Body):
    """Rank to return the stacks of; None means all ranks."""

    rank: int | None = Field(default=None, ge=0, le=MAX_NUMBER)


class EmptyBody(Body):
    """Empty object: ``{}``."""


class ShutdownBody(Body):
    """``stop_jobs``: jobs save and return to the queue first; otherwise they continue without the daemon."""

    stop_jobs: bool = False


class PruneBody(Body):
    """Least time since the end of the jobs to remove."""

    older_than_seconds: float = Field(ge=0, allow_inf_nan=False)
    dry_run: bool = False


class ProblemItem(BaseModel):
    """One error in a text."""

    message: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    hint: str = ""
    source: str = ""


class ProblemDocument(BaseModel):
    """RFC 9457's problem document, with ``code`` for programs, ``hint`` for people and ``problems`` for texts."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    message: str
    hint: str = ""
    problems: list[ProblemItem] = Field(default_factory=list)

    @classmethod
    def media_schema(cls) -> dict[str, object]:
        """Return the document's entry in an OpenAPI response."""
        return {PROBLEM_CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}


def bad_request(found: list[dict[str, object]]) -> BadRequestError:
    """Return the API's error for the errors that Pydantic found in a request; values are left out."""
    problems = []
    for item in found:
        where = item.get("loc")
        steps = [str(step) for step in where] if isinstance(where, tuple) else []
        problems.append(Problem(message=str(item.get("msg", "is wrong")), path=".".join(steps)))
    first = problems[0].render() if problems else "the request cannot be understood"
    return BadRequestError(first, hint="use `orch`, or see /api/v1/openapi.json", problems=problems)
