"""Snapshot, commit, verify, retain, load. Without Ray; torch and numpy only when a state holds their values.

Importing this package costs nothing: its parts are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.checkpoint.errors import (
        CheckpointError,
        CorruptCheckpointError,
        IncompatibleStateError,
        InsufficientSpaceError,
        ResumeMismatchError,
        StaleAttemptError,
        UnsupportedStateError,
    )
    from orchestrator.checkpoint.repository.repository import CheckpointRepository
    from orchestrator.checkpoint.storage.directory import Checkpoint, CheckpointInfo, CheckpointStatus

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointRepository",
    "CheckpointStatus",
    "CorruptCheckpointError",
    "IncompatibleStateError",
    "InsufficientSpaceError",
    "ResumeMismatchError",
    "StaleAttemptError",
    "UnsupportedStateError",
]

_HOMES = {
    "Checkpoint": "storage.directory",
    "CheckpointInfo": "storage.directory",
    "CheckpointStatus": "storage.directory",
    "CheckpointRepository": "repository.repository",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
