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
        InsufficientSpaceError,
        ResumeMismatchError,
        StaleAttemptError,
        UnsupportedStateError,
    )
    from orchestrator.checkpoint.info import CheckpointInfo, CheckpointStatus
    from orchestrator.checkpoint.reader import Checkpoint
    from orchestrator.checkpoint.store import CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStatus",
    "CheckpointStore",
    "CorruptCheckpointError",
    "InsufficientSpaceError",
    "ResumeMismatchError",
    "StaleAttemptError",
    "UnsupportedStateError",
]

_HOMES = {"Checkpoint": "reader", "CheckpointInfo": "info", "CheckpointStatus": "info", "CheckpointStore": "store"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
