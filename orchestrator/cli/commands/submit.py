"""`orch submit` and `orch run`: from files or a command line to accepted jobs, plans, and what follows a submission."""

from __future__ import annotations

import json
import os
import shlex
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrator.api.errors import (
    EXIT_JOB_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    BadRequestError,
    DaemonUnreachableError,
    InvalidSpecError,
    RefusedError,
)
from orchestrator.api.transport import submission
from orchestrator.cli.commands.shared import JobText, Json, Quiet, ended_in_order, finite, job_text, takes
from orchestrator.cli.console import clean
from orchestrator.cli.session import Session, print_json, require
from orchestrator.cli.times import parse_start, value_text
from orchestrator.units import age, number, plural, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.api.matrix_views import CombinationView
    from orchestrator.api.queue_views import PlannedRank
    from orchestrator.api.transport.upload import Uploaded
    from orchestrator.api.views import JobView, PlanReply
    from orchestrator.cli.console import Console
    from orchestrator.cli.render.table import Bar


PLAN_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options that `submit` and `run` share."""

    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, as in --set resources.num_workers=4."),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check it and print where and when it would run, without storing it; exit code 5 if it can never run here.",
        ),
    ] = False
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the job has ended; exit code 1 unless it succeeded.")
    ] = False
    follow: Annotated[bool, typer.Option("--follow", help="Show its log until it ends; exit code as with --wait.")] = (
        False
    )
    watch: Annotated[bool, typer.Option("--watch", help="Show its state until it ends; exit code as with --wait.")] = (
        False
    )
    json: Json = False
    quiet: Quiet = False


class Beginning(NamedTuple):
    """The checkpoint that jobs begin at (``JOB[@STEP]``), and the jobs that they wait for."""

    resume_from: str | None = None
    after: tuple[str, ...] = ()


NOW = Beginning()


def submit_texts(session: Session, texts: list[JobText], options: SubmitOptions, begin: Beginning = NOW) -> int:
    """Submit each text, or plan it, and then wait or follow as requested."""
    if options.follow and (options.json or len(texts) > 1):
        raise BadRequestError("--follow shows the log of one job", hint="leave out --json, and submit one file")
    if options.watch and (options.json or options.follow or len(texts) > 1):
        raise BadRequestError("--watch shows one job", hint="leave out --json and --follow, and submit one file")
    if options.dry_run:
        return _plan(session, texts, options, begin)
    replies = []
    for item in texts:
        reply = _deliver(session, _body(session, item, options, begin))
        replies.append(reply)
        if not (options.json or options.follow or options.watch):
            session.console.print(str(reply.get("matrix_id") or reply["job_id"]))
        _remark(session, reply, options)
    if options.watch or options.wait or options.follow:
        return _stay(session, replies, options)
    if options.json:
        print_json(session, replies[0] if len(replies) == 1 else replies)
    return EXIT_OK


def submit_one(session: Session, item: JobText, options: SubmitOptions) -> str:
    """Submit one text; return the job's id."""
    reply = _deliver(session, _body(session, item, options, NOW))
    for note in reply.get("notes") or ():
        session.console.note(f"note: {note}")
    return str(reply["job_id"])


def _stay(session: Session, replies: list[dict[str, Any]], options: SubmitOptions) -> int:
    """Follow, watch or wait until the submitted jobs have ended; return an exit code for their result."""
    from orchestrator.cli.commands.logs import exit_code_of, follow_job, wait_jobs

    ids = [str(job_id) for reply in replies for job_id in reply.get("job_ids") or [reply["job_id"]]]
    matrix_id = replies[0].get("matrix_id")
    if options.follow and matrix_id is None:
        return follow_job(session, ids[0])
    if options.watch:
        from orchestrator.cli.commands.status import StatusOptions, show_status

        show_status(session, StatusOptions(job=str(matrix_id or ids[0]), watch=True))
        if matrix_id is not None:  # a search has submitted more jobs meanwhile
            ids = [job.job_id for job in session.client().matrix(str(matrix_id)).jobs]
        return exit_code_of([session.client().job(job_id) for job_id in ids])
    if options.follow:
        session.console.note(f"--follow shows the log of one job; waiting for the {len(ids)} of {matrix_id} instead")
    if matrix_id is not None:
        refs = [str(reply.get("matrix_id") or reply["job_id"]) for reply in replies]
        return wait_jobs(session, refs, as_json=options.json, as_array=True)
    return wait_jobs(session, ids, as_json=options.json, as_array=len(replies) > 1, exact=True)


def _body(session: Session, item: JobText, options: SubmitOptions, begin: Beginning) -> dict[str, Any]:
    return submission.request_body(
        item.text,
        item.source,
        environ=session.environ,
        cwd=item.cwd,
        overrides=options.overrides or (),
        resume_from=begin.resume_from,
        after=begin.after,
        note=lambda text: session.console.note(f"note: {clean(text)}"),
    )


def _remark(session: Session, reply: dict[str, Any], options: SubmitOptions) -> None:
    console = session.console
    matrix_id = reply.get("matrix_id")
    if options.follow or options.watch:
        runs = "the job keeps" if matrix_id is None else "the jobs keep"
        console.note(f"submitted {matrix_id or reply['job_id']}; Ctrl-C stops following; {runs} running")
    elif matrix_id is not None and not options.json:
        count = len(reply["job_ids"])
        console.note(
            f"submitted {plural(count, 'job')}; `orch matrix {matrix_id}` shows {'it' if count == 1 else 'them'}"
        )
    elif not options.json and not options.wait and console.is_terminal:
        console.note(f"submitted; `orch logs -f {reply['job_id']}` follows it")
    for note in reply.get("notes") or ():
        console.note(f"note: {note}")


class UploadBar:
    """Progress bar of an upload; imported and shown only during one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bar: Bar | None = None

    def sent(self, done: int, total: int) -> None:
        """Show that the daemon has received ``done`` of ``total`` bytes."""
        from orchestrator.cli.render.table import Bar

        self._bar = self._bar or Bar(self._session, total)
        self._bar.at(done, "upload of working_dir")

    def ended(self, uploaded: Uploaded) -> None:
        """Print what was uploaded, and what ignore files left out."""
        if self._bar is not None:
            self._bar.end()
        text = f"uploaded working_dir: {plural(uploaded.files, 'file')}, {size(uploaded.size_bytes)}"
        if uploaded.sent_bytes < uploaded.size_bytes:
            text += f" ({size(uploaded.sent_bytes)} sent, the rest was there)"
        self._session.console.note(text)
        if uploaded.left_out is not None and uploaded.left_out.files:
            found = uploaded.left_out
            more = "at least " if found.more else ""
            self._session.console.note(
                f"note: not uploaded, by {', '.join(found.by)}: {more}{plural(found.files, 'file')} ({size(found.size_bytes)})"
            )


def _deliver(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """Submit; if no daemon runs, start one and submit again, with the same key."""

    def send() -> dict[str, Any]:
        return submission.submit(session.endpoint, body, environ=session.environ, watch=UploadBar(session))

    return with_daemon(session, send)


def with_daemon(session: Session, send: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``send``; if no daemon of this machine listens, print a note and start one first."""
    try:
        return send()
    except DaemonUnreachableError as error:
        if type(error) is not DaemonUnreachableError or not session.endpoint.socket_path:
            raise
    from orchestrator.cli.commands.machine import start_daemon

    require("daemon", "a daemon on this machine")
    session.console.note("no daemon is running; starting one (`orch down` stops it)")
    start_daemon(session)
    return send()


def _plan(session: Session, texts: list[JobText], options: SubmitOptions, begin: Beginning) -> int:
    plans = []
    for item in texts:
        body = _body(session, item, options, begin)

        def send(body: dict[str, Any] = body) -> dict[str, Any]:
            watch = UploadBar(session)
            return submission.plan(session.endpoint, body, deadline_seconds=PLAN_SECONDS, watch=watch)

        plans.append(with_daemon(session, send))
    code = EXIT_REFUSED if any(plan.get("starts") == "never" for plan in plans) else EXIT_OK
    if options.json:
        print_json(session, plans[0] if len(plans) == 1 else plans)
        return code
    from orchestrator.api.views import PlanReply

    for plan in plans:
        for line in plan_lines(session.console, PlanReply.from_json(plan)):
            session.console.print(line)
    return code


STARTS = {"now": ("would start now", "green"), "later": ("would wait", "yellow"), "never": ("can never start", "red")}


def plan_lines(console: Console, plan: PlanReply) -> list[str]:
    """Return where and when the job would run, and what would be copied."""
    from orchestrator.cli.render.table import Column, render_table

    words, colour = STARTS.get(plan.starts, (plan.starts, "dim"))
    lines = [f"{console.style(clean(plan.name), 'bold')}  {console.style(words, colour)}: {clean(plan.reason)}"]
    if plan.expected_start is not None:
        lines.append(f"  expected to start in about {age(max(0.0, plan.expected_start - time.time()))}")
    if plan.ahead:
        lines.append(f"  behind {', '.join(plan.ahead)}")
    facts = [
        ("queue", plan.queue),
        ("python", clean(plan.python)),
        ("works in", clean(plan.working_dir)),
        ("copies", f"{plan.snapshot_files} files, {size(plan.snapshot_bytes)}" if plan.snapshot_files else ""),
        ("secrets", ", ".join(plan.secrets)),
    ]
    lines += [f"  {console.style(label.ljust(10), 'dim')}{text}" for label, text in facts if text]
    columns: tuple[Column[PlannedRank], ...] = (
        Column("RANK", lambda seat: seat.rank, right=True),
        Column("NODE", lambda seat: seat.node),
        Column("GPUS", lambda seat: number(seat.gpus), right=True),
        Column("CPUS", lambda seat: number(seat.cpus), right=True),
    )
    lines += render_table(console, columns, plan.seats)
    lines += _combinations(console, plan)
    lines += [f"note: {clean(note)}" for note in plan.notes]
    return lines


def _combinations(console: Console, plan: PlanReply) -> list[str]:
    """Return the jobs of a matrix: a row for each, with the values as columns."""
    from orchestrator.cli.render.table import Column, render_table

    if not plan.combinations:
        return []
    columns: list[Column[CombinationView]] = [
        Column("NAME", lambda one: one.name, weight=1000),
        *(Column(name.upper(), partial(_value, name), weight=900) for name in plan.combinations[0].values),
    ]
    count = len(plan.combinations)
    head = "1 job" if count == 1 else f"{count} jobs, the first as shown above"
    return [f"  {console.style('matrix'.ljust(10), 'dim')}{head}", *render_table(console, columns, plan.combinations)]


def _value(parameter: str, one: CombinationView) -> str:
    return value_text(one.values.get(parameter))


_INTERRUPTED = 130


def run_interactive(session: Session, item: JobText, options: SubmitOptions) -> int:
    """Run the job on this terminal; return its command's exit code. Ctrl-C while it waits cancels it."""
    from orchestrator.cli.commands.logs import LogOptions, report_end, show_logs
    from orchestrator.cli.commands.sessions import attach_to

    job_id = submit_one(session, item, options)
    session.console.note(f"submitted {job_id}; Ctrl-C cancels it while it waits")
    try:
        job = _up(session, job_id)
    except KeyboardInterrupt:
        session.client().cancel(job_id)
        session.console.note(f"\n{job_id} is cancelled")
        return _INTERRUPTED
    if job.state == "RUNNING":
        session.console.note(f"works in {clean(job.working_dir)}, a copy of {clean(item.cwd)}; ~. detaches")
        try:
            return attach_to(session, job_id, 0)
        except RefusedError:  # the job is never restarted, so its rank has ended
            job = _ended(session, job_id)
    show_logs(session, job_id, LogOptions(), follow=False)  # the command ended before this terminal was attached
    report_end(session, job)
    return EXIT_OK if job.state == "SUCCEEDED" else job.exit_code or EXIT_JOB_FAILED


def _up(session: Session, job_id: str) -> JobView:
    """Wait until the job runs or has ended; print what it waits for."""
    shown = ""
    for job in _seen(session, job_id):
        if job.state == "RUNNING" or job.is_terminal:
            return job
        if shown != (shown := f"{job.state}: {job.reason}"):
            session.console.note(f"{job.id} {clean(shown)}")
    raise AssertionError("a watch has no end")


def _ended(session: Session, job_id: str) -> JobView:
    """Wait until the job has ended; its rank already has."""
    for job in _seen(session, job_id):
        if job.is_terminal:
            return job
    raise AssertionError("a watch has no end")


def _seen(session: Session, job_id: str) -> Iterator[JobView]:
    from orchestrator.api.transport import following

    client = session.client()
    return following.watch(client, lambda: client.job(job_id), job_ids=[job_id], patience=session.patience())


CONTEXT_SETTINGS = {"run": {"allow_interspersed_args": False}}


@takes(SubmitOptions)
def submit(
    options: SubmitOptions,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="job.yaml files; - reads standard input.")],
    *,
    resume_from: Annotated[
        str | None, typer.Option("--resume-from", metavar="JOB[@STEP]", help="Begin at another job's checkpoint.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="JOB[:END]",
            help="Start when another job has succeeded; JOB:failure, JOB:any for another end. Repeatable.",
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Do not start it before `orch release`.")] = False,
    start_at: Annotated[
        str | None,
        typer.Option("--start-at", metavar="TIME", help="Not before: 2h (from now), 20:00, or 2026-11-20T14:30."),
    ] = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Run the script on one rank for seconds, and take the advised num_workers: auto."
        ),
    ] = False,
) -> int:
    """Submit jobs; prints the id of each job, or of the matrix for a file with `matrix:`. Starts the daemon if none is running.

    `env: {pass: [NAME, "PREFIX_*"]}` in FILE takes those variables from this environment; no others are sent except the secrets that FILE names.

    With --json: one object for one FILE, an array for several.
    """
    session = Session(quiet=options.quiet)
    overrides = [*(options.overrides or ())]
    if advise:
        overrides += _advised(session, files, overrides)
    if hold:
        overrides.append("hold=true")
    if start_at is not None:
        overrides.append(f"start_at={parse_start(start_at, '--start-at', time.time())}")
    options = replace(options, overrides=overrides)
    begin = Beginning(resume_from, tuple(after or ()))
    return submit_texts(session, [job_text(path) for path in files], options, begin)


def _advised(session: Session, files: list[str], overrides: list[str]) -> tuple[str, ...]:
    from orchestrator.bench.plan import BenchError
    from orchestrator.cli.commands.bench import advice_overrides

    try:
        with ended_in_order():
            return advice_overrides(session, files, overrides)
    except BenchError as error:
        raise BadRequestError(error.message, hint=error.hint) from error


@takes(SubmitOptions)
def run(
    options: SubmitOptions,
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The command, as on your own shell's line.")
    ],
    *,
    num_workers: Annotated[int, typer.Option("--num-workers", "-n", metavar="N", min=1, help="Ranks.")] = 1,
    gpu: Annotated[
        float | None,
        typer.Option("--gpu", metavar="G", min=0, callback=finite, help="GPUs for each rank; 0 runs on the CPU."),
    ] = None,
    cpu: Annotated[
        float | None, typer.Option("--cpu", metavar="C", min=0, callback=finite, help="CPUs for each rank.")
    ] = None,
    gpu_model: Annotated[
        str | None, typer.Option("--gpu-model", metavar="MODEL", help="Only such GPUs, as `orch nodes` shows them.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The job's name; default: the script's.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="A variable; NAME alone takes your value. Repeatable."),
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="The queue it waits in.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", metavar="P", min=0, max=100, help="0 to 100, higher first.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="SPAN", help="Stop it after this time: 2h, 90m (max_duration).")
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="A label. Repeatable.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Run it on this terminal: a shell, a debugger, a notebook.")
    ] = False,
    idle_limit: Annotated[
        str | None,
        typer.Option(
            "--idle-limit", metavar="SPAN", help="With -i: cancel it after this time without use; default: 1h."
        ),
    ] = None,
) -> int:
    """Run a command as a job, without a file: orch run -n 2 --gpu 1 -- python train.py --epochs 5.

    With -i the command runs on this terminal once it has its GPUs, as in orch run -i --gpu 2 -- bash; its exit code is this command's.
    It works in a copy of this directory. ~. at the beginning of a line leaves it running, and `orch attach` returns to it.
    """
    session = Session(quiet=options.quiet)
    if interactive and (options.wait or options.follow or options.watch or options.json):
        raise BadRequestError(
            "--interactive shows the command itself", hint="leave out --wait, --follow, --watch and --json"
        )
    if idle_limit is not None and not interactive:
        raise BadRequestError(f"--idle-limit {idle_limit}: the job is not interactive", hint="add --interactive")
    text = job_yaml(
        command,
        num_workers=num_workers,
        gpu=gpu,
        cpu=cpu,
        gpu_model=gpu_model,
        name=name,
        keys={
            "env": _variables(
                (*_terminal_kind(session.environ, interactive=interactive), *(env or ())), session.environ
            ),
            "queue": queue,
            "priority": priority,
            "max_duration": time,
            "labels": _pairs("--label", labels or ()),
            **(interactive_keys(idle_limit) if interactive else {}),
        },
    )
    item = JobText(text, "<orch run>", os.getcwd())
    with _errors_of_options():
        if interactive and not options.dry_run:
            return run_interactive(session, item, options)
        return submit_texts(session, [item], options)


OPTION_OF_KEY = {
    "env": "--env",
    "entrypoint": "the command",
    "interactive.idle_limit": "--idle-limit",
    "labels": "--label",
    "max_duration": "--time",
    "name": "--name",
    "priority": "--priority",
    "queue": "--queue",
    "resources.num_workers": "--num-workers",
    "resources.resources_per_worker.cpu": "--cpu",
    "resources.resources_per_worker.gpu": "--gpu",
    "resources.resources_per_worker.gpu_model": "--gpu-model",
}
"""Option of `orch run` that sets a key of its job.yaml; other keys come from ``--set``."""


@contextmanager
def _errors_of_options() -> Iterator[None]:
    """Name the option for each error: the user has not seen the lines of the job.yaml of `orch run`."""
    try:
        yield
    except InvalidSpecError as error:
        problems = [
            problem._replace(line=None, column=None, source=_option_of(problem.path), path="")
            for problem in error.problems
        ]
        count = "one error" if len(problems) == 1 else f"{len(problems)} errors"
        hint = "`orch help run` describes each option"
        raise InvalidSpecError(f"this command line has {count}", hint=hint, problems=problems) from error


def _option_of(key: str) -> str:
    """Return the option of a key, as ``--env`` for ``env.A``; empty for an error of the whole text, without a key."""
    if not key:
        return ""
    return OPTION_OF_KEY.get(key) or OPTION_OF_KEY.get(key.partition(".")[0]) or f"--set {key}"


def interactive_keys(idle_limit: str | None) -> dict[str, object]:
    """Return the keys of an interactive job: started once, never preempted, and without a report."""
    return {
        "interactive": {} if idle_limit is None else {"idle_limit": idle_limit},
        "preemptible": False,
        "report": False,
        "stop_duration": "10s",
        "retry": {"max_restarts": {"user": 0, "infra": 0, "hang": 0, "preemption": 0}},
    }


def _terminal_kind(environ: Mapping[str, str], *, interactive: bool) -> tuple[str, ...]:
    return ("TERM",) if interactive and environ.get("TERM") else ()


def _variables(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the job; a name alone takes the value of this environment."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise BadRequestError(f"--env {text}: there is no such variable here", hint=f"write --env {text}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise BadRequestError(f"{option} {text}: no value", hint=f"write {option} {text}=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


_MAPPINGS = ("env", "labels")


def job_yaml(
    command: list[str],
    *,
    num_workers: int,
    gpu: float | None,
    cpu: float | None,
    name: str | None,
    gpu_model: str | None = None,
    keys: Mapping[str, object] | None = None,
) -> str:
    """Return the job.yaml of this command as JSON, which is unambiguous YAML. ``keys`` without a value are left out."""
    if not command or not command[0]:
        raise BadRequestError("there is no command to run", hint="orch run -- python train.py")
    from orchestrator.spec.importing import name_for

    per_worker: dict[str, object] = {
        key: _whole(value) for key, value in (("gpu", gpu), ("cpu", cpu)) if value is not None
    }
    if gpu_model is not None:
        per_worker["gpu_model"] = gpu_model
    resources: dict[str, object] = {"num_workers": num_workers}
    if per_worker:
        resources["resources_per_worker"] = per_worker
    given = {key: value for key, value in (keys or {}).items() if value is not None and (value or key not in _MAPPINGS)}
    job = {
        "version": 1,
        "name": name or name_for(command),
        "entrypoint": shlex.join(command),
        "resources": resources,
        **given,
    }
    return json.dumps(job, ensure_ascii=False, indent=1) + "\n"


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
