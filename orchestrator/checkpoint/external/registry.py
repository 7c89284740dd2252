"""The registry of a job's own files: the facts about each, in one file of the job's directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.storage.info import CheckpointInfo, CheckpointStatus
from orchestrator.checkpoint.storage.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from orchestrator.checkpoint.external.overwritten_files import OverwrittenFiles

_FILE = "registry.json"


class RegistryFile:
    """Reads and writes the registry; ``storage`` is the private directory that contains it and the copies."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.storage = LocalStorage(directory, private=True)

    def lock(self) -> AbstractContextManager[object]:
        """Return a context manager that holds the lock under which one process at a time reads, changes and writes."""
        return self.storage.lock()

    def read(self) -> dict[str, Any]:
        """Return the registry; an empty one where there is none, or it is unreadable."""
        try:
            registry: dict[str, Any] = json.loads(bytes(self.storage.read(_FILE)))
        except (FileNotFoundError, ValueError):
            registry = {}
        blank: dict[str, Any] = {
            "known": {},
            "foreign": {},
            "removing": [],
            "chosen": {},
            "rewritten": {},
            "inodes": {},
        }
        return {**blank, "adopted": dict(registry.get("foreign", {})), **registry}

    def write(self, registry: Mapping[str, Any]) -> None:
        """Write the registry durably."""
        Path(self._directory).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.storage.replace(_FILE, json.dumps(registry).encode(), durable=True)
        self.storage.keep_spare()


def info_of(path: str, entry: Mapping[str, Any]) -> CheckpointInfo:
    """Return the information about a checkpoint from its registry entry."""
    return CheckpointInfo(
        name=Path(path).name,
        path=path,
        step=entry["step"],
        attempt=entry["attempt"],
        status=CheckpointStatus.BROKEN if entry["why"] else CheckpointStatus.COMPLETE,
        why=entry["why"],
        bytes=sum(size for size, _ in entry["files"].values()),
        created_at=entry["created_at"],
        digest=hashlib.sha256(json.dumps(entry["files"], sort_keys=True).encode()).hexdigest(),
    )


def existing(registry: Mapping[str, Any], copies: OverwrittenFiles) -> list[CheckpointInfo]:
    """Return every registered checkpoint that still exists, itself or as a copy, newest first. Reads no content."""
    infos = [
        info_of(path, entry)
        for path, entry in registry["known"].items()
        if os.path.lexists(path) or (entry.get("copy") and copies.path(entry).exists())
    ]
    # A newer attempt first: it may run on another node, where a different clock makes its files look older.
    return sorted(infos, key=lambda info: (info.attempt, info.created_at or 0.0, info.step), reverse=True)
