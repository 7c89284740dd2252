"""The entry point of `orch`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from orchestrator.cli.app import command

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> None:
    """Run the command line of this process, and end it."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
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
