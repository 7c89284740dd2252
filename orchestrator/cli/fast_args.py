"""Parses plain lines of `orch submit` and `orch status` without typer.

Importing typer takes longer than these commands take to run, and `orch submit` is part of the time from a keystroke to
the first training step. A line is parsed here only if every word of it is known; any doubt (help, an unknown or
abbreviated option, a missing value, completion) leaves it to typer, which is the definition. A test compares the two on
random lines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.cli.session import Session
    from orchestrator.cli.status_view import StatusOptions
    from orchestrator.cli.submitting import SubmitOptions


class ParsedLine(NamedTuple):
    """A parsed line: positional arguments, switches, and each value option's values in order."""

    arguments: list[str]
    switches: set[str]
    values: dict[str, list[str]]


SUBMIT_SWITCHES = {
    "--dry-run": "dry_run",
    "--wait": "wait",
    "--follow": "follow",
    "--watch": "watch",
    "--json": "json",
    "--quiet": "quiet",
    "-q": "quiet",
    "--hold": "hold",
}
SUBMIT_VALUES = {
    "--set": "overrides",
    "--resume-from": "resume_from",
    "--after": "after",
    "--start-at": "start_at",
}
STATUS_SWITCHES = {"--watch": "watch", "-w": "watch", "--json": "json"}
STATUS_VALUES = {
    "--user": "user",
    "-u": "user",
    "--state": "states",
    "-s": "states",
    "--since": "since",
    "--label": "labels",
    "-l": "labels",
    "--name": "name",
}


def run(arguments: Sequence[str]) -> int | None:
    """Run a line that is parsed here and return its exit code; None for a line that typer must parse."""
    if "_ORCH_COMPLETE" in os.environ or not arguments:
        return None
    if arguments[0] == "submit" and (submit := parse_submit(arguments[1:])) is not None:
        return _submit(submit)
    if arguments[0] == "status" and (status := parse_status(arguments[1:])) is not None:
        return _status(status)
    return None


def parse_submit(words: Sequence[str]) -> SubmitOptions | None:
    """Return the options of a `submit` line, or None if typer must parse it."""
    found = take_apart(words, SUBMIT_SWITCHES, SUBMIT_VALUES)
    if found is None or not found.arguments:
        return None
    from orchestrator.cli.submitting import SubmitOptions

    return SubmitOptions(
        files=tuple(found.arguments),
        overrides=tuple(found.values.get("overrides", ())),
        resume_from=found.values.get("resume_from", [None])[-1],
        after=tuple(found.values.get("after", ())),
        dry_run="dry_run" in found.switches,
        wait="wait" in found.switches,
        follow="follow" in found.switches,
        watch="watch" in found.switches,
        json="json" in found.switches,
        quiet="quiet" in found.switches,
        hold="hold" in found.switches,
        start_at=found.values.get("start_at", [None])[-1],
    )


def parse_status(words: Sequence[str]) -> StatusOptions | None:
    """Return the options of a `status` line, or None if typer must parse it."""
    found = take_apart(words, STATUS_SWITCHES, STATUS_VALUES)
    if found is None or len(found.arguments) > 1:
        return None
    from orchestrator.cli.status_view import StatusOptions

    return StatusOptions(
        job=found.arguments[0] if found.arguments else None,
        watch="watch" in found.switches,
        user=found.values.get("user", [None])[-1],
        states=tuple(found.values.get("states", ())),
        since=found.values.get("since", [None])[-1],
        labels=tuple(found.values.get("labels", ())),
        name=found.values.get("name", [None])[-1],
        json="json" in found.switches,
    )


def take_apart(words: Sequence[str], switches: Mapping[str, str], values: Mapping[str, str]) -> ParsedLine | None:
    """Return the line's parts; None at the first unknown word."""
    found = ParsedLine([], set(), {})
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in switches:
            found.switches.add(switches[word])
        elif word in values:
            if not rest or rest[0].startswith("-"):
                return None
            found.values.setdefault(values[word], []).append(rest.pop(0))
        elif equals and name.startswith("--") and name in values:
            found.values.setdefault(values[name], []).append(value)
        elif word == "-" or (word and not word.startswith("-")):
            found.arguments.append(word)
        else:
            return None
    return found


def _submit(options: SubmitOptions) -> int:
    from orchestrator.cli.submitting import submit_files

    return _guarded(lambda session: submit_files(session, options), quiet=options.quiet, as_json=options.json)


def _status(options: StatusOptions) -> int:
    from orchestrator.cli.status_view import show_status

    return _guarded(lambda session: show_status(session, options), quiet=False, as_json=options.json)


def _guarded(run_with: Callable[[Session], int], *, quiet: bool, as_json: bool) -> int:
    from orchestrator.cli.outcome import guarded
    from orchestrator.cli.session import Session

    session = Session(quiet=quiet)
    return guarded(lambda: run_with(session), session.console, as_json=as_json)
