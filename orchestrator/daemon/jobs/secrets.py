"""The file of a job's secrets: mode 0600, from its submission to its end. Its removal is in ``tidying.py``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from orchestrator.private_files import make_private, open_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.spec.paths import Paths


def write_secrets(paths: Paths, job_id: str, values: Mapping[str, str]) -> None:
    """Write a job's secrets; a job without any has no file."""
    if not values:
        return
    path = paths.secrets(job_id)
    make_private(path.parent)
    handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(handle, json.dumps(dict(values)).encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_secrets(paths: Paths, job_id: str) -> dict[str, str]:
    """Read a job's secrets; empty when it has none, or has ended."""
    try:
        values: dict[str, str] = json.loads(paths.secrets(job_id).read_bytes())
    except FileNotFoundError:
        return {}
    return values
