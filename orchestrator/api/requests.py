"""The requests of the API: each class is the form of a request in the body that arrives, in the service, and in the OpenAPI document.

A body is the only untrusted JSON: it is read strictly and within bounds. A refused value is named by its place and never repeated: it may
be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, field

from orchestrator.api.errors import BadRequestError, Problem, RequestTooLargeError
from orchestrator.api.protocol import (
    MAX_ASKED_PIECES,
    MAX_MANIFEST_BYTES,
    MAX_NUMBER,
    MAX_PIECE_BYTES,
    MAX_TOGETHER,
    MAX_YAML_BYTES,
    Verb,
)
from orchestrator.api.queue_views import MAX_LABELS
from orchestrator.core.codec import Record
from orchestrator.core.facts.submissions import GitState
from orchestrator.spec.fields import LABEL_PATTERN
from orchestrator.spec.queues import MAX_GPUS, MAX_WEIGHT
from orchestrator.spec.reader.document import MAX_VARIABLES
from orchestrator.train.script.profiling import DEFAULT_STEPS, MAX_STEPS

MAX_OVERRIDES = 200
MAX_SECRETS = 100
MAX_AFTER = 100
MAX_PROFILE_SECONDS = 600.0
MAX_VALUE = 255
MAX_TIME = 253_402_300_799.0  # the year 9999
MAX_SECONDS = 366 * 86400.0

ABSOLUTE: Final = r"\A/[^\x00]*\Z"
NO_NUL: Final = r"\A[^\x00]*\Z"
PRINTABLE: Final = r"\A[^\x00-\x1f\x7f]*\Z"
_WORDS: Final = {
    ABSOLUTE: "an absolute path",
    NO_NUL: "text without a NUL character",
    PRINTABLE: "text without control characters",
}

AbsolutePath = Annotated[str, Meta(max_length=4096, pattern=ABSOLUTE)]
Text = Annotated[str, Meta(max_length=4096, pattern=NO_NUL)]
LongText = Annotated[str, Meta(max_length=65536, pattern=NO_NUL)]
ShortText = Annotated[str, Meta(max_length=300)]
VariableName = Annotated[str, Meta(max_length=256, pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z")]
Key = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{8,128}\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
LabelKey = Annotated[str, Meta(pattern=rf"\A{LABEL_PATTERN}\Z")]
LabelValue = Annotated[str, Meta(max_length=MAX_VALUE, pattern=PRINTABLE)]
Rank = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Gpus = Annotated[int, Meta(ge=0, le=MAX_GPUS)]
Variables = Mapping[VariableName, LongText]

R = TypeVar("R")


class SubmitRequest(Record):
    """A job.yaml as text, with the directory and the environment of its submission.

    ``source`` names the file for messages. ``overrides`` are ``key.path=value`` texts in the order of ``--set``.
    ``cwd`` (absolute) is the base of ``working_dir``, ``path`` the submitter's PATH, ``python`` the absolute
    interpreter that ``python`` means there (None: there is none). ``secrets`` holds values only for names that an
    earlier reply required, ``passed`` the submitter's variables that ``env: {pass: [...]}`` takes. ``resume_from`` is ``JOB`` or ``JOB@STEP``. ``after`` are further dependencies, ``JOB`` or
    ``JOB:success``, ``:failure``, ``:any``. ``upload`` are the pieces of an uploaded working directory's manifest. ``git`` is what the
    submitter's process found.
    """

    remote: ClassVar[bool] = False
    yaml: str
    source: Text = "job.yaml"
    idempotency_key: Key
    cwd: AbsolutePath
    path: LongText = ""
    python: AbsolutePath | None = None
    overrides: Annotated[tuple[Text, ...], Meta(max_length=MAX_OVERRIDES)] = ()
    secrets: Annotated[Variables, Meta(max_length=MAX_SECRETS)] = field(default_factory=dict)
    passed: Annotated[Variables, Meta(max_length=MAX_VARIABLES)] = field(default_factory=dict)
    resume_from: ShortText | None = None
    after: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_AFTER)] = ()
    upload: Annotated[tuple[Digest, ...], Meta(max_length=MAX_MANIFEST_BYTES // MAX_PIECE_BYTES)] = ()
    git: GitState | None = None

    def __repr__(self) -> str:
        """Leave out the variables: they may be secrets."""
        return f"{type(self).__name__}(source={self.source!r}, cwd={self.cwd!r})"

    def refuse_too_large(self) -> None:
        """Raise RequestTooLargeError for a text over the bound."""
        if len(self.yaml.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
            raise RequestTooLargeError(
                f"{self.source} is larger than {MAX_YAML_BYTES // 1024} KiB",
                hint="a job.yaml describes a job; its data belongs in files of the working directory",
            )


class RemoteSubmitRequest(SubmitRequest):
    """A submission from another machine, as the daemon takes it: its files are those of ``upload``, laid out in ``cwd``."""

    remote: ClassVar[bool] = True


class SubmissionsRequest(Record):
    """Several submissions, each as if it were sent alone."""

    submissions: Annotated[tuple[SubmitRequest, ...], Meta(min_length=1, max_length=MAX_TOGETHER)]


class MissingPiecesRequest(Record):
    """Pieces of a working directory of ``size_bytes``, by their SHA-256."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_ASKED_PIECES)]
    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]


class ActionRequest(Record):
    """An action and its details. ``verb`` is part of the address, and not of a body.

    ``priority`` for update; for rerun, ``from_checkpoint`` (start from the old job's last checkpoint), ``overrides``,
    ``key.path=value`` texts, and ``failed`` (rerun only the failed combinations). ``force`` for cancel, by the daemon's
    owner: do not wait for a confirmed end.
    """

    verb: Verb
    priority: Annotated[int, Meta(ge=0, le=100)] | None = None
    from_checkpoint: bool = False
    overrides: Annotated[tuple[Text, ...], Meta(max_length=MAX_OVERRIDES)] = ()
    failed: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Raise BadRequestError for a detail that the verb lacks or does not take."""
        if self.priority is None and self.verb is Verb.UPDATE:
            raise BadRequestError("update needs priority", hint="a number from 0 to 100")
        takes = {"priority": Verb.UPDATE, "from_checkpoint": Verb.RERUN, "failed": Verb.RERUN, "overrides": Verb.RERUN}
        for name, verb in (takes | {"force": Verb.CANCEL}).items():
            if getattr(self, name) not in (None, False, ()) and self.verb is not verb:
                raise BadRequestError(f"{self.verb} takes no {name}", hint=f"only `{verb}` takes it")


class ProfileRequest(Record):
    """A trace of ``steps`` optimizer steps of one rank, within ``timeout_seconds``."""

    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = DEFAULT_STEPS
    rank: Rank = 0
    timeout_seconds: Annotated[float, Meta(gt=0, le=MAX_PROFILE_SECONDS)] = 60.0


class StacksRequest(Record):
    """Rank to return the stacks of; None means all ranks."""

    rank: Rank | None = None


class QueueChange(Record):
    """Changes of a queue, or the terms of a new one; None keeps a value. ``unbounded`` removes its maximum."""

    guaranteed: Gpus | None = None
    maximum: Gpus | None = None
    unbounded: bool = False
    weight: Annotated[float, Meta(gt=0, le=MAX_WEIGHT)] | None = None
    parent: Annotated[str, Meta(pattern=r"\A(?:[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?)?\Z")] | None = None


class ReservationRequest(Record):
    """Request to reserve a node from the wall time ``start`` for ``seconds``."""

    start: Annotated[float, Meta(ge=0, le=MAX_TIME)]
    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
    reason: LabelValue = ""


class NodeChange(Record):
    """Changes of a node: ``labels`` to set, None removes one; ``unreserve``: id of a reservation, "" its only one."""

    labels: Annotated[Mapping[LabelKey, LabelValue | None], Meta(max_length=MAX_LABELS)] = field(default_factory=dict)
    reserve: ReservationRequest | None = None
    unreserve: Annotated[str, Meta(pattern=r"\A[a-z0-9]{0,20}\Z")] | None = None


class EmptyRequest(Record):
    """Empty object: ``{}``."""


class ShutdownRequest(Record):
    """``stop_jobs``: jobs save and return to the queue first; otherwise they continue without the daemon."""

    stop_jobs: bool = False


class PruneRequest(Record):
    """Least time since the end of the jobs to remove."""

    older_than_seconds: Annotated[float, Meta(ge=0, le=float(2**63))]
    dry_run: bool = False


def request_of(cls: type[R], values: Any) -> R:
    """Return the request of the values of a body. Raises BadRequestError, with the place of the first value that is wrong."""
    try:
        return msgspec.convert(values, cls)
    except UnicodeEncodeError:
        raise refused("a text is not valid Unicode") from None
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, place = str(error).partition(" - at ")
        pattern = re.fullmatch(r"Expected `str` matching regex '(.*)'", message)
        if pattern is not None:
            known = next((words for regex, words in _WORDS.items() if repr(regex)[1:-1] == pattern[1]), None)
            message = f"Expected {known or f'text that matches {pattern[1]}'}"
        raise refused(message, place.strip("`").removeprefix("$").removeprefix(".")) from None


def refused(message: str, place: str = "") -> BadRequestError:
    """Return the error of a body that cannot be read; ``place`` is that of the wrong value."""
    problem = Problem(message=message, path=".".join(filter(None, ("body", place))))
    return BadRequestError(problem.render(), hint="use `orch`, or see /api/v1/openapi.json", problems=[problem])
