"""Records why a daemon ended with an error, in a file that `orch up` shows before the log."""

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
    """Write the error of this process. A failure is ignored: the log has the error too."""
    temporary = paths.daemon_failure.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "problem": error.to_json()}, file)
        temporary.replace(paths.daemon_failure)


def read(paths: Paths, pid: int) -> OrchError | None:
    """Return the error that ended process ``pid``; None where it recorded none."""
    try:
        with paths.daemon_failure.open(encoding="utf-8") as file:
            noted = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(noted, dict) or noted.get("pid") != pid or not isinstance(noted.get("problem"), dict):
        return None
    return error_from_json(noted["problem"])
