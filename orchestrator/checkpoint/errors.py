"""What can go wrong with checkpoints; every message says what to do next."""

from __future__ import annotations

import errno
import struct
from typing import Final


class CheckpointError(Exception):
    """Base of all errors of this package."""


class UnsupportedStateError(CheckpointError):
    """The state handed to save() holds something that cannot be stored without pickle; convert it as the text says."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the job has taken over this directory; this process is a leftover and must end."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint differs from what its manifest promises; the one before it is used instead."""


class IncompatibleStateError(CheckpointError):
    """The state to load into does not have the shapes of the checkpoint, which is sound and stays where it is."""


class ResumeMismatchError(CheckpointError):
    """A rank cannot load what the other ranks of the attempt resumed from; the attempt must be started again."""


class OvertakenError(CheckpointError):
    """The training process took the memory for a newer snapshot while this one was written; the newer one is next."""


class InsufficientSpaceError(CheckpointError):
    """The storage has no room for another checkpoint; free some, or lower checkpoint.keep."""


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
"""What restoring a state raises that no version has written. Not MemoryError: that says nothing about the checkpoint."""


def failure_kind(error: Exception) -> str:
    """What a save failed of, the same for every save that fails of it: the name of an error number, or of a type.

    The messages differ from one save to the next: they name its step and its size.
    """
    if isinstance(error, InsufficientSpaceError):
        return errno.errorcode[errno.ENOSPC]
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, type(error).__name__)


NOT_FAILING: Final = ("", "")
"""What ``failure_cause`` is where saves go well."""


def failure_cause(failure: str, kind: str) -> tuple[str, str]:
    """What tells two failures apart: the kind or, where it is not known, the message."""
    return (kind, "" if kind else failure) if failure else NOT_FAILING
