"""Checkpoints that a script writes by itself: found by a glob, registered with digests, verified, retained.

A script's own files have no manifest and are written gradually, so two questions need care. *Is it complete?* It is
when files of verifiable formats (safetensors, JSON, torch's zip) are complete, nothing in it has changed for a while,
and it has the files that the previous one had. A single file of such a format counts at once. Files that were still
changing when their writer was killed, and whose format cannot prove them complete, never count. *Is it unchanged?*
Sizes and SHA-256 of every file are recorded at registration.

A file with a fixed name is overwritten by the next save, often in place. A copy of each complete one is kept beside the
registry (file_copies.py), and restored where a killed writer has left a torn file. Otherwise the script's files are
never renamed or marked: the facts about them are in the job's registry.

Links are neither followed nor counted, and only retention deletes files: registered ones, never the newest valid one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external import file_facts, file_formats
from orchestrator.checkpoint.external.file_facts import changed_at, damage, digests, facts_of, member
from orchestrator.checkpoint.external.overwritten_files import OverwrittenFiles, is_torn
from orchestrator.checkpoint.external.registry import RegistryFile
from orchestrator.checkpoint.external.watched_glob import WatchedGlob
from orchestrator.checkpoint.storage.info import CheckpointInfo, CheckpointStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.checkpoint.external.file_facts import Facts
    from orchestrator.checkpoint.external.watched_glob import WatchSettings

SETTLE_SECONDS = 2.0  # without a change before something counts as written
QUIET_SECONDS = 0.02  # before a copy is begun: two ticks of the file systems' clock
_FEWER_FILES_SECONDS = 20.0  # until one with fewer files than the previous one counts

StepAt = Callable[[float], "int | None"]
"""The step that the script had reported at a time (seconds since the epoch); None where it reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note about a job's own files; ``code`` is the kind of event."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """The parameters of one scan."""

    attempt: int
    gone_at: float | None
    ended_well: bool
    step_at: StepAt | None


class ExternalCheckpoints:
    """The checkpoints under one glob. Blocking; several processes may each have an instance, and a lock serialises them."""

    def __init__(self, settings: WatchSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keep = settings.keep
        self._glob = WatchedGlob(settings)
        self._registry = RegistryFile(settings.registry)
        self._copies = OverwrittenFiles(self._registry.storage)
        self._seen: dict[str, tuple[Facts, float]] = {}
        self.problems: list[str] = []
        self.notes: list[Note] = []
        """Notes about files that are incomplete, or that none is used."""
        self.is_waiting = False
        """Whether a file that needs a copy is being written."""

    @property
    def has_fixed_name(self) -> bool:
        """Whether each save overwrites the previous one, as far as the glob shows."""
        return self._glob.has_fixed_name

    @property
    def copy_failure(self) -> str:
        """Why the newest complete file has no copy; empty when it has one, or needs none."""
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
        writer_gone_at: float | None = None,
        ended_well: bool = False,
        step_at: StepAt | None = None,
    ) -> list[CheckpointInfo]:
        """Register what has become complete; return the new ones, oldest first.

        ``writer_gone_at`` (seconds since the epoch): when the writer ended; ``ended_well``: it finished. ``step_at``
        gives the step of a file whose name does not contain it.
        """
        look = _Scan(attempt=attempt, gone_at=writer_gone_at, ended_well=ended_well, step_at=step_at)
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
                fresh.append(_info(path, entry))
            elif look.gone_at is not None:  # it stays incomplete, and must not look settled to the next attempt
                registry["foreign"][path] = file_facts.text(facts)
            else:
                self.is_waiting = self.is_waiting or self._is_overwritten(path, facts, registry)
        if look.gone_at is None:
            self._copy_what_has_none(registry)
        return fresh

    def newest_good(self, *, attempt: int) -> str | None:
        """Return the newest unchanged one, the same for every call of one attempt; None when there is none.

        Each changed one is marked in the registry, with a note in ``problems``. Where only a copy is left, it is restored.
        """
        with self._registry.lock():
            registry = self._registry.read()
            chosen: dict[str, str | None] = registry["chosen"]
            if str(attempt) not in chosen:
                chosen[str(attempt)] = self._choose(registry, attempt)
                self._put_others_back(registry)
                if chosen[str(attempt)] is None:
                    self._note_unused(registry, attempt)
                self._registry.write(registry)
            return chosen[str(attempt)]

    def _choose(self, registry: dict[str, Any], attempt: int) -> str | None:
        for info in self._infos(registry):
            entry = registry["known"][info.path]
            if info.status is not CheckpointStatus.COMPLETE:
                continue
            why = damage(info.path, entry["files"])
            if not why:
                return info.path
            if self._copies.is_good(entry):
                return self._restored(info.path, registry, why, attempt)
            entry["why"] = why
            self.problems.append(f"{info.path}: {why}")
        return None

    def newest_info(self) -> CheckpointInfo | None:
        """Return the newest that is registered as valid."""
        return next((info for info in self.infos() if info.status is CheckpointStatus.COMPLETE), None)

    def infos(self) -> list[CheckpointInfo]:
        """Return everything registered that still exists, newest first. Reads no content."""
        return self._infos(self._registry.read())

    def verify(self, info: CheckpointInfo) -> CheckpointInfo:
        """Compare every byte with the registered digests; return the entry with its status. Changes nothing.

        For one that its script has begun to overwrite, the copy counts, and the path is the copy's.
        """
        entry = self._registry.read()["known"].get(info.path)
        if entry is None:
            return info
        why = entry["why"] or damage(info.path, entry["files"])
        if why and not entry["why"] and self._copies.is_good(entry):
            return dataclasses.replace(_info(info.path, entry), path=str(self._copies.path(entry)))
        return _info(info.path, {**entry, "why": why})

    def retain(self) -> list[str]:
        """Delete what is older than the ``keep`` newest valid ones; return what was deleted.

        Nothing is deleted unless the newest remaining one verifies.
        """
        with self._registry.lock():
            registry = self._registry.read()
            self._finish_removals(registry)
            keep = self._keep
            good = [info for info in self._infos(registry) if info.status is CheckpointStatus.COMPLETE]
            if keep is None or len(good) <= keep or damage(good[0].path, registry["known"][good[0].path]["files"]):
                return []
            doomed = [info.path for info in good[keep:]]
            registry["removing"] = [*registry["removing"], *doomed]
            for path in doomed:
                del registry["known"][path]
            self._registry.write(registry)
            self._finish_removals(registry)
            self._copies.clear(registry)
        return doomed

    # -- finding

    def _unregistered(self, registry: Mapping[str, Any]) -> Iterator[str]:
        """Return matches that are new, or were written again since they were registered; of those only copies still count."""
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
                yield path

    def _is_overwritten(self, path: str, facts: Facts, registry: Mapping[str, Any]) -> bool:
        """Whether the next save overwrites the same file: its name has no number, or an overwrite was seen."""
        if facts.keys() != {""}:
            return False
        return self.has_fixed_name or path in registry["rewritten"] or not re.search(r"\d", Path(path).name)

    # -- registering

    def _register(self, path: str, facts: Facts, registry: dict[str, Any], look: _Scan) -> dict[str, Any] | None:
        """Return the registry's entry; None when it is incomplete, or changed while it was read."""
        overwritten = self._is_overwritten(path, facts, registry)
        try:
            proofs = [file_formats.check(member(path, name)) for name in facts]
            if not self._is_settled(path, facts, look, quick=proofs == [True] and "" in facts, copied=overwritten):
                return None
            if not look.ended_well and self._lacks_files(path, facts, registry):
                return None
            copy = self._copies.take(path, facts, registry) if overwritten and look.gone_at is None else ""
            if copy is None:
                return None
            files = digests(str(self._registry.storage.root / copy), facts) if copy else digests(path, facts)
        except (OSError, CorruptCheckpointError):
            return None  # checked again later; while it stays so, it does not count
        if not copy and facts_of(path) != facts:
            return None
        return {
            "facts": file_facts.text(facts),
            "files": files,
            "created_at": changed_at(path, facts),
            "attempt": look.attempt,
            "step": self._step(path, facts, look, overwritten=overwritten),
            "why": "",
            "copy": copy,
        }

    def _is_settled(self, path: str, facts: Facts, look: _Scan, *, quick: bool, copied: bool) -> bool:
        """``quick``: a single file that its format proves complete; ``copied``: it is copied before it can change."""
        if look.ended_well:
            return True
        at = changed_at(path, facts)
        if look.gone_at is not None:
            return quick or at <= look.gone_at - SETTLE_SECONDS
        now = self._clock()
        before, since = self._seen.get(path, (None, now))
        if before != facts:
            since = now
        self._seen[path] = facts, since
        if quick and copied:
            return before == facts or now - at >= QUIET_SECONDS
        # The file's time may be from a file server, whose clock may be ahead of this node's.
        return before == facts and now - min(at, since) >= SETTLE_SECONDS

    def _lacks_files(self, path: str, facts: Facts, registry: Mapping[str, Any]) -> bool:
        """Whether files are missing that the newest registered one has, and that may still be written."""
        others = [info for info in self._infos(registry) if info.status is CheckpointStatus.COMPLETE]
        if not others or self._clock() - changed_at(path, facts) >= _FEWER_FILES_SECONDS:
            return False
        kinds = {file_facts.kind(name) for name in facts}
        return any(file_facts.kind(name) not in kinds for name in registry["known"][others[0].path]["files"])

    def _step(self, path: str, facts: Facts, look: _Scan, *, overwritten: bool) -> int:
        """Return the last number in the name, as in ``ckpt-120``; for a fixed name, the step reported at the time of saving."""
        numbers = re.findall(r"\d+", Path(path).name)
        if numbers and not (overwritten or self.has_fixed_name):
            return int(numbers[-1])
        reported = None if look.step_at is None else look.step_at(changed_at(path, facts))
        return reported or 0

    # -- copies of files that are overwritten

    def _copy_what_has_none(self, registry: dict[str, Any]) -> None:
        """Copy files that were registered after their writer's death, when there was no time for a copy."""
        for path, entry in registry["known"].items():
            facts = facts_of(path)
            if entry.get("copy") or entry["why"] or file_facts.text(facts) != entry["facts"]:
                continue
            if self._is_overwritten(path, facts, registry):
                with contextlib.suppress(OSError, CorruptCheckpointError):
                    entry["copy"] = self._copies.take(path, facts, registry) or ""

    def _restored(self, path: str, registry: dict[str, Any], why: str, attempt: int) -> str:
        """Return where the file's copy is readable: in the file's place, unless the present file may be complete, too."""
        entry = registry["known"][path]
        which = f"the copy of step {entry['step']}" if entry["step"] else "its newest copy"
        if is_torn(path) and self._put_back(path, registry):
            message = f"attempt {attempt}: {path} was not whole after its writer's end; {which} was put back"
            self.notes.append(Note(code="checkpoint_restored", message=message))
            return path
        message = f"attempt {attempt}: {path}: {why}; {which} is used instead"
        self.notes.append(Note(code="checkpoint_copy_used", message=message))
        return str(self._copies.path(entry))

    def _put_others_back(self, registry: dict[str, Any]) -> None:
        """Restore older files too: a script may read others than the newest."""
        for path, entry in registry["known"].items():
            if entry.get("copy") and os.path.lexists(path) and is_torn(path) and self._copies.is_good(entry):
                self._put_back(path, registry)

    def _put_back(self, path: str, registry: dict[str, Any]) -> bool:
        try:
            self._copies.put_back(path, registry)
        except OSError as error:
            self.problems.append(f"{path}: its copy could not be put back: {error.strerror or error}")
            return False
        return True

    def _note_unused(self, registry: Mapping[str, Any], attempt: int) -> None:
        """Add a note that the job has files of its own, and begins without one."""
        own = [
            path
            for path in self._glob.matches()
            if registry["adopted"].get(path) != file_facts.text(facts_of(path)) and path not in registry["removing"]
        ]
        if own:
            others = f" and {len(own) - 1} more" if len(own) > 1 else ""
            message = (
                f"attempt {attempt} begins without any of the job's own checkpoints: {own[0]}{others} could not be shown to be"
                " whole when the attempt before ended"
            )
            self.notes.append(Note(code="checkpoint_unused", message=message))

    def _infos(self, registry: Mapping[str, Any]) -> list[CheckpointInfo]:
        infos = [
            _info(path, entry)
            for path, entry in registry["known"].items()
            if os.path.lexists(path) or (entry.get("copy") and self._copies.path(entry).exists())
        ]
        # A newer attempt first: it may run on another node, by whose clock its files look older.
        return sorted(infos, key=lambda info: (info.attempt, info.created_at or 0.0, info.step), reverse=True)

    def _finish_removals(self, registry: dict[str, Any]) -> None:
        for path in list(registry["removing"]):
            if path in self._glob.matches() or not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    file_facts.delete(path)
            if not os.path.lexists(path):
                registry["removing"].remove(path)
                self._registry.write(registry)


def _info(path: str, entry: Mapping[str, Any]) -> CheckpointInfo:
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
