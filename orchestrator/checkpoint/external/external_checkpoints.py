"""Checkpoints that a script writes by itself: found by a glob, registered with digests, verified, retained.

A script's own files have no manifest and appear bit by bit, so two questions have careful answers here. *Is it whole?*
When files of formats that can tell (safetensors, JSON, torch's zip) say yes, nothing in it has changed for a while, and it has
the files that the one before had. A single file of such a format counts at once. What was still changing when its writer was
killed, and cannot prove that it is whole, never counts. *Is it still what it was?* Sizes and SHA-256 of every file are noted
when it is registered.

A file whose name stays the same is overwritten by the next save, often in place. A copy of each whole one is kept beside the
registry (file_copies.py), and put back where a killed writer has left a torn file. Otherwise the script's files are never
renamed or marked: what is known about them lies in a registry of the job.

Links are neither followed nor counted, and only retention deletes: registered ones, never the newest good one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
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
from orchestrator.checkpoint.external import file_copies, file_facts, file_formats
from orchestrator.checkpoint.external.file_facts import changed_at, digests, facts_of, member
from orchestrator.checkpoint.storage.info import CheckpointInfo, CheckpointStatus
from orchestrator.checkpoint.storage.storage import LocalStorage
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.checkpoint.external.file_facts import Facts

SETTLE_SECONDS = 2.0  # without a change before something counts as written
QUIET_SECONDS = 0.02  # before a copy is begun: two ticks of the clock that file systems take times from
_FEWER_FILES_SECONDS = 20.0  # before one that lacks files of the one before counts all the same
_SURE_REPLACEMENTS = 2  # new files in the old one's place, in a row, before a script is trusted to write no other way
_REGISTRY = "registry.json"
_COPIES = "copies"

StepAt = Callable[[float], "int | None"]
"""The step that the script had reported at a time (seconds since the epoch); None where it reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What to watch: a glob (relative to ``directory`` unless absolute), where the registry is, how many to keep."""

    pattern: str
    directory: str
    registry: str
    keep: int | None = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something to tell about a job's own files; ``code`` says which kind of event."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """The circumstances of one scan."""

    attempt: int
    gone_at: float | None
    ended_well: bool
    step_at: StepAt | None


class ExternalCheckpoints:
    """The checkpoints under one glob. Blocking; several processes may have one each, and take turns by a lock."""

    def __init__(self, settings: WatchSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._settings = settings
        self._storage = LocalStorage(settings.registry, private=True)
        self._seen: dict[str, Facts] = {}
        self.problems: list[str] = []
        self.notes: list[Note] = []
        """What was done about files that are not whole, or that none is used."""
        self.copy_failure = ""
        """Why the newest whole file has no copy; empty when it has one, or needs none."""
        self.is_waiting = False
        """Whether a file that will have a copy is being written."""

    @property
    def has_fixed_name(self) -> bool:
        """Whether each save overwrites the one before, as far as the glob tells."""
        return not glob.has_magic(self._settings.pattern)

    def adopt_none(self) -> None:
        """What is there now was there before the job: it is no checkpoint of the job's unless it is written again."""
        with self._storage.lock():
            registry = self._read()
            registry["foreign"] = {path: file_facts.text(facts_of(path)) for path in self._matches()}
            registry["adopted"] = dict(registry["foreign"])
            self._write(registry)

    def scan(
        self,
        *,
        attempt: int,
        writer_gone_at: float | None = None,
        ended_well: bool = False,
        step_at: StepAt | None = None,
    ) -> list[CheckpointInfo]:
        """Register what has become whole; the new ones, oldest first.

        ``writer_gone_at`` (seconds since the epoch): nothing is written any more, since then; ``ended_well``: the writer
        finished. ``step_at`` gives the step of a file whose name does not.
        """
        look = _Scan(attempt=attempt, gone_at=writer_gone_at, ended_well=ended_well, step_at=step_at)
        with self._storage.lock():
            registry = self._read()
            before = json.dumps(registry)
            fresh = self._scan(registry, look)
            if json.dumps(registry) != before:
                self._write(registry)
            self._clear_copies(registry)
        return sorted(fresh, key=lambda info: info.created_at or 0.0)

    def _scan(self, registry: dict[str, Any], look: _Scan) -> list[CheckpointInfo]:
        fresh, self.is_waiting = [], False
        for path in self._unregistered(registry):
            facts = facts_of(path)
            entry = self._register(path, facts, registry, look) if facts else None
            if entry is not None:
                registry["known"][path] = entry
                fresh.append(_info(path, entry))
            elif look.gone_at is not None:  # it stays half-written, and must not look settled to the next attempt
                registry["foreign"][path] = file_facts.text(facts)
            else:
                self.is_waiting = self.is_waiting or self._is_overwritten(path, facts, registry)
        if look.gone_at is None:
            self._copy_what_has_none(registry)
        return fresh

    def newest_good(self, *, attempt: int) -> str | None:
        """The newest that still is what it was, the same for every call of one attempt; None when there is none.

        Each that is not is marked in the registry, and told of in ``problems``. Where only a copy is left, it is put back.
        """
        with self._storage.lock():
            registry = self._read()
            chosen: dict[str, str | None] = registry["chosen"]
            if str(attempt) not in chosen:
                chosen[str(attempt)] = self._choose(registry, attempt)
                self._put_others_back(registry)
                if chosen[str(attempt)] is None:
                    self._note_unused(registry, attempt)
                self._write(registry)
            return chosen[str(attempt)]

    def _choose(self, registry: dict[str, Any], attempt: int) -> str | None:
        for info in self._infos(registry):
            entry = registry["known"][info.path]
            if info.status is not CheckpointStatus.COMPLETE:
                continue
            why = self._damage(info.path, entry)
            if not why:
                return info.path
            if self._has_good_copy(entry):
                return self._restored(info.path, registry, why, attempt)
            entry["why"] = why
            self.problems.append(f"{info.path}: {why}")
        return None

    def newest_info(self) -> CheckpointInfo | None:
        """The newest that is registered as good."""
        return next((info for info in self.infos() if info.status is CheckpointStatus.COMPLETE), None)

    def infos(self) -> list[CheckpointInfo]:
        """Everything registered that is still there, newest first. Reads no content."""
        return self._infos(self._read())

    def verify(self, info: CheckpointInfo) -> CheckpointInfo:
        """Compare every byte with what was registered; the same entry with its status. Changes nothing.

        Of one that its script has begun to overwrite, the copy is what counts, and the path is the copy's.
        """
        entry = self._read()["known"].get(info.path)
        if entry is None:
            return info
        why = entry["why"] or self._damage(info.path, entry)
        if why and not entry["why"] and self._has_good_copy(entry):
            return dataclasses.replace(_info(info.path, entry), path=str(self._copy_path(entry)))
        return _info(info.path, {**entry, "why": why})

    def retain(self) -> list[str]:
        """Delete what is older than the ``keep`` newest good ones; what was deleted.

        Nothing goes unless the newest of those that stay verifies.
        """
        with self._storage.lock():
            registry = self._read()
            self._finish_removals(registry)
            keep = self._settings.keep
            good = [info for info in self._infos(registry) if info.status is CheckpointStatus.COMPLETE]
            if keep is None or len(good) <= keep or self._damage(good[0].path, registry["known"][good[0].path]):
                return []
            doomed = [info.path for info in good[keep:]]
            registry["removing"] = [*registry["removing"], *doomed]
            for path in doomed:
                del registry["known"][path]
            self._write(registry)
            self._finish_removals(registry)
            self._clear_copies(registry)
        return doomed

    # -- finding

    def _matches(self) -> list[str]:
        """What the glob finds inside its own directory: no links, and of nested ones only the outermost."""
        base = self._base()
        found: list[str] = []
        for match in sorted(self._globbed()):
            path = os.path.normpath(os.path.join(self._settings.directory, match))  # keeps links as they are
            inside = os.path.realpath(path) == os.path.join(base, os.path.relpath(path, self._fixed()))
            if inside and path != self._fixed() and not any(path.startswith(f"{outer}/") for outer in found):
                found.append(path)
        return found

    def _globbed(self) -> list[str]:
        return glob.glob(self._settings.pattern, root_dir=self._settings.directory, recursive=True)

    def _fixed(self) -> str:
        """The directory that the glob's matches must lie in: the job's, or an absolute glob's part without wildcards."""
        if not self._settings.pattern.startswith("/"):
            return os.path.normpath(self._settings.directory)
        before = re.split(r"[*?\[]", self._settings.pattern)[0]
        return os.path.normpath(before.rpartition("/")[0] or "/")

    def _base(self) -> str:
        return os.path.realpath(self._fixed())

    def _unregistered(self, registry: Mapping[str, Any]) -> Iterator[str]:
        """Matches that are new, or were written again since they were registered; of those only copies still count."""
        for path in self._matches():
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
        """Whether the next save goes to the same single file: its name has no number, or that was seen to happen."""
        if facts.keys() != {""}:
            return False
        return self.has_fixed_name or path in registry["rewritten"] or not re.search(r"\d", Path(path).name)

    # -- registering

    def _register(self, path: str, facts: Facts, registry: dict[str, Any], look: _Scan) -> dict[str, Any] | None:
        """The registry's entry; None where it is not whole, or changed while it was read."""
        overwritten = self._is_overwritten(path, facts, registry)
        try:
            proofs = [file_formats.check(member(path, name)) for name in facts]
            if not self._is_settled(path, facts, look, quick=proofs == [True] and "" in facts, copied=overwritten):
                return None
            if not look.ended_well and self._lacks_files(path, facts, registry):
                return None
            copy = self._copied(path, facts, registry) if overwritten and look.gone_at is None else ""
            if copy is None:
                return None
            files = digests(str(self._storage.root / copy), facts) if copy else digests(path, facts)
        except (OSError, CorruptCheckpointError):
            return None  # it is looked at again; what stays like that never counts
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
        """``quick``: a single file that is whole by its own account; ``copied``: a copy is made before it can change."""
        if look.ended_well:
            return True
        at = changed_at(path, facts)
        if look.gone_at is not None:
            return quick or at <= look.gone_at - SETTLE_SECONDS
        before = self._seen.get(path)
        self._seen[path] = facts
        if quick and copied:
            return before == facts or self._clock() - at >= QUIET_SECONDS
        return before == facts and self._clock() - at >= SETTLE_SECONDS

    def _lacks_files(self, path: str, facts: Facts, registry: Mapping[str, Any]) -> bool:
        """Whether files are missing that the newest registered one has, and may still come."""
        others = [info for info in self._infos(registry) if info.status is CheckpointStatus.COMPLETE]
        if not others or self._clock() - changed_at(path, facts) >= _FEWER_FILES_SECONDS:
            return False
        kinds = {file_facts.kind(name) for name in facts}
        return any(file_facts.kind(name) not in kinds for name in registry["known"][others[0].path]["files"])

    def _step(self, path: str, facts: Facts, look: _Scan, *, overwritten: bool) -> int:
        """The last number in the name, as in ``ckpt-120``; of a name that stays, the step reported when it was saved."""
        numbers = re.findall(r"\d+", Path(path).name)
        if numbers and not (overwritten or self.has_fixed_name):
            return int(numbers[-1])
        reported = None if look.step_at is None else look.step_at(changed_at(path, facts))
        return reported or 0

    # -- copies of files that are overwritten

    def _copied(self, path: str, facts: Facts, registry: dict[str, Any]) -> str | None:
        """The name of a fresh, whole copy, below the registry; empty where none can be made, None where it changed."""
        inode = os.lstat(path).st_ino
        known, replaced = registry["inodes"].get(path, (inode, 0))
        replaced = replaced + 1 if inode != known else 0
        registry["inodes"][path] = [inode, replaced]
        folder = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
        name = f"{_COPIES}/{folder}-{facts[''][1]}/{Path(path).name}"
        target = self._storage.root / name
        try:
            for directory in (target.parents[1], target.parent):  # the rank actor has no umask of its own
                make_private(directory)
            file_copies.take(path, target, link=replaced >= _SURE_REPLACEMENTS)
        except OSError as error:
            self.copy_failure = f"{path} has no copy while it is overwritten: {error.strerror or error}"
            return ""
        self.copy_failure = ""
        if facts_of(path) == facts:
            file_formats.check(str(target))
            return name
        file_facts.delete(str(target.parent))
        return None

    def _copy_what_has_none(self, registry: dict[str, Any]) -> None:
        """Files that counted after their writer's death, when there was no time for a copy."""
        for path, entry in registry["known"].items():
            facts = facts_of(path)
            if entry.get("copy") or entry["why"] or file_facts.text(facts) != entry["facts"]:
                continue
            if self._is_overwritten(path, facts, registry):
                with contextlib.suppress(OSError, CorruptCheckpointError):
                    entry["copy"] = self._copied(path, facts, registry) or ""

    def _copy_path(self, entry: Mapping[str, Any]) -> Path:
        return self._storage.root / str(entry["copy"])

    def _has_good_copy(self, entry: Mapping[str, Any]) -> bool:
        if not entry.get("copy"):
            return False
        try:
            return digests(str(self._copy_path(entry)), [""]) == {"": list(entry["files"][""])}
        except OSError:
            return False

    def _restored(self, path: str, registry: dict[str, Any], why: str, attempt: int) -> str:
        """Where the copy of a file can be read: in the file's place, unless what is there may be whole, too."""
        entry = registry["known"][path]
        which = f"the copy of step {entry['step']}" if entry["step"] else "its newest copy"
        if self._is_torn(path) and self._put_back(path, registry):
            message = f"attempt {attempt}: {path} was not whole after its writer's end; {which} was put back"
            self.notes.append(Note(code="checkpoint_restored", message=message))
            return path
        message = f"attempt {attempt}: {path}: {why}; {which} is used instead"
        self.notes.append(Note(code="checkpoint_copy_used", message=message))
        return str(self._copy_path(entry))

    def _put_others_back(self, registry: dict[str, Any]) -> None:
        """A script may read others of its files than the newest."""
        for path, entry in registry["known"].items():
            if entry.get("copy") and os.path.lexists(path) and self._is_torn(path) and self._has_good_copy(entry):
                self._put_back(path, registry)

    def _put_back(self, path: str, registry: dict[str, Any]) -> bool:
        entry = registry["known"][path]
        try:
            file_copies.put_back(self._copy_path(entry), path)
        except OSError as error:
            self.problems.append(f"{path}: its copy could not be put back: {error.strerror or error}")
            return False
        entry["facts"] = file_facts.text(facts_of(path))
        registry["foreign"].pop(path, None)
        with contextlib.suppress(OSError):  # this new file is not the script's doing, and says nothing of how it writes
            registry["inodes"][path] = [os.lstat(path).st_ino, 0]
        return True

    def _is_torn(self, path: str) -> bool:
        """Whether the file is missing, or its format says that it is not whole."""
        try:
            file_formats.check(path)
        except FileNotFoundError:
            return True
        except CorruptCheckpointError:
            return True
        except OSError:
            return False
        return False

    def _clear_copies(self, registry: Mapping[str, Any]) -> None:
        """Remove the copies that no entry names. What cannot be removed now is tried again."""
        named = {entry.get("copy", "").rpartition("/")[0] for entry in registry["known"].values()}
        for name in self._storage.names(_COPIES):
            if f"{_COPIES}/{name}" not in named:
                with contextlib.suppress(OSError):
                    file_facts.delete(str(self._storage.root / _COPIES / name))

    def _note_unused(self, registry: Mapping[str, Any], attempt: int) -> None:
        """The job has files of its own, and begins without one."""
        own = [
            path
            for path in self._matches()
            if registry["adopted"].get(path) != file_facts.text(facts_of(path)) and path not in registry["removing"]
        ]
        if own:
            others = f" and {len(own) - 1} more" if len(own) > 1 else ""
            message = (
                f"attempt {attempt} begins without any of the job's own checkpoints: {own[0]}{others} could not be shown to be"
                " whole when the attempt before ended"
            )
            self.notes.append(Note(code="checkpoint_unused", message=message))

    # -- the registry

    def _read(self) -> dict[str, Any]:
        try:
            registry: dict[str, Any] = json.loads(bytes(self._storage.read(_REGISTRY)))
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

    def _write(self, registry: Mapping[str, Any]) -> None:
        Path(self._settings.registry).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._storage.replace(_REGISTRY, json.dumps(registry).encode())
        self._storage.keep_spare()

    def _infos(self, registry: Mapping[str, Any]) -> list[CheckpointInfo]:
        infos = [
            _info(path, entry)
            for path, entry in registry["known"].items()
            if os.path.lexists(path) or (entry.get("copy") and self._copy_path(entry).exists())
        ]
        return sorted(infos, key=lambda info: (info.created_at or 0.0, info.step), reverse=True)

    def _damage(self, path: str, entry: Mapping[str, Any]) -> str:
        """How a checkpoint differs from what was registered; empty when it does not."""
        facts = facts_of(path)
        for name, (size, digest) in entry["files"].items():
            shown = name or Path(path).name
            if name not in facts:
                return f"{shown} is missing"
            if facts[name][0] != size:
                return f"{shown} has {facts[name][0]} bytes instead of {size}"
            try:
                found = digests(path, [name])[name][1]
            except OSError as error:
                return f"{shown} cannot be read: {error.strerror or error}"
            if found != digest:
                return f"{shown} was changed: its SHA-256 differs from the one registered"
        return ""

    def _finish_removals(self, registry: dict[str, Any]) -> None:
        for path in list(registry["removing"]):
            if path in self._matches() or not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    file_facts.delete(path)
            if not os.path.lexists(path):
                registry["removing"].remove(path)
                self._write(registry)


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
