"""The entry point of `orch`.

The two most frequent commands, `submit` and `status`, skip typer if their line is plain: its import takes longer
than everything else they do. ``fast_args`` decides; typer parses all other lines.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> None:
    """Run the command line of this process, and end it."""
    from orchestrator.cli import fast_args as fast

    arguments = sys.argv[1:]
    code = fast.run(arguments)
    if code is None:
        sys.exit(_run_typer(arguments))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):  # the reader has closed
                stream.flush()
    # Skip the interpreter's clean-up: it takes longer than a command, and nothing here needs it.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    from orchestrator.cli import fast_args as fast

    code = fast.run(arguments)
    return _run_typer(arguments) if code is None else code


def _run_typer(arguments: Sequence[str]) -> int:
    from orchestrator.cli.app import command

    own = list(arguments)[: list(arguments).index("--")] if "--" in arguments else arguments
    try:
        result: Any = command(as_json="--json" in own).main(
            args=list(arguments), prog_name="orch", standalone_mode=False
        )
    except Exception as error:
        return _usage(error)
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> int:
    """Print click's error for an invalid line; raise any other error."""
    if not (hasattr(error, "show") and hasattr(error, "exit_code")):
        raise error
    error.show()
    return int(error.exit_code)


if __name__ == "__main__":
    main()
