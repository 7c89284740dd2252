"""Choice of the file, among a job's own, from which an attempt resumes.

Restores torn files from their copies. Marks in the registry those that were changed since they were registered, and
adds notes for the user.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.external import file_facts
from orchestrator.checkpoint.external.file_facts import damage, facts_of
from orchestrator.checkpoint.external.overwritten_files import is_torn
from orchestrator.checkpoint.external.registry import existing
from orchestrator.checkpoint.storage.info import CheckpointStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.checkpoint.external.overwritten_files import OverwrittenFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note about a job's own files; ``code`` is the kind of event."""

    code: str
    message: str


class ResumeChoice:
    """Choice of one attempt, with its problems and notes. The caller holds the registry's lock and writes the registry."""

    def __init__(self, registry: dict[str, Any], copies: OverwrittenFiles, *, attempt: int) -> None:
        self._registry = registry
        self._copies = copies
        self._attempt = attempt
        self.problems: list[str] = []
        """Registered files that were changed, or could not be restored, each with the reason."""
        self.notes: list[Note] = []

    def make(self) -> str | None:
        """Return the path of the newest unchanged file; None when there is none. Restores older files, too."""
        chosen = self._newest_unchanged()
        self._put_all_back()
        return chosen

    def note_unused(self, matches: Sequence[str]) -> None:
        """Add a note that the job has files of its own (of ``matches``), and begins without one."""
        adopted, removing = self._registry["adopted"], self._registry["removing"]
        own = [p for p in matches if adopted.get(p) != file_facts.text(facts_of(p)) and p not in removing]
        if own:
            others = f" and {len(own) - 1} more" if len(own) > 1 else ""
            self._note(
                "checkpoint_unused",
                f"attempt {self._attempt} begins without any of the job's own checkpoints: {own[0]}{others} could not be"
                " shown to be whole when the attempt before ended",
            )

    def _newest_unchanged(self) -> str | None:
        for info in existing(self._registry, self._copies):
            entry = self._registry["known"][info.path]
            if info.status is not CheckpointStatus.COMPLETE:
                continue
            why = damage(info.path, entry["files"])
            if not why:
                return info.path
            if self._copies.is_good(entry):
                return self._restored(info.path, why)
            if entry.get("older"):  # it was overwritten before it had a copy
                self._registry["known"][info.path] = entry["older"]
                return self._newest_unchanged()
            entry["why"] = why
            self.problems.append(f"{info.path}: {why}")
        return None

    def _restored(self, path: str, why: str) -> str:
        """Return the path of the copy: restored to the file's place, unless the present file may be complete, too."""
        entry = self._registry["known"][path]
        which = f"the copy of step {entry['step']}" if entry["step"] else "its newest copy"
        if is_torn(path) and self._put_back(path):
            self._note(
                "checkpoint_restored",
                f"attempt {self._attempt}: {path} was not whole after its writer's end; {which} was restored",
            )
            return path
        self._note("checkpoint_copy_used", f"attempt {self._attempt}: {path}: {why}; {which} is used instead")
        return str(self._copies.path(entry))

    def _put_all_back(self) -> None:
        """Restore older files too: a script may read files other than the newest."""
        for path, entry in self._registry["known"].items():
            if entry.get("copy") and os.path.lexists(path) and is_torn(path) and self._copies.is_good(entry):
                self._put_back(path)

    def _put_back(self, path: str) -> bool:
        try:
            self._copies.put_back(path, self._registry)
        except OSError as error:
            self.problems.append(f"{path}: its copy could not be restored: {error.strerror or error}")
            return False
        return True

    def _note(self, code: str, message: str) -> None:
        self.notes.append(Note(code=code, message=message))
