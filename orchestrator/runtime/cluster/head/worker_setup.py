"""The program that an embedded head's raylet starts for each worker: it replaces itself by the worker at once.

Ray's own ``setup_worker.py`` prepares a ``runtime_env`` and then replaces itself by the worker. To do so it imports all of
Ray, and so does the worker after it: 0.5 s of processor time for every actor. Without a ``runtime_env`` there is nothing
to prepare; with one, this program executes Ray's own.

The raylet runs this file by its path. It imports nothing of orch or Ray.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

RAYS_OWN: Final = "setup_worker.py"
"""Ray's program, beside the worker's."""

_CONTEXT: Final = "--serialized-runtime-env-context"
_LANGUAGE: Final = "--language"


def command(arguments: list[str], python: str) -> list[str]:
    """Return the command to execute with ``python``, from the arguments that the raylet gives."""
    options: dict[str, str] = {}
    passed_on: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in (_CONTEXT, _LANGUAGE):
            options[name] = value if equals else next(remaining, "")
        else:
            passed_on.append(argument)
    if options.get(_LANGUAGE) == "PYTHON" and _is_plain(options.get(_CONTEXT, ""), python):
        return [python, *passed_on]
    beside, _, _ = next(argument for argument in passed_on if argument.endswith(".py")).rpartition("/")
    return [python, f"{beside}/{RAYS_OWN}", *arguments]


def _is_plain(context: str, python: str) -> bool:
    """Whether the worker needs no preparation and runs in this interpreter."""
    try:
        wanted = json.loads(context or "{}")
    except ValueError:
        return False
    return isinstance(wanted, dict) and not any(
        value for name, value in wanted.items() if (name, value) != ("py_executable", python)
    )


if __name__ == "__main__":
    _command = command(sys.argv[1:], sys.executable)
    os.execv(_command[0], _command)
