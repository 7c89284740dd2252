"""The assignment file: which process runs on which simulated GPU; the daemon writes it, the simulation reads it.

The file is JSON: `{"version": 1, "gpus": {"0": [4711], "1": [4712, 4713]}}`, simulated GPU number to process ids. It is
replaced atomically by a rename, so a reader sees either the old state or the new one. A missing file means that nothing
runs yet. One process writes it; any number read it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.reader import GpuReadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT_VERSION: Final = 1
FILE_NAME: Final = "simulated-gpus.json"
"""The file's name in the state directory of a daemon or a node's agent."""


def write_assignments(path: Path, pids_by_gpu: Mapping[int, Iterable[int]]) -> None:
    """Replace the file at `path` by this assignment: simulated GPU number to the process ids that run on it."""
    document = {
        "version": FORMAT_VERSION,
        "gpus": {str(index): sorted(pids) for index, pids in sorted(pids_by_gpu.items())},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


class SimulatedAssignments:
    """Reads an assignment file, again only when it has been replaced."""

    def __init__(self, path: Path) -> None:
        """Follow the file at `path`, which need not exist yet."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._pids: dict[int, tuple[int, ...]] = {}

    def pids(self, index: int) -> tuple[int, ...]:
        """Return the processes on simulated GPU `index`. Raises GpuReadError for an invalid file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._pids = None, {}
            return ()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._pids = self._load()
            self._stamp = stamp
        return self._pids.get(index, ())

    def _load(self) -> dict[int, tuple[int, ...]]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["version"] != FORMAT_VERSION:
                raise GpuReadError(
                    f"{self._path} is an assignment of version {document['version']}; this program reads version"
                    f" {FORMAT_VERSION}. Restart the daemon so that both are of one release."
                )
            return {int(index): tuple(int(pid) for pid in pids) for index, pids in document["gpus"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GpuReadError(
                f"{self._path} does not say which process runs on which simulated GPU ({error}). Delete it and restart"
                " the daemon, which writes it again."
            ) from error
