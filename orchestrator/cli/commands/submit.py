"""`orch submit` and `orch run`: submit a job."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import BadRequestError, InvalidSpecError
from orchestrator.cli.commands.shared import finite
from orchestrator.cli.session import Session
from orchestrator.cli.submitting import JobText, SubmitOptions, submit_files, submit_texts
from orchestrator.spec.importing.command import name_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONTEXT_SETTINGS = {"run": {"allow_interspersed_args": False}}

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check it and print where and when it would run, without storing it; exit code 5 if it can never run here.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the job has ended; exit code 1 unless it succeeded.")]
Follow = Annotated[bool, typer.Option("--follow", help="Show its log until it ends; exit code as with --wait.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show its state until it ends; exit code as with --wait.")]
Hold = Annotated[bool, typer.Option("--hold", help="Do not start it before `orch release`.")]
StartAt = Annotated[
    str | None,
    typer.Option("--start-at", metavar="TIME", help="Not before: 2h (from now), 20:00, or 2026-11-20T14:30."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer and errors.")]


def submit(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="job.yaml files; - reads standard input.")],
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, as in --set resources.num_workers=4."),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    follow: Follow = False,
    watch: Watch = False,
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
    hold: Hold = False,
    start_at: StartAt = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Run the script on one rank for seconds, and take the advised num_workers: auto."
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Submit jobs; prints the id of each job, or of the matrix for a file with `matrix:`. Starts the daemon if none is running.

    `env: {pass: [NAME, "PREFIX_*"]}` in FILE takes those variables from this environment; no others are sent except the secrets that FILE names.

    With --json: one object for one FILE, an array for several.
    """
    options = SubmitOptions(
        files=tuple(files),
        overrides=tuple(overrides or ()),
        resume_from=resume_from,
        after=tuple(after or ()),
        dry_run=dry_run,
        wait=wait,
        follow=follow,
        watch=watch,
        json=json,
        quiet=quiet,
        hold=hold,
        start_at=start_at,
    )
    session = Session(quiet=quiet)
    if advise:
        options = options._replace(overrides=(*options.overrides, *_advised(session, options)))
    return submit_files(session, options)


def _advised(session: Session, options: SubmitOptions) -> tuple[str, ...]:
    from orchestrator.bench.errors import BenchError
    from orchestrator.cli.commands.runs.advising import advice_overrides
    from orchestrator.cli.commands.shared import ended_in_order

    try:
        with ended_in_order():
            return advice_overrides(session, options.files, options.overrides)
    except BenchError as error:
        raise BadRequestError(error.message, hint=error.hint) from error


def run(
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
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any other key of job.yaml.")
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
    dry_run: DryRun = False,
    wait: Wait = False,
    follow: Follow = False,
    watch: Watch = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a command as a job, without a file: orch run -n 2 --gpu 1 -- python train.py --epochs 5.

    With -i the command runs on this terminal once it has its GPUs, as in orch run -i --gpu 2 -- bash; its exit code is this command's.
    It works in a copy of this directory. ~. at the beginning of a line leaves it running, and `orch attach` returns to it.
    """
    session = Session(quiet=quiet)
    if interactive and (wait or follow or watch or json):
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
    options = SubmitOptions(
        files=(),
        overrides=tuple(overrides or ()),
        dry_run=dry_run,
        wait=wait,
        follow=follow,
        watch=watch,
        json=json,
        quiet=quiet,
    )
    item = JobText(text, "<orch run>", os.getcwd())
    with _errors_of_options():
        if interactive and not dry_run:
            from orchestrator.cli.sessions.interactive import run_interactive

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
