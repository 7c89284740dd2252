"""Why a daemon ended by an error, in a file of its own: `orch up` tells that first, and the log after it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from orchestrator.api.errors import OrchError, error_from_json

if TYPE_CHECKING:
    from orchestrator.spec.paths import Paths

MAX_BYTES = 64 * 1024


def write(paths: Paths, error: OrchError) -> None:
    """Note the error of this process. What cannot be written is in the log all the same."""
    temporary = paths.daemon_failure.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "problem": error.to_json()}, file)
        temporary.replace(paths.daemon_failure)


def read(paths: Paths, pid: int) -> OrchError | None:
    """The error that ended process ``pid``; None where it noted none."""
    try:
        with paths.daemon_failure.open(encoding="utf-8") as file:
            noted = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(noted, dict) or noted.get("pid") != pid or not isinstance(noted.get("problem"), dict):
        return None
    return error_from_json(noted["problem"])
