"""Errors of checkpoints; every message says what to do next."""

from __future__ import annotations

import errno
import struct
from typing import Final


class CheckpointError(Exception):
    """Base of all errors of this package."""


class UnsupportedStateError(CheckpointError):
    """The state passed to save() holds something that cannot be stored without pickle; convert it as the message says."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the job has taken over this directory; this process is a leftover and must end."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint differs from its manifest; the previous one is used instead."""


class IncompatibleStateError(CheckpointError):
    """The state to load into does not have the checkpoint's shapes; the checkpoint is valid and stays."""


class ResumeMismatchError(CheckpointError):
    """A rank cannot load the checkpoint that the other ranks of the attempt resumed from; start the attempt again."""


class OvertakenError(CheckpointError):
    """The training process reused the memory for a newer snapshot during this write; the newer one is written next."""


class InsufficientSpaceError(CheckpointError):
    """The storage has no space for another checkpoint; free some, or lower checkpoint.keep."""


MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    BufferError,
    RuntimeError,  # RecursionError, and most of torch's
    struct.error,
)
"""Errors of restoring an invalid state. Not MemoryError, which is no evidence about the checkpoint."""


def failure_kind(error: Exception) -> str:
    """Return the cause of a failed save, equal for all saves with that cause: an error number's or a type's name.

    The messages differ from one save to the next: they name its step and its size.
    """
    if isinstance(error, InsufficientSpaceError):
        return errno.errorcode[errno.ENOSPC]
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, type(error).__name__)


NOT_FAILING: Final = ("", "")
"""The ``failure_cause`` of successful saves."""


def failure_cause(failure: str, kind: str) -> tuple[str, str]:
    """Return what distinguishes two failures: the kind or, where it is unknown, the message."""
    return (kind, "" if kind else failure) if failure else NOT_FAILING
