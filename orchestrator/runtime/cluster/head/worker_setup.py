"""What the raylet of an embedded head starts for each worker: takes the worker's place at once.

Ray's own ``setup_worker.py`` prepares a ``runtime_env`` and then replaces itself by the worker. To do so it imports all of
Ray, and so does the worker after it: 0.5 s of processor time before every actor. Without a ``runtime_env`` there is nothing
to prepare; with one, Ray's own program takes over.

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
    """What to execute with ``python``, of the arguments that the raylet gives."""
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
    """Nothing is to be prepared, and the worker runs in this interpreter."""
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
