"""Which jobs a command means: JOB arguments, and options that choose by user, state, label and name."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrator.api.errors import (
    EXIT_OK,
    EXIT_PARTLY,
    BadRequestError,
    DaemonUnreachableError,
    DeadlineError,
    OrchError,
)
from orchestrator.api.views import TERMINAL_STATES
from orchestrator.cli.commands.shared import Json, Quiet, Yes, ask, complete_job
from orchestrator.cli.session import Session, answer, print_json, report_error
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.views import ActionReply, JobView


ME = "me"
LIVE_STATES = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "SUSPENDED")


class Choice(NamedTuple):
    """The typed conditions, which must all be met. A text of ``states`` may name several, as in ``running,failed``."""

    user: str | None = None
    states: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    name: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was typed."""
        return not (self.user or self.states or self.labels or self.name)


def wanted_states(texts: Sequence[str]) -> list[str]:
    """Return states from ``--state running,failed``; ``all`` gives an empty list, which means every state."""
    names = [name.strip().upper() for text in texts for name in text.split(",") if name.strip()]
    return [] if "ALL" in names else names


def user_name(session: Session, user: str | None) -> str | None:
    """Return the user name; ``me`` is the user that the daemon sees for this command."""
    if user != ME:
        return user
    if not session.endpoint.socket_path:
        return session.client().health().owner
    import os
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def with_labels(jobs: Sequence[JobView], labels: Sequence[str], name: str | None) -> tuple[JobView, ...]:
    """Return the jobs with every label (``key=value``, or ``key`` for any value) and a name that matches ``name``."""
    wanted = [_label(text) for text in labels]
    return tuple(
        job
        for job in jobs
        if (name is None or fnmatchcase(job.name, name))
        and all(key in job.labels and value in {None, job.labels[key]} for key, value in wanted)
    )


def _label(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    if not key:
        raise BadRequestError(f"--label {text!r} has no key", hint="--label team=a, or --label team for any value")
    return key, value if equals else None


def chosen_jobs(session: Session, choice: Choice, default_states: Sequence[str]) -> tuple[JobView, ...]:
    """Return the matching jobs, oldest first; in ``default_states`` if no state was typed."""
    states = wanted_states(choice.states) if choice.states else list(default_states)
    found = session.client().jobs(user=user_name(session, choice.user), states=states).jobs
    return tuple(reversed(with_labels(found, choice.labels, choice.name)))


def job_or_matrix(client: Client, ref: str) -> JobView | MatrixView:
    """Return the job or the matrix of a reference. Raises NotFoundError, AmbiguousReferenceError."""
    from orchestrator.api.errors import AmbiguousReferenceError, NotFoundError

    name = ref.rpartition("/")[2]  # of USER/NAME
    try:
        job = client.job(ref)
    except (NotFoundError, AmbiguousReferenceError) as error:
        matrix = client.find_matrix(ref)
        # Jobs of a matrix often have its name as a prefix: the whole name is the matrix, a part of it stays ambiguous.
        if matrix is None or (isinstance(error, AmbiguousReferenceError) and name not in (matrix.name, matrix.id)):
            raise
        return matrix
    if name != job.name or name == job.id:
        return job
    return client.find_matrix(ref) or job


Jobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB",
        help="Ids, beginnings of ids, or names, of jobs or matrices; or choose with the options.",
        autocompletion=complete_job,
    ),
]
User = Annotated[str | None, typer.Option("--user", "-u", metavar="USER", help="Jobs of this user; `me` for your own.")]
States = Annotated[
    list[str] | None,
    typer.Option("--state", "-s", metavar="STATE", help="Jobs in this state; a,b for several."),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="KEY[=VALUE]", help="Jobs with this label. Repeatable: all must be there."),
]
Name = Annotated[
    str | None, typer.Option("--name", metavar="PATTERN", help="Jobs with such a name, as in --name 'sweep-*'.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the selected jobs, and do nothing.")]


class Verb(NamedTuple):
    """A command on jobs: its verb, its default states without --state, and the text after the verb."""

    name: str
    states: tuple[str, ...]
    preposition: str = ""


CANCEL = Verb("cancel", LIVE_STATES)
PAUSE = Verb("pause", tuple(state for state in LIVE_STATES if state != "SUSPENDED"))
RESUME = Verb("resume", ("SUSPENDED",))
HOLD = Verb("hold", ("PENDING",))
RELEASE = Verb("release", ("SUSPENDED",))
RERUN = Verb("rerun", tuple(sorted(TERMINAL_STATES)))
UPDATE = Verb("update", LIVE_STATES)
WAIT = Verb("wait", LIVE_STATES, " for")


class Selection(NamedTuple):
    """The typed selection of jobs, and the options for confirmation, a dry run and the form of the answer."""

    session: Session
    refs: tuple[str, ...]
    choice: Choice
    yes: bool
    dry_run: bool
    json: bool


def selection(
    jobs: Jobs = None,
    *,
    user: User = None,
    state: States = None,
    label: Labels = None,
    name: Name = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> Selection:
    """Return the selection of a command line. Raises BadRequestError if it both names and chooses jobs, or neither."""
    choice = Choice(user=user, states=tuple(state or ()), labels=tuple(label or ()), name=name)
    if jobs and not choice.is_empty:
        raise BadRequestError(
            "both named jobs and options that choose jobs", hint="leave out JOB, or --user, --state, --label and --name"
        )
    if not jobs and choice.is_empty:
        raise BadRequestError(
            "no job was named",
            hint="name some, or choose: --user me, --state PENDING, --label team=a, --name 'sweep-*'",
        )
    return Selection(Session(quiet=quiet), tuple(jobs or ()), choice, yes, dry_run, json)


def meant(found: Selection, verb: Verb) -> list[str] | None:
    """Return references of the confirmed jobs; None after a dry run. Raises RefusedError if not confirmed."""
    session = found.session
    if found.refs:
        if not found.dry_run:
            return list(found.refs)
        client = session.client()
        chosen: Sequence[JobView] = [
            job for ref in dict.fromkeys(found.refs) for job in _named(session, client, ref, verb.states)
        ]
    else:
        chosen = chosen_jobs(session, found.choice, verb.states)
    if found.dry_run:
        _show(session, verb, chosen, as_json=found.json)
        return None
    if not chosen:
        session.console.note("no job matches; nothing was done")
    elif not found.yes:
        for line in _table(session, chosen):
            session.console.print_error(line)
        ask(session, f"{verb.name} {plural(len(chosen), 'job')}: {_some([job.id for job in chosen])}")
    return [job.id for job in chosen]


def _named(session: Session, client: Client, ref: str, states: tuple[str, ...]) -> list[JobView]:
    """Return the job of a reference; for a matrix, those of its jobs that the command applies to."""
    matrix = client.find_matrix(ref)
    if matrix is not None:
        return [client.job(job.job_id) for job in matrix.jobs if job.state in states]
    return [session.job(ref)]


def _show(session: Session, verb: Verb, chosen: Sequence[JobView], *, as_json: bool) -> None:
    keys = ("job_id", "name", "user", "state")
    value = {"would": verb.name, "jobs": [{key: getattr(job, key) for key in keys} for job in chosen]}
    would = f"would {verb.name}{verb.preposition} {plural(len(chosen), 'job')}"
    answer(session, _table(session, chosen), value, as_json=as_json, notes=[would])


def _table(session: Session, chosen: Sequence[JobView]) -> list[str]:
    from orchestrator.cli.render.jobs import job_lines

    return job_lines(session.console, chosen, time.time()) if chosen else []


SHOWN_IDS = 3


def _some(ids: Sequence[str]) -> str:
    more = len(ids) - SHOWN_IDS
    return ", ".join(ids[:SHOWN_IDS]) + (f" and {more} more" if more > 0 else "")


def act_on_each(found: Selection, verb: Verb, act: Callable[[Client, str], ActionReply]) -> tuple[int, list[str]]:
    """Act on every selected job, even if one is refused; return the exit code and the ids that were acted on.

    The exit code is the first error's if the action failed for all jobs, EXIT_PARTLY if it failed for some.
    """
    session, refs = found.session, meant(found, verb)
    if refs is None:
        return EXIT_OK, []
    if len(found.refs) == 1:
        reply = act(session.client(), refs[0])
        _print_reply(session, reply, as_json=found.json)
        if found.json:
            print_json(session, reply.to_json())
        return EXIT_OK, list(reply.job_ids or (reply.job_id,))
    replies, errors = _try_each(session, refs, act, as_json=found.json)
    if found.json:
        print_json(session, [reply.to_json() for reply in replies])
    if errors:
        session.console.note(f"{verb.name}: {plural(len(replies), 'job')} done, {len(refs) - len(replies)} not")
    elif len(replies) > 1:
        session.console.note(f"{verb.name}: {plural(len(replies), 'job')} done")
    code = EXIT_OK if not errors else EXIT_PARTLY if replies else errors[0].exit_code
    return code, [job_id for reply in replies for job_id in reply.job_ids or (reply.job_id,)]


def _try_each(
    session: Session, refs: list[str], act: Callable[[Client, str], ActionReply], *, as_json: bool
) -> tuple[list[Any], list[OrchError]]:
    client = session.client()
    replies: list[ActionReply] = []
    errors: list[OrchError] = []
    for ref in refs:
        try:
            replies.append(act(client, ref))
            _print_reply(session, replies[-1], as_json=as_json)
        except OrchError as error:
            report_error(error, session.console, as_json=as_json)
            errors.append(error)
            if isinstance(error, DaemonUnreachableError | DeadlineError):
                break  # the request for every other job would time out, too
    return replies, errors


def _print_reply(session: Session, reply: ActionReply, *, as_json: bool) -> None:
    if not as_json:
        session.console.print(reply.job_id)
        session.console.note(f"{reply.job_id} {reply.message} ({reply.state})")
