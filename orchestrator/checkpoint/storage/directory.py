"""A checkpoint directory as a whole: lists, verifies, quarantines damaged checkpoints, removes what is not kept."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.storage.info import (
    CheckpointInfo,
    CheckpointStatus,
    Retention,
    removable,
    removable_broken,
)
from orchestrator.checkpoint.storage.reader import CheckpointReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.checkpoint.storage.storage import Storage

_LISTING_RETRIES = 20  # retries for a directory that changes during a listing
_MOST_BROKEN = 1000  # of one name


class CheckpointDirectory:
    """The entries of one storage. ``quarantined`` collects a sentence for each damaged checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.quarantined: list[str] = []

    def candidates(self) -> Iterator[str]:
        """Yield committed names, newest first, listed again after each: other processes may prune or quarantine meanwhile."""
        tried: set[str] = set()
        for _ in range(_LISTING_RETRIES + len(self.storage.names())):
            found = (layout.parse_name(name) for name in self.storage.names())
            fresh = sorted(version for version in found if version is not None and version.name not in tried)
            if not fresh:
                return
            tried.add(fresh[-1].name)
            yield fresh[-1].name

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """List all checkpoints, newest first: complete, broken (and why), incomplete. Reads manifests only."""
        infos = [info for name in self.storage.names() if (info := self._describe(name)) is not None]
        return tuple(sorted(infos, key=lambda info: (info.order, info.name), reverse=True))

    def verified(self, info: CheckpointInfo) -> CheckpointInfo:
        """Read a checkpoint completely; return its entry with the present status. Changes nothing."""
        if info.status is not CheckpointStatus.COMPLETE:
            return info
        reader = CheckpointReader(self.storage, info.name)
        try:
            known = reader.manifest()
            reader.verify(known)
        except CorruptCheckpointError as error:
            version = Version(attempt=info.attempt, step=info.step)
            return self._broken(info.name, version, CheckpointStatus.BROKEN, str(error))
        return reader.info(known)

    def quarantine(self, name: str, why: str) -> None:
        """Rename a damaged checkpoint to ``*.broken``, with a note of the reason. Never raises for storage errors."""
        with contextlib.suppress(OSError):  # read-only storage is still read
            if name not in self.storage.names():
                return  # pruned, or quarantined by another rank
            note = json.dumps({"checkpoint": name, "why": why, "at": time.time()})
            with contextlib.suppress(OSError):
                self.storage.write(f"{name}/{layout.QUARANTINE_NOTE}", [note.encode()])
            self._set_aside(name)
        self.quarantined.append(f"{name}: {why}")

    def retain(self, retention: Retention) -> tuple[str, ...]:
        """Remove the complete checkpoints that are not kept, and old broken ones; return the names of the complete ones."""
        infos = self.infos()
        gone = removable(infos, retention)
        kept = [info for info in infos if info.status is CheckpointStatus.COMPLETE and info not in gone]
        if gone and len(kept) == 1 and self.verified(kept[0]).status is not CheckpointStatus.COMPLETE:
            gone = ()  # the seemingly last valid one is damaged: keep the others
        for info in (*gone, *removable_broken(infos)):
            self.storage.discard(info.name)
        return tuple(info.name for info in gone)

    def clean(self, before: Version, token: str) -> None:
        """Remove what ended runs left: staging directories, agreements, half-deleted trees.

        Staging directories are removed when they are older than ``before``, or of its attempt but of another run.
        """
        for name in self.storage.names():
            if self._is_leftover(name, before, token):
                with contextlib.suppress(OSError):
                    self.storage.remove(name)

    def _is_leftover(self, name: str, before: Version, token: str) -> bool:
        staged = layout.parse_staging(name)
        if staged is not None:
            version, run = staged
            return version < before or (version.attempt == before.attempt and run != token)
        if layout.is_ticket(name):
            return not name.startswith(layout.ticket_prefix(before.attempt, token))
        return layout.is_removing(name)

    def _set_aside(self, name: str) -> None:
        for number in range(1, _MOST_BROKEN):
            try:
                self.storage.rename(name, layout.broken_name(name, number))
            except FileExistsError:
                continue
            return

    def _describe(self, name: str) -> CheckpointInfo | None:
        version = layout.parse_name(name)
        if version is not None:
            reader = CheckpointReader(self.storage, name)
            try:
                return reader.info(reader.manifest())
            except CorruptCheckpointError as error:
                return self._broken(name, version, CheckpointStatus.BROKEN, str(error))
        version = layout.parse_broken(name)
        if version is not None:
            return self._broken(name, version, CheckpointStatus.BROKEN, self._note(name))
        staged = layout.parse_staging(name)
        if staged is not None:
            return self._broken(name, staged[0], CheckpointStatus.INCOMPLETE, self._progress(name))
        return None

    def _broken(self, name: str, version: Version, status: CheckpointStatus, why: str) -> CheckpointInfo:
        return CheckpointInfo(
            name=name,
            path=self.storage.location(name),
            step=version.step,
            attempt=version.attempt,
            status=status,
            why=why,
        )

    def _note(self, name: str) -> str:
        try:
            return str(json.loads(bytes(self.storage.read(f"{name}/{layout.QUARANTINE_NOTE}")))["why"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "set aside; the note with the reason is missing"

    def _progress(self, name: str) -> str:
        done = sum(1 for entry in self.storage.names(name) if layout.is_done_marker(entry))
        return "being written, or its writer died" + (f"; {done} ranks had finished" if done else "")
