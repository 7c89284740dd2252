"""Checkpoints that a script writes by itself: found by a glob, registered with digests, verified, retained.

A script's own files have no manifest and are written gradually, so two questions need care. *Is it complete?* It is
when files of verifiable formats (safetensors, JSON, torch's zip) are complete, nothing in it has changed for a while,
and it has the files that the previous one had (completeness.py). A single file of such a format counts at once. Files
that were still changing when their writer was killed, and whose format cannot prove them complete, never count. *Is it
unchanged?* Sizes and SHA-256 of every file are recorded at registration, and checked before an attempt resumes from it
(resume_choice.py).

A file with a fixed name is overwritten by the next save, often in place. A copy of each complete one is kept beside the
registry (file_copies.py), and restored where a killed writer has left a torn file. The copy of the one before stays, as
``older`` in the registry, until the newer one has a copy; and every attempt begins with a copy. Otherwise the script's
files are never renamed or marked: the facts about them are in the job's registry.

Links are neither followed nor counted, and only retention deletes files (file_retention.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external import file_facts
from orchestrator.checkpoint.external.completeness import CompletenessCheck, Writer
from orchestrator.checkpoint.external.file_facts import changed_at, damage, digests, facts_of
from orchestrator.checkpoint.external.file_retention import FileRetention
from orchestrator.checkpoint.external.overwritten_files import OverwrittenFiles
from orchestrator.checkpoint.external.registry import RegistryFile, existing, info_of
from orchestrator.checkpoint.external.resume_choice import ResumeChoice
from orchestrator.checkpoint.external.watched_glob import WatchedGlob
from orchestrator.checkpoint.storage.info import CheckpointStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from orchestrator.checkpoint.external.file_facts import Facts
    from orchestrator.checkpoint.external.resume_choice import Note
    from orchestrator.checkpoint.external.watched_glob import WatchSettings
    from orchestrator.checkpoint.storage.info import CheckpointInfo

LARGE_BYTES = 1 << 30
"""A file of this size that has an older copy is copied while the next attempt runs, which would wait some seconds for it."""

StepAt = Callable[[float], "int | None"]
"""The step that the script had reported at a time (seconds since the epoch); None where it reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """The parameters of one scan."""

    attempt: int
    writer: Writer
    step_at: StepAt | None

    def step_of(self, path: str, facts: Facts, *, has_fixed_name: bool) -> int:
        """Return the last number in the name, as in ``ckpt-120``; for a fixed name, the step reported at the time of saving."""
        numbers = re.findall(r"\d+", Path(path).name)
        if numbers and not has_fixed_name:
            return int(numbers[-1])
        reported = None if self.step_at is None else self.step_at(changed_at(path, facts))
        return reported or 0


class ExternalCheckpoints:
    """The checkpoints under one glob. Blocking; several processes may each have an instance, and a lock serialises them."""

    def __init__(self, settings: WatchSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._glob = WatchedGlob(settings)
        self._registry = RegistryFile(settings.registry)
        self._copies = OverwrittenFiles(self._registry.storage)
        self._completeness = CompletenessCheck(clock)
        self._retention = FileRetention(settings.keep, self._registry, self._copies, self._glob)
        self.problems: list[str] = []
        self.notes: list[Note] = []
        """Notes that a copy was restored or used, or that no file is used."""
        self.is_waiting = False
        """Whether a file that needs a copy is being written."""

    @property
    def has_fixed_name(self) -> bool:
        """Whether each save overwrites the previous one, as far as the glob shows."""
        return self._glob.has_fixed_name

    @property
    def copy_failure(self) -> str:
        """Reason why the newest complete file has no copy; empty when it has one, or needs none."""
        return self._copies.failure

    def adopt_none(self) -> None:
        """Exclude the existing files: they are older than the job and count only when written again."""
        with self._registry.lock():
            registry = self._registry.read()
            registry["foreign"] = {path: file_facts.text(facts_of(path)) for path in self._glob.matches()}
            registry["adopted"] = dict(registry["foreign"])
            self._registry.write(registry)

    def scan(
        self,
        *,
        attempt: int,
        writer_ended: bool = False,
        ended_well: bool = False,
        step_at: StepAt | None = None,
    ) -> list[CheckpointInfo]:
        """Register the checkpoints that have become complete; return the new ones, oldest first.

        ``writer_ended``: the script does not run any more; ``ended_well``: it finished. ``step_at`` gives the step of a
        file whose name does not contain it.
        """
        writer = Writer(ended=writer_ended, well=ended_well)
        look = _Scan(attempt=attempt, writer=writer, step_at=step_at)
        with self._registry.lock():
            registry = self._registry.read()
            before = json.dumps(registry)
            fresh = self._scan(registry, look)
            if json.dumps(registry) != before:
                self._registry.write(registry)
            self._copies.clear(registry)
        return sorted(fresh, key=lambda info: info.created_at or 0.0)

    def _scan(self, registry: dict[str, Any], look: _Scan) -> list[CheckpointInfo]:
        fresh, self.is_waiting = [], False
        for path in self._unregistered(registry):
            facts = facts_of(path)
            entry = self._register(path, facts, registry, look) if facts else None
            if entry is not None:
                registry["known"][path] = entry
                fresh.append(info_of(path, entry))
            elif look.writer.ended:  # it stays incomplete, and must not look settled to the next attempt
                registry["foreign"][path] = file_facts.text(facts)
            else:
                self.is_waiting = self.is_waiting or self._is_overwritten(path, facts, registry)
        if not look.writer.ended:
            self._copy_what_has_none(registry)
        return fresh

    def newest_good(self, *, attempt: int) -> str | None:
        """Return the path of the newest unchanged checkpoint, the same in every call of one attempt; None without any.

        Each changed one is marked in the registry, with a note in ``problems``. Where only a copy is left, it is restored.
        What the attempt may overwrite has a copy on return: its own, or that of the one before.
        """
        with self._registry.lock():
            registry = self._registry.read()
            chosen: dict[str, str | None] = registry["chosen"]
            if str(attempt) not in chosen:
                choice = ResumeChoice(registry, self._copies, attempt=attempt)
                chosen[str(attempt)] = choice.make()
                if chosen[str(attempt)] is None:
                    choice.note_unused(self._glob.matches())
                self.problems += choice.problems
                self.notes += choice.notes
                self._copy_what_has_none(registry, large=False)
                self._registry.write(registry)
                self._copies.clear(registry)
            return chosen[str(attempt)]

    def newest_info(self) -> CheckpointInfo | None:
        """Return the newest checkpoint that is registered as valid; None when there is none."""
        return next((info for info in self.infos() if info.status is CheckpointStatus.COMPLETE), None)

    def infos(self) -> list[CheckpointInfo]:
        """Return every registered checkpoint that still exists, newest first. Reads no content."""
        return existing(self._registry.read(), self._copies)

    def verify(self, info: CheckpointInfo) -> CheckpointInfo:
        """Compare every byte with the registered digests; return the entry with its status. Changes nothing.

        For a file that its script has begun to overwrite, the copy is verified, and the path is the copy's.
        """
        entry = self._registry.read()["known"].get(info.path)
        if entry is None:
            return info
        why = entry["why"] or damage(info.path, entry["files"])
        if why and not entry["why"] and self._copies.is_good(entry):
            return dataclasses.replace(info_of(info.path, entry), path=str(self._copies.path(entry)))
        return info_of(info.path, {**entry, "why": why})

    def retain(self) -> list[str]:
        """Delete the checkpoints older than the ``keep`` newest valid ones; return the paths of the deleted ones.

        Nothing is deleted unless the newest remaining one verifies.
        """
        with self._registry.lock():
            return self._retention.apply(self._registry.read())

    # -- finding

    def _unregistered(self, registry: Mapping[str, Any]) -> Iterator[str]:
        """Yield matches that are new, or rewritten since registration; these stay registered only with a copy."""
        for path in self._glob.matches():
            text = file_facts.text(facts_of(path))
            if path in registry["removing"] or registry["foreign"].get(path) == text:
                continue
            entry = registry["known"].get(path)
            if entry is None or text != entry["facts"]:
                if entry is not None:
                    registry["rewritten"][path] = True
                    if not entry.get("copy"):
                        del registry["known"][path]
                    if entry.get("older"):
                        registry["known"][path] = entry["older"]
                yield path

    def _is_overwritten(self, path: str, facts: Facts, registry: Mapping[str, Any]) -> bool:
        """Whether the next save overwrites the same file: its name has no number, or an overwrite was seen."""
        if facts.keys() != {""}:
            return False
        return self.has_fixed_name or path in registry["rewritten"] or not re.search(r"\d", Path(path).name)

    # -- registering

    def _register(self, path: str, facts: Facts, registry: dict[str, Any], look: _Scan) -> dict[str, Any] | None:
        """Return the checkpoint's registry entry; None when it is incomplete, or changed while it was read."""
        overwritten = self._is_overwritten(path, facts, registry)
        try:
            if not self._completeness.is_complete(
                path,
                facts,
                writer=look.writer,
                is_copied=overwritten,
                previous=lambda: self._files_of_newest(registry),
            ):
                return None
            # Of a writer that has ended, only what another attempt may overwrite needs a copy: see newest_good.
            copy = self._copies.take(path, facts, registry) if overwritten and not look.writer.ended else ""
            if copy is None:
                return None
            files = digests(str(self._registry.storage.root / copy), facts) if copy else digests(path, facts)
        except (OSError, CorruptCheckpointError):
            return None  # checked again later; while it stays so, it does not count
        if not copy and facts_of(path) != facts:
            return None
        before = registry["known"].get(path, {})
        older = before if before.get("copy") else before.get("older")
        return {
            "facts": file_facts.text(facts),
            "files": files,
            "created_at": changed_at(path, facts),
            "attempt": look.attempt,
            "step": look.step_of(path, facts, has_fixed_name=overwritten or self.has_fixed_name),
            "why": "",
            "copy": copy,
            "older": None if copy else older,
        }

    def _files_of_newest(self, registry: Mapping[str, Any]) -> Iterable[str]:
        newest = next((i for i in existing(registry, self._copies) if i.status is CheckpointStatus.COMPLETE), None)
        return () if newest is None else registry["known"][newest.path]["files"]

    # -- copies of files that are overwritten

    def _copy_what_has_none(self, registry: dict[str, Any], *, large: bool = True) -> None:
        """Copy files that were registered after their writer's end; not ``large`` ones, if an older copy protects them."""
        for path, entry in registry["known"].items():
            facts = facts_of(path)
            if entry.get("copy") or entry["why"] or file_facts.text(facts) != entry["facts"]:
                continue
            if self._is_overwritten(path, facts, registry):
                most = None if large or not entry.get("older") else LARGE_BYTES
                with contextlib.suppress(OSError, CorruptCheckpointError):
                    entry["copy"] = self._copies.take(path, facts, registry, most_bytes=most) or ""
                    entry["older"] = None if entry["copy"] else entry.get("older")
