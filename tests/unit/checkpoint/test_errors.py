"""Kinds of failures of saves."""

from __future__ import annotations

import errno

import pytest

from orchestrator.checkpoint.errors import CorruptCheckpointError, InsufficientSpaceError, failure_kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InsufficientSpaceError("0 bytes free, the checkpoint needs 7"), "ENOSPC"),
        (OSError(errno.ENOSPC, "No space left on device"), "ENOSPC"),
        (PermissionError(errno.EACCES, "Permission denied"), "EACCES"),
        (OSError("of a library, without a number"), "OSError"),
        (CorruptCheckpointError("differs"), "CorruptCheckpointError"),
        (RuntimeError("else"), "RuntimeError"),
    ],
)
def test_failures_of_one_cause_have_one_kind(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind
