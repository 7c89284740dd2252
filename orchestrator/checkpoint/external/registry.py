"""The registry of a job's own files: the facts about each, in one file of the job's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.storage.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

_FILE = "registry.json"


class RegistryFile:
    """Reads and writes the registry; ``storage`` is the private directory that it lies in, with the copies."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.storage = LocalStorage(directory, private=True)

    def lock(self) -> AbstractContextManager[object]:
        """Hold the lock under which one process at a time reads, changes and writes."""
        return self.storage.lock()

    def read(self) -> dict[str, Any]:
        """Return the registered files; an empty registry where there is none, or it is unreadable."""
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
        self.storage.replace(_FILE, json.dumps(registry).encode())
        self.storage.keep_spare()
