"""Splits a line of `sbatch` into its options and the script or command that it submits."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from orchestrator.spec.problems import BadValueError, quoted

_SWITCHES = frozenset(
    {
        *("--contiguous", "--exclusive", "--get-user-env", "--hold", "--ignore-pbs", "--nice", "--no-kill"),
        *("--no-requeue", "--overcommit", "--oversubscribe", "--parsable", "--propagate", "--quiet", "--reboot"),
        *("--requeue", "--spread-job", "--test-only", "--use-min-nodes", "--verbose", "--wait"),
        *("-H", "-k", "-O", "-Q", "-s", "-v", "-W"),
    }
)
"""Options of sbatch whose value, if they have one, follows an equals sign; every other one takes the next word."""
_WRAP = "--wrap"


class SbatchLine(NamedTuple):
    """Options as one line of a script, and what they apply to: a script's path, or the command of --wrap."""

    directive: str
    script: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()

    def script_text(self, text: str) -> str:
        """Return a script's text with the options of the line at its end, where they override those of the script."""
        return f"{text.rstrip()}\n{self.directive}\n"


def read_sbatch(line: str) -> SbatchLine | None:
    """Return the parts of a line of sbatch; None for any other line. Raises BadValueError where it submits nothing."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None  # the reader of other lines reports the quotation mark
    if not words or words[0].rpartition("/")[2] != "sbatch":
        return None
    options, rest, command = [], words[1:], ""
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        takes_next = not equals and word not in _SWITCHES and (word.startswith("--") or len(word) == 2)
        if takes_next and not rest:
            raise BadValueError(f"{quoted(word)} has no value", "write it after the option")
        value = rest.pop(0) if takes_next else value
        if name == _WRAP:
            command = value
        else:
            options += [word, value] if takes_next else [word]
    directive = f"#SBATCH {shlex.join(options)}" if options else "#"
    if command:
        return SbatchLine(directive, command=command)
    if not rest:
        raise BadValueError(f"{quoted(line)} names no script", "give the script's file, or --wrap and a command")
    return SbatchLine(directive, rest[0], arguments=tuple(rest[1:]))
