"""`orch show` and `orch diff`: what a job runs, and the differences of two jobs."""

from __future__ import annotations

import json as json_module
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.cli.commands.shared import Job, Json
from orchestrator.cli.console import clean
from orchestrator.cli.render.jobs import LABEL_WIDTH
from orchestrator.cli.session import Session, answer
from orchestrator.units import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.api.spec_views import GitView, SpecDiff, SpecView

MOST_FILES = 20
"""Most changed files that are listed, so that the values above them stay in view."""

SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def show(
    job: Job,
    *,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print a job.yaml with every key, to submit it again.")] = False,
    json: Json = False,
) -> int:
    """Show exactly what a job runs: command, interpreter, environment, archive, git commit, and its spec as resolved.

    Values that look like secrets are masked.
    """
    session = Session()
    found = session.client().spec(job)
    if yaml:
        for line in found.yaml.rstrip("\n").split("\n"):
            session.console.print(line)
        if found.masked:
            session.console.note(f"masked: {', '.join(found.masked)}; put the values back before you submit it")
        return EXIT_OK
    return answer(session, _lines(session, found), found.to_json(), as_json=json)


def _lines(session: Session, found: SpecView) -> Iterator[str]:
    console = session.console
    yield f"{console.style(found.job_id, 'bold')}  submitted {clock(found.submitted_at)} by {clean(found.user)}"
    rows = [
        ("command", shlex.join(found.command)),
        ("interpreter", found.python),
        ("archive", f"sha256:{found.archive}" if found.archive else "none"),
        ("git", _git_text(found.git)),
        ("begins at", found.resume_from or ""),
        ("rerun of", found.rerun_of or ""),
        *(("" if number else "environment", f"{n}={v}") for number, (n, v) in enumerate(sorted(found.env.items()))),
    ]
    for label, text in rows:
        if text:
            yield f"  {console.style(label.ljust(LABEL_WIDTH), 'dim')}{clean(text)}"
    yield ""
    yield from map(clean, found.yaml.rstrip("\n").split("\n"))


def _git_text(git: GitView | None) -> str:
    if git is None:
        return ""
    branch = f" ({git.branch})" if git.branch else ""
    return f"{git.commit or 'no commit yet'}{branch}{', with uncommitted changes' if git.dirty else ''}"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A job, as for `orch status`.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The job that it is compared with.")],
    json: Json = False,
) -> int:
    """Show how job B differs from job A: keys of job.yaml, interpreter, git commit, and files of the working directory."""
    session = Session()
    found = session.client().diff(before, after)
    return answer(session, _diff_lines(found), found.to_json(), as_json=json)


def _diff_lines(found: SpecDiff) -> Iterator[str]:
    if not (found.values or found.files or found.files_unknown):
        yield f"{found.before} and {found.after} run the same"
        return
    width = max((len(value.key) for value in found.values), default=0)
    for value in found.values:
        yield clean(f"{value.key.ljust(width)}  {_value(value.before)} -> {_value(value.after)}")
    for file in found.files[:MOST_FILES]:
        yield f"{SIGNS.get(file.change, '?')} {clean(file.path)}"
    if left := max(0, len(found.files) - MOST_FILES) + found.more_files:
        yield f"and {left} more {'file' if left == 1 else 'files'}; --json lists up to 200"
    if found.files_unknown:
        yield f"files: {clean(found.files_unknown)}"


def _value(value: Any) -> str:
    if value is None:
        return "(none)"
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)
