"""Deletes old files of a script: registered ones, never the newest valid one.

A deletion is in the registry before it begins, so that one that was interrupted is completed later.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.external import file_facts
from orchestrator.checkpoint.external.file_facts import damage
from orchestrator.checkpoint.external.registry import existing
from orchestrator.checkpoint.storage.info import CheckpointStatus

if TYPE_CHECKING:
    from orchestrator.checkpoint.external.overwritten_files import OverwrittenFiles
    from orchestrator.checkpoint.external.registry import RegistryFile
    from orchestrator.checkpoint.external.watched_glob import WatchedGlob


class FileRetention:
    """Deletes all but the ``keep`` newest checkpoints (None: keeps all). The caller holds the registry's lock."""

    def __init__(self, keep: int | None, file: RegistryFile, copies: OverwrittenFiles, glob: WatchedGlob) -> None:
        self._keep = keep
        self._file = file
        self._copies = copies
        self._glob = glob

    def apply(self, registry: dict[str, Any]) -> list[str]:
        """Delete checkpoints beyond the ``keep`` newest; return their paths. Delete none unless the newest verifies."""
        self._finish_removals(registry)
        good = [info for info in existing(registry, self._copies) if info.status is CheckpointStatus.COMPLETE]
        if self._keep is None or len(good) <= self._keep:
            return []
        if damage(good[0].path, registry["known"][good[0].path]["files"]):
            return []
        doomed = [info.path for info in good[self._keep :]]
        registry["removing"] = [*registry["removing"], *doomed]
        for path in doomed:
            del registry["known"][path]
        self._file.write(registry)
        self._finish_removals(registry)
        self._copies.clear(registry)
        return doomed

    def _finish_removals(self, registry: dict[str, Any]) -> None:
        for path in list(registry["removing"]):
            if path in self._glob.matches() or not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    file_facts.delete(path)
            if not os.path.lexists(path):
                registry["removing"].remove(path)
                self._file.write(registry)
