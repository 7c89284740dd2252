"""Copies of a job's files that each save overwrites: taken of complete files, restored in place of torn ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external import file_copies, file_facts, file_formats
from orchestrator.checkpoint.external.file_facts import digests, facts_of
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.external.file_facts import Facts
    from orchestrator.checkpoint.storage.storage import LocalStorage

_SURE_REPLACEMENTS = 2  # replacements by new files, in a row, after which a script counts as always replacing
_FOLDER = "copies"


class OverwrittenFiles:
    """Keeps copies in ``storage``, beside the registry. ``entry`` is a file's registry entry."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self.failure = ""
        """Reason why the newest complete file has no copy; empty when it has one, or needs none."""

    def take(self, path: str, facts: Facts, registry: dict[str, Any], *, most_bytes: int | None = None) -> str | None:
        """Copy the file; return the copy's name below the registry, empty if copying fails, None if the file changed.

        A file of more than ``most_bytes`` is copied only where the file system can share its blocks.
        """
        inode = os.lstat(path).st_ino
        known, replaced = registry["inodes"].get(path, (inode, 0))
        replaced = replaced + 1 if inode != known else 0
        folder = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
        name = f"{_FOLDER}/{folder}-{facts[''][1]}/{Path(path).name}"
        target = self._storage.root / name
        try:
            for directory in (target.parents[1], target.parent):  # the rank actor has the job's umask
                make_private(directory)
            file_copies.take(path, target, link=replaced >= _SURE_REPLACEMENTS, most_bytes=most_bytes)
        except OSError as error:
            self.failure = f"{path} has no copy while it is overwritten: {error.strerror or error}"
            return ""
        self.failure = ""
        registry["inodes"][path] = [inode, replaced]
        if facts_of(path) == facts:
            file_formats.check(str(target))
            return name
        file_facts.delete(str(target.parent))
        return None

    def path(self, entry: Mapping[str, Any]) -> Path:
        """Return the path of the entry's copy."""
        return self._storage.root / str(entry["copy"])

    def is_good(self, entry: Mapping[str, Any]) -> bool:
        """Whether there is a copy with the registered content."""
        if not entry.get("copy"):
            return False
        try:
            return digests(str(self.path(entry)), [""]) == {"": list(entry["files"][""])}
        except OSError:
            return False

    def put_back(self, path: str, registry: dict[str, Any]) -> None:
        """Restore the copy to the file's place. Raises OSError."""
        entry = registry["known"][path]
        file_copies.put_back(self.path(entry), path)
        entry["facts"] = file_facts.text(facts_of(path))
        registry["foreign"].pop(path, None)
        with contextlib.suppress(OSError):  # this new file is orch's, and is no evidence of how the script writes
            registry["inodes"][path] = [os.lstat(path).st_ino, 0]

    def clear(self, registry: Mapping[str, Any]) -> None:
        """Remove the copies that no entry names. A later call retries failed removals."""
        kept = [older for entry in registry["known"].values() for older in (entry, entry.get("older") or {})]
        named = {entry.get("copy", "").rpartition("/")[0] for entry in kept}
        for name in self._storage.names(_FOLDER):
            if f"{_FOLDER}/{name}" not in named:
                with contextlib.suppress(OSError):
                    file_facts.delete(str(self._storage.root / _FOLDER / name))


def is_torn(path: str) -> bool:
    """Whether the file is missing, or its format proves it incomplete."""
    try:
        file_formats.check(path)
    except (FileNotFoundError, CorruptCheckpointError):
        return True
    except OSError:
        return False
    return False
