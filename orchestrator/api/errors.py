"""Every error that crosses the API: one class each, with one HTTP status and one exit code.

The same classes are raised by the daemon, sent as an RFC 9457 problem document, and raised again by the client, so
that a command line and a library see what the daemon saw. A docstring says what happened and what to do next; the
message says it for the case at hand. This module imports neither FastAPI nor dataclasses: the command line loads it
on every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.spec.problems import SpecError

EXIT_OK = 0
EXIT_JOB_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_REFUSED = 5
EXIT_PARTLY = 6
"""The command succeeded for some of several jobs and not for others."""
EXIT_NOT_ENDED = 7

EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

PROBLEM_CONTENT_TYPE = "application/problem+json"


class Problem(NamedTuple):
    """One error in a text: its place, the message, and what to write instead. Lines and columns count from 1."""

    message: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    hint: str = ""
    source: str = ""

    def render(self) -> str:
        """Return one line for people: ``job.yaml:3:7: resources.num_workers: must be ... (hint)``."""
        where = self.source
        if self.line is not None:
            where += f":{self.line}" + (f":{self.column}" if self.column is not None else "")
        parts = [part for part in (where.lstrip(":"), self.path, self.message) if part]
        return ": ".join(parts) + (f" ({self.hint})" if self.hint else "")


class OrchError(Exception):
    """A request to orch failed; ``message`` says what failed, ``hint`` what to do next."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_INTERNAL
    default_hint: ClassVar[str] = ""
    client_hint: ClassVar[str] = ""
    """What to do, instead of ``default_hint``, where no daemon can be started: an installation without the part `daemon`."""

    def __init__(self, message: str, *, hint: str = "", problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.problems = tuple(problems)

    def to_json(self) -> dict[str, Any]:
        """Return the problem document: RFC 9457's members, and ``code``, ``hint`` and ``problems``."""
        return {
            "type": f"urn:orch:problem:{self.code}",
            "title": self.code.replace("_", " "),
            "status": self.http_status,
            "detail": self.message,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "problems": [problem._asdict() for problem in self.problems],
        }


class BadRequestError(OrchError):
    """The request itself cannot be understood. Fix the argument that the message names."""

    code = "bad_request"
    http_status = 400
    exit_code = EXIT_BAD_INPUT


class InvalidSpecError(OrchError):
    """The job.yaml has errors; nothing was stored. Fix each line that ``problems`` lists and submit again."""

    code = "invalid_spec"
    http_status = 422
    exit_code = EXIT_BAD_INPUT
    default_hint = "fix the lines above; `orch schema` prints every key"


class AmbiguousReferenceError(OrchError):
    """A prefix fits several jobs, which ``problems`` lists. Give more letters of the id."""

    code = "ambiguous_reference"
    http_status = 400
    exit_code = EXIT_BAD_INPUT
    default_hint = "give more letters of the id, or a whole name"


class RequestTooLargeError(OrchError):
    """The request body is over the bound. Make the job.yaml smaller; data belongs in files of the working directory."""

    code = "request_too_large"
    http_status = 413
    exit_code = EXIT_BAD_INPUT


class SecretMissingError(OrchError):
    """A secret that the job names is not in the submitter's environment. Export it and submit again."""

    code = "secret_missing"
    http_status = 400
    exit_code = EXIT_BAD_INPUT


class WorkdirNeededError(OrchError):
    """The job's working directory is on the submitter's machine. Upload it (`orch submit` does) and submit again."""

    code = "workdir_needed"
    http_status = 409
    exit_code = EXIT_REFUSED


class MediaTypeError(OrchError):
    """The request body is not declared as JSON. Send ``Content-Type: application/json``."""

    code = "media_type"
    http_status = 415
    exit_code = EXIT_BAD_INPUT
    default_hint = "send `Content-Type: application/json`"


class NotFoundError(OrchError):
    """There is no such job, node or page. `orch status` and `orch nodes` list what there is."""

    code = "not_found"
    http_status = 404
    exit_code = EXIT_NOT_FOUND


class NoSuchJobError(NotFoundError):
    """No job has this id, prefix or name. `orch status --state all` lists every one."""

    code = "no_such_job"
    default_hint = "`orch status --state all` lists every job"


class NoSuchNodeError(NotFoundError):
    """No node has this id or name. `orch nodes` lists them."""

    code = "no_such_node"
    default_hint = "`orch nodes` lists the nodes"


class MethodNotAllowedError(OrchError):
    """The page exists but not for this method. The OpenAPI document lists what each page takes."""

    code = "method_not_allowed"
    http_status = 405
    exit_code = EXIT_BAD_INPUT


class DaemonUnreachableError(OrchError):
    """No daemon answers on the control socket. Start one with `orch up`; `orch doctor` says what prevents it."""

    code = "daemon_unreachable"
    http_status = 503
    exit_code = EXIT_UNREACHABLE
    default_hint = "start it with `orch up`; `orch doctor` reports what prevents its start"
    client_hint = (
        "`orch login http://HOST:PORT` selects a daemon on another machine (a tunnel to it must be open); this installation"
        " is a client and has none"
    )


class DaemonStoppingError(DaemonUnreachableError):
    """The daemon is shutting down and accepts no new requests. Jobs are safe; try again when a daemon runs."""

    code = "daemon_stopping"
    default_hint = client_hint = "try again when a daemon runs again; accepted jobs are safe"


class DeadlineError(OrchError):
    """The daemon did not answer in time; it may still execute the request. Check with `orch status`, then try again."""

    code = "deadline"
    http_status = 504
    exit_code = EXIT_UNREACHABLE
    default_hint = "look with `orch status`; `orch doctor` says what slows the daemon down"


def kill_hint(pid: int) -> str:
    """Return the last remedy for a daemon that neither answers nor ends."""
    return f"`kill -KILL {pid}`, then `orch up` (jobs keep running)"


class DaemonFrozenError(DeadlineError):
    """The daemon's process exists but is stopped, by SIGSTOP or a frozen cgroup. Continue it, or kill it and start another."""

    code = "daemon_frozen"

    @classmethod
    def of(cls, label: str, pid: int) -> DaemonFrozenError:
        """Return the error about process ``pid``, the daemon at ``label``."""
        return cls(
            f"the daemon at {label} is stopped (process {pid}): it answers nothing until it is continued",
            hint=f"`kill -CONT {pid}` continues it; or {kill_hint(pid)}",
        )


class NotEndedError(DeadlineError):
    """The job has not ended within the time to wait for it. It keeps running; wait again, or cancel it."""

    code = "not_ended"
    exit_code = EXIT_NOT_ENDED
    default_hint = "it keeps running: `orch wait` continues to wait, `orch cancel` ends it"


class ProtocolMismatchError(OrchError):
    """Client and daemon speak different versions. Restart the daemon: jobs keep running while it is away."""

    code = "protocol_mismatch"
    http_status = 426
    exit_code = EXIT_UNREACHABLE
    default_hint = "restart the daemon with the installed version: `orch down && orch up` (jobs keep running)"
    client_hint = (
        "install the daemon's version of orch here, or have the daemon restarted with this one (jobs keep running)"
    )


class UnauthenticatedError(OrchError):
    """The token is missing or wrong. Pass the token that the daemon was started with."""

    code = "unauthenticated"
    http_status = 401
    exit_code = EXIT_REFUSED
    default_hint = "pass the daemon's token (ORCH_TOKEN for the command line)"


class NotPermittedError(OrchError):
    """The job or the daemon belongs to another user. Ask its owner."""

    code = "not_permitted"
    http_status = 403
    exit_code = EXIT_REFUSED


class RefusedError(OrchError):
    """A rule forbids it now: the job's state, a full queue, a key used twice. The hint says what would be accepted."""

    code = "refused"
    http_status = 409
    exit_code = EXIT_REFUSED


class MissingPartError(OrchError):
    """A part of orch that the command needs is not installed here. Type the line that the hint gives."""

    code = "missing_part"
    http_status = 409
    exit_code = EXIT_REFUSED


class ForeignOriginError(OrchError):
    """The Host or Origin is not this daemon's, as from a page of another site. Use the daemon's own address."""

    code = "foreign_origin"
    http_status = 403
    exit_code = EXIT_REFUSED
    default_hint = "use the address that the daemon was started with"


class TooManyTriesError(OrchError):
    """Too many wrong tokens came from this address. The right one signs in at any time."""

    code = "too_many_tries"
    http_status = 429
    exit_code = EXIT_REFUSED
    default_hint = "the right token, in the file of `--token-file`, signs in at any time"


class DiskFullError(OrchError):
    """The disk under ORCH_HOME is full or has no inodes, so no new job is accepted. Free space (`orch prune`); running jobs continue."""

    code = "disk_full"
    http_status = 507
    exit_code = EXIT_REFUSED
    default_hint = "free space (`orch prune` removes old jobs), then submit again; running jobs continue"


class DiskFailedError(OrchError):
    """The disk under ORCH_HOME fails or is read-only, so nothing can be stored. Find the reason in the kernel's log, and repair it."""

    code = "disk_failed"
    http_status = 507
    exit_code = EXIT_REFUSED
    default_hint = "look into the kernel's log (`dmesg`), repair the disk or mount it writable, then submit again"


class InternalError(OrchError):
    """orch violated one of its own guarantees. Report it with the daemon's log; accepted jobs are safe."""

    code = "internal"
    default_hint = "please report it with the end of the daemon's log (`orch doctor` says where it is)"


def invalid_spec(error: SpecError) -> InvalidSpecError:
    """Return the API's error for the errors that ``spec`` found in a text."""
    problems = [
        Problem(
            message=found.message,
            path=found.path,
            line=found.line or None,
            column=found.column or None,
            hint=found.hint,
            source=found.source,
        )
        for found in error.problems
    ]
    count = "one error" if len(problems) == 1 else f"{len(problems)} errors"
    return InvalidSpecError(f"{problems[0].source or 'the job file'} has {count}", problems=problems)


def _subclasses(base: type[OrchError]) -> list[type[OrchError]]:
    return [base, *(leaf for child in base.__subclasses__() for leaf in _subclasses(child))]


ERRORS: Mapping[str, type[OrchError]] = {cls.code: cls for cls in _subclasses(OrchError)}
"""Every error by its code."""


def error_from_json(body: Mapping[str, Any]) -> OrchError:
    """Return the error that a problem document describes; a code of a newer daemon becomes a plain OrchError."""
    cls = ERRORS.get(str(body.get("code")), OrchError)
    known = Problem._fields
    problems = [Problem(**{name: item[name] for name in known if name in item}) for item in body.get("problems") or ()]
    return cls(str(body.get("message") or "the daemon refused"), hint=str(body.get("hint") or ""), problems=problems)
