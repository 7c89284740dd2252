"""The client's half of a submission: one idempotency key, sent again until there is an answer.

Works on plain dictionaries: ``orch submit`` uses this and nothing slower. The YAML text is not parsed; the daemon names
the secrets that it needs, and only those leave the submitter's environment. The submitter's own process runs git, never
the daemon: the configuration of a repository can name programs, which git runs as its caller. When git fails, the state
is unknown: a submission does not depend on it.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.api.errors import (
    BadRequestError,
    DaemonFrozenError,
    DaemonUnreachableError,
    DeadlineError,
    InternalError,
    OrchError,
    Problem,
    SecretMissingError,
    WorkdirNeededError,
    error_from_json,
)
from orchestrator.api.protocol import API_PREFIX, MAX_BODY_BYTES, MAX_TOGETHER, MAX_YAML_BYTES
from orchestrator.api.transport import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.transport.upload import Uploaded


GIT_SECONDS = 5.0
MAX_BRANCH = 250
_NO_COMMIT = "(initial)"
_DETACHED = "(detached)"


def git_state(directory: str, *, seconds: float = GIT_SECONDS) -> dict[str, Any] | None:
    """Return the state of the repository that ``directory`` is in; None without one, and where git does not answer in time."""
    if not _in_repository(directory):
        return None
    import subprocess

    command = ["git", "-c", "core.fsmonitor=false", "-C", directory, "status", "--porcelain=v2", "--branch"]
    command += ["--untracked-files=normal", "--", "."]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True, env=environ)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return read_status(done.stdout.decode("utf-8", "replace"))


def _in_repository(directory: str) -> bool:
    place = os.path.realpath(directory)
    while not os.path.lexists(f"{place}/.git"):
        above = os.path.dirname(place)
        if above == place:
            return False
        place = above
    return True


def read_status(text: str) -> dict[str, Any] | None:
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
    return {
        "commit": "" if commit == _NO_COMMIT else commit,
        "branch": "" if branch == _DETACHED else branch[:MAX_BRANCH],
        "dirty": dirty,
    }


def _is_digest(text: str) -> bool:
    return len(text) in (40, 64) and set(text) <= set("0123456789abcdef")


DEADLINE_SECONDS = 180.0
"""A submission may wait for Ray to come up and for a large working directory to be copied."""

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
_WORKING_DIR = re.compile(r"^working_dir:[ \t]+(null|(?![~0-9])[\w./-]*[A-Za-z/.])[ \t]*$", re.MULTILINE | re.ASCII)
_MAX_GROUP_BYTES = MAX_BODY_BYTES - 64


def new_key() -> str:
    """Return a new idempotency key: 128 random bits."""
    return os.urandom(16).hex()


def find_python(path: str) -> str | None:
    """Return the absolute file of ``python`` on this PATH; symbolic links are kept (a venv's python is one)."""
    for name in ("python", "python3"):
        for directory in path.split(os.pathsep):
            candidate = f"{directory}/{name}"
            if directory.startswith("/") and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return os.path.normpath(candidate)
    return None


SCRIPTS = {
    ".py": "`orch run -- python {path}` runs it, and `orch init {path}` writes a job.yaml for it",
    ".ipynb": "`jupyter nbconvert --to script {path}` makes a script of it; `orch init` writes a job.yaml for that",
    **dict.fromkeys(
        (".sh", ".bash", ".sbatch", ".slurm"),
        "`orch import {path}` prints the job.yaml for a batch script; `orch run -- bash {path}` runs it",
    ),
}
"""Hints for files that are certainly not a job.yaml, by the suffix of the name."""


def read_job_file(path: str, stdin: Any = None) -> str:
    """Return the text of a job.yaml; ``-`` is standard input. Raises BadRequestError: a script, unreadable, too large, not UTF-8."""
    hint = SCRIPTS.get(os.path.splitext(path)[1])
    if hint and os.path.isfile(path):
        import shlex

        raise BadRequestError(f"{path} is a script, and not a job.yaml", hint=hint.format(path=shlex.quote(path)))
    try:
        if path == "-" and stdin is not None:
            data = stdin.read(MAX_YAML_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="`orch init SCRIPT` writes a job.yaml to begin with",
        ) from error
    if len(data) > MAX_YAML_BYTES:
        raise BadRequestError(
            f"{path} is larger than {MAX_YAML_BYTES // 1024} KiB",
            hint="a job.yaml describes a job; its data belongs in files of the working directory",
        )
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8; check that it is a job.yaml"
        ) from error


def request_body(
    text: str,
    source: str,
    *,
    environ: Mapping[str, str],
    cwd: str,
    overrides: Sequence[str] = (),
    resume_from: str | None = None,
    after: Sequence[str] = (),
    key: str = "",
    note: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Return the JSON body of a submission or a plan: the text, the directory and the variables that it passes.

    ``note`` is called with a message about variables that match ``env: {pass: [...]}`` but are not sent.
    Raises InvalidSpecError.
    """
    path = environ.get("PATH", os.defpath)
    passed = _passed(text, source, overrides, environ, note)
    directory = _working_dir(text, source, overrides, cwd)
    git = None if directory is None else git_state(directory)
    return {
        "yaml": text,
        "source": source,
        "idempotency_key": key or new_key(),
        "cwd": cwd,
        "path": path,
        "python": find_python(path),
        "overrides": list(overrides),
        "secrets": {},
        "resume_from": resume_from,
        "after": list(after),
        **({"passed": passed} if passed else {}),
        **({"git": git} if git else {}),
    }


def _working_dir(text: str, source: str, overrides: Sequence[str], cwd: str) -> str | None:
    """Return the working directory that the text names; None where there is none, or the text is not valid."""
    named = text.count("working_dir") + sum("working_dir" in override for override in overrides)
    if not named:
        return cwd
    plain = _WORKING_DIR.search(text)
    if named == 1 and plain:  # the usual case, without the time that a complete reading takes
        return None if plain[1] == "null" else os.path.join(cwd, plain[1])
    from orchestrator.spec.job import parse_jobs
    from orchestrator.spec.problems import SpecError

    try:
        directory = parse_jobs(text, source=source, overrides=overrides).jobs[0][1].working_dir
    except SpecError:  # the daemon reports it
        return None
    return None if directory is None else os.path.join(cwd, directory)


def _passed(
    text: str, source: str, overrides: Sequence[str], environ: Mapping[str, str], note: Callable[[str], None]
) -> dict[str, str]:
    """Return the variables that the text takes from this environment; the daemon must not choose them."""
    if "pass" not in text and not any("pass" in override for override in overrides):
        return {}
    from orchestrator.api.errors import invalid_spec
    from orchestrator.spec.job import passed_variables
    from orchestrator.spec.problems import SpecError

    try:
        found = passed_variables(text, source=source, overrides=overrides, environ=environ)
    except SpecError as error:
        raise invalid_spec(error) from error
    if found.secret:
        remedy = f"`secrets: [{', '.join(found.secret)}]` passes what looks like a secret"
        note(f"env.pass leaves out {', '.join(found.secret)}; {remedy}")
    if found.unusable:
        note(f"env.pass leaves out {', '.join(found.unusable)}: not UTF-8, or over the limit of 65,536 characters")
    return dict(found.values)


class UploadWatch(Protocol):
    """Reports the progress of an upload."""

    def sent(self, done: int, total: int) -> None:
        """Report that the daemon has received ``done`` of ``total`` bytes."""
        ...

    def ended(self, uploaded: Uploaded) -> None:
        """Report that the daemon has received the whole directory."""
        ...


def with_upload(endpoint: Endpoint, body: dict[str, Any], watch: UploadWatch | None = None) -> dict[str, Any]:
    """Upload the working directory that the body's job.yaml names; return the body with the upload.

    The directory is read from the text that is sent: the daemon must not choose what leaves this machine.
    """
    from pathlib import Path

    from orchestrator.api.errors import invalid_spec
    from orchestrator.api.transport.upload import Uploader
    from orchestrator.spec.job import parse_jobs
    from orchestrator.spec.problems import SpecError

    try:
        file = parse_jobs(body["yaml"], source=body["source"], overrides=body["overrides"])
    except SpecError as error:
        raise invalid_spec(error) from error
    directory = file.jobs[0][1].working_dir
    if directory is None:
        return body
    uploaded = Uploader(endpoint, watch.sent if watch else lambda _done, _total: None).upload(
        Path(body["cwd"], directory)
    )
    if watch:
        watch.ended(uploaded)
    return {**body, "upload": list(uploaded.manifest)}


def submit(
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    environ: Mapping[str, str],
    deadline_seconds: float = DEADLINE_SECONDS,
    watch: UploadWatch | None = None,
) -> dict[str, Any]:
    """Send a submission until its answer is known; the idempotency key makes that safe. Returns the reply's JSON.

    Raises DaemonUnreachableError at once if no daemon listens and nothing was sent yet; after a lost answer it tries
    again until ``deadline_seconds``. Raises SecretMissingError for a name that ``environ`` lacks.
    """
    deadline = time.monotonic() + deadline_seconds
    try:
        reply = _deliver(endpoint, body, deadline)
    except WorkdirNeededError:
        body = with_upload(endpoint, body, watch)
        deadline = time.monotonic() + deadline_seconds
        reply = _deliver(endpoint, body, deadline)
    if wanted := reply.get("needs_secrets"):
        body = {**body, "secrets": _secrets(wanted, environ)}
        reply = _deliver(endpoint, body, deadline)
        if reply.get("needs_secrets"):
            raise InternalError(f"the daemon requested secrets that it already has: {', '.join(wanted)}")
    return reply


def submit_together(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    *,
    environ: Mapping[str, str],
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[dict[str, Any] | OrchError]:
    """Send submissions in few requests, as `submit` does. Returns the reply's JSON or the error of each, in order.

    Those that need secrets or an upload are sent again alone. Raises what `submit` raises if the daemon is unreachable.
    """
    outcomes: list[dict[str, Any] | OrchError] = []
    for group in _groups(bodies):
        deadline = time.monotonic() + deadline_seconds
        answers = _deliver(endpoint, {"submissions": group}, deadline, "/submissions").get("outcomes") or []
        if len(answers) != len(group):
            raise InternalError(f"the daemon answered {len(answers)} of {len(group)} submissions")
        for body, outcome in zip(group, answers, strict=True):
            reply = outcome.get("reply")
            refused = None if reply else error_from_json(outcome.get("problem") or {})
            try:
                if isinstance(refused, WorkdirNeededError) or (reply and reply.get("needs_secrets")):
                    reply = submit(endpoint, body, environ=environ, deadline_seconds=deadline_seconds)
                    refused = None
            except DaemonUnreachableError:
                raise
            except OrchError as error:
                refused = error
            outcomes.append(refused or reply)
    return outcomes


def _groups(bodies: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of bodies that fit into one request."""
    group: list[dict[str, Any]] = []
    size = 0
    for body in bodies:
        length = len(json.dumps(body)) + 1
        if group and (len(group) == MAX_TOGETHER or size + length > _MAX_GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(body)
        size += length
    if group:
        yield group


def plan(
    endpoint: Endpoint, body: dict[str, Any], *, deadline_seconds: float, watch: UploadWatch | None = None
) -> dict[str, Any]:
    """Return what a submission would do. Raises the daemon's errors."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        path = f"{API_PREFIX}/plan"
        reply: dict[str, Any] = wire.call(endpoint, "POST", path, body=body, deadline_seconds=deadline_seconds)
        return reply

    try:
        return ask(body)
    except WorkdirNeededError:
        return ask(with_upload(endpoint, body, watch))


def _secrets(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise SecretMissingError(
            f"the job needs {', '.join(missing)} from your environment",
            hint=f"export {missing[0]}=... and submit again, or take it out of `secrets:`",
            problems=[Problem(message="not set in the environment", path=f"secrets.{name}") for name in missing],
        )
    return {name: environ[name] for name in names}


def _deliver(endpoint: Endpoint, body: dict[str, Any], deadline: float, path: str = "/jobs") -> dict[str, Any]:
    sent = False
    failure: DaemonUnreachableError | DeadlineError
    pause = FIRST_PAUSE_SECONDS
    while True:
        left = deadline - time.monotonic()
        try:
            reply = wire.call(
                endpoint,
                "POST",
                f"{API_PREFIX}{path}",
                body=body,
                deadline_seconds=max(0.01, left),
            )
        except DaemonFrozenError as error:
            hint = f"{error.hint}; the job may be accepted then: look with `orch status` before you submit it again"
            raise DaemonFrozenError(error.message, hint=hint) from error
        except (wire.ConnectionLostError, DeadlineError) as error:
            sent, failure = True, error
        except DaemonUnreachableError as error:
            if not sent:
                raise
            failure = error
        else:
            if isinstance(reply, dict):
                return reply
            raise InternalError("the daemon's answer to a submission is not an object")
        if time.monotonic() + pause >= deadline:
            raise _unknown_outcome(failure) from failure
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _unknown_outcome(failure: DaemonUnreachableError | DeadlineError) -> DaemonUnreachableError:
    return DaemonUnreachableError(
        f"the submission was sent but its answer was lost ({failure.message})",
        hint="the job may have been accepted: look with `orch status` before you submit it again",
    )
