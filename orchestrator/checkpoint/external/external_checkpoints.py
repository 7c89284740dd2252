"""Checkpoints that a script writes by itself: found by a glob, registered with digests, verified, retained.

A script's own files have no manifest and are written gradually, so two questions need care. *Is it complete?* It is
when files of verifiable formats (safetensors, JSON, torch's zip) are complete, nothing in it has changed for a while,
and it has the files that the previous one had (CompletenessCheck). A single file of such a format counts at once. Files
that were still changing when their writer was killed, and whose format cannot prove them complete, never count. *Is it
unchanged?* Sizes and SHA-256 of every file are recorded at registration, and checked before an attempt resumes from it
(ResumeChoice).

A file with a fixed name is overwritten by the next save, often in place. A copy of each complete one is kept beside the
registry (OverwrittenFiles), and restored where a killed writer has left a torn file. The copy of the one before stays, as
``older`` in the registry, until the newer one has a copy; and every attempt begins with a copy. Otherwise the script's
files are never renamed or marked: the facts about them are in the job's registry.

A link that the glob matches stands for what it leads to, inside the glob's own directory: that is registered under its own
name, and never deleted. Other links are neither followed nor counted. Only ``retain`` deletes files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from orchestrator import trees
from orchestrator.checkpoint.errors import CheckpointError, CorruptCheckpointError, failure_kind
from orchestrator.checkpoint.external import script_files
from orchestrator.checkpoint.external.script_files import changed_at, damage, digests, facts_of, member
from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.checkpoint.storage.directory import CheckpointInfo, CheckpointStatus
from orchestrator.checkpoint.storage.storage import LocalStorage, except_on_full_disk
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from orchestrator.checkpoint.external.script_files import Facts

LARGE_BYTES = 1 << 30
"""A file of this size that has an older copy is copied while the next attempt runs, which would wait some seconds for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """The step at a time, between the newest report before it and the first one after it. A guess was read from what is printed."""

    step: int
    least: int
    most: int
    guessed: bool = False


StepAt = Callable[[float], ReportedStep | None]
"""The step that the script had reported at a time (seconds since the epoch); None where it reports none."""

_NAMED_STEP = re.compile(
    r"(?:(?:step|iter|iteration|update)s?|(?:checkpoint|ckpt)(?:[-_=.]?[0-9]+(?=[-_][0-9]))?)[-_=.]{0,2}([0-9]+)(?![0-9]|\.[0-9])",
    re.IGNORECASE,
)
_ONLY_NUMBER = re.compile(r"(?:[^0-9]*[-_=.])?([0-9]+)(?:[-_.][^0-9]*)?")


def step_in(name: str) -> int | None:
    """Return the step in a checkpoint's name; None where it has none.

    It is the number after `step`, `iter`, `iteration` or `update`, else after `checkpoint` or `ckpt` (of fairseq's
    `checkpoint_2_1500.pt`, epoch and step, the second one), else the name's only number, unless the name speaks of an epoch.
    """
    found = sorted(_NAMED_STEP.finditer(name), key=lambda match: match[0][:1].lower() == "c")
    if found:
        return int(found[0][1])
    only = None if "epoch" in name.lower() else _ONLY_NUMBER.fullmatch(name)
    return int(only[1]) if only else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """The parameters of one scan."""

    attempt: int
    writer: Writer
    step_at: StepAt | None

    def step_of(self, path: str, facts: Facts, *, has_fixed_name: bool) -> int:
        """Return the step reported at the time of saving, or the one in the name: if they agree, or nothing is reported."""
        named = None if has_fixed_name else step_in(Path(path).name)
        reported = None if self.step_at is None else self.step_at(changed_at(path, facts))
        if reported is None or (
            named is not None and (reported.guessed or reported.least <= named <= reported.most + 1)
        ):
            return named or 0
        return reported.step


class ExternalCheckpoints:
    """The checkpoints under one glob. Blocking; several processes may each have an instance, and a lock serialises them."""

    def __init__(self, settings: WatchSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._glob = WatchedGlob(settings)
        self.has_fixed_name = not glob.has_magic(settings.pattern)
        """Whether each save overwrites the previous one, as far as the glob shows."""
        self._registry = RegistryFile(settings.registry)
        self._copies = OverwrittenFiles(self._registry.storage)
        self._completeness = CompletenessCheck(clock)
        self._keep = settings.keep
        self.problems: list[str] = []
        self.notes: list[Note] = []
        """Notes that a copy was restored or used, or that no file is used."""
        self.is_waiting = False
        """Whether a file that needs a copy is being written."""

    @property
    def refused_link(self) -> str:
        """The link that the glob matches and that leads out of its directory, if nothing else matches."""
        return self._glob.refused

    @property
    def copy_failure(self) -> str:
        """Reason why the newest complete file has no copy; empty when it has one, or needs none."""
        return self._copies.failure

    def adopt_none(self) -> None:
        """Exclude the existing files: they are older than the job and count only when written again."""
        with self._registry.storage.lock():
            registry = self._registry.read()
            registry["foreign"] = {path: script_files.text(facts_of(path)) for path in self._glob.matches()}
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
        with self._registry.storage.lock():
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
                registry["foreign"][path] = script_files.text(facts)
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
        with self._registry.storage.lock():
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

        Nothing is deleted unless the newest remaining one verifies. A deletion is in the registry before it begins, so
        that one that was interrupted is completed later.
        """
        with self._registry.storage.lock():
            registry = self._registry.read()
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
            self._registry.write(registry)
            self._finish_removals(registry)
            self._copies.clear(registry)
            return doomed

    def _finish_removals(self, registry: dict[str, Any]) -> None:
        own = self._glob.matches(links=False) if registry["removing"] else ()
        for path in list(registry["removing"]):
            if path in own or not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    script_files.delete(path)
            if not os.path.lexists(path):
                registry["removing"].remove(path)
                self._registry.write(registry)

    # -- finding

    def _unregistered(self, registry: Mapping[str, Any]) -> Iterator[str]:
        """Yield matches that are new, or rewritten since registration; these stay registered only with a copy."""
        for path in self._glob.matches():
            text = script_files.text(facts_of(path))
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
        return (
            (self.has_fixed_name and not self._glob.is_linked(path))
            or path in registry["rewritten"]
            or not re.search(r"\d", Path(path).name)
        )

    # -- registering

    def _register(self, path: str, facts: Facts, registry: dict[str, Any], look: _Scan) -> dict[str, Any] | None:
        """Return the checkpoint's registry entry; None when it is incomplete, or changed while it was read."""
        overwritten, linked = self._is_overwritten(path, facts, registry), self._glob.is_linked(path)
        try:
            if not self._completeness.is_complete(
                path,
                facts,
                writer=look.writer,
                is_copied=overwritten or linked,  # a script makes the link when it has written the file
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
            "facts": script_files.text(facts),
            "files": files,
            "created_at": changed_at(path, facts),
            "attempt": look.attempt,
            "step": look.step_of(path, facts, has_fixed_name=overwritten or (self.has_fixed_name and not linked)),
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
            if entry.get("copy") or entry["why"] or script_files.text(facts) != entry["facts"]:
                continue
            if self._is_overwritten(path, facts, registry):
                most = None if large or not entry.get("older") else LARGE_BYTES
                with contextlib.suppress(OSError, CorruptCheckpointError):
                    entry["copy"] = self._copies.take(path, facts, registry, most_bytes=most) or ""
                    entry["older"] = None if entry["copy"] else entry.get("older")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """A glob (relative to ``directory`` unless absolute), the registry's path, the number of checkpoints to keep."""

    pattern: str
    directory: str
    registry: str
    keep: int | None = 3


class WatchedGlob:
    """The glob of ``checkpoint.watch``. Finds nothing outside of its own directory, and what links in it lead to.

    ``refused`` is a link that leads to another place, where nothing else matches.
    """

    def __init__(self, settings: WatchSettings) -> None:
        self.refused = ""
        self._linked: set[str] = set()
        self._pattern = settings.pattern
        self._directory = settings.directory

    def matches(self, *, links: bool = True) -> list[str]:
        """Return the present matches; of nested ones only the outermost. ``links``: also what links lead to."""
        fixed = self._fixed()
        base = os.path.realpath(fixed)
        paths, targets, refused = set[str](), set[str](), ""
        for match in _glob(self._pattern, self._directory):
            path = os.path.normpath(os.path.join(self._directory, match))  # keeps links as they are
            real = os.path.realpath(path)
            if path != fixed and real == os.path.join(base, os.path.relpath(path, fixed)):
                paths.add(path)
            elif not os.path.islink(path) or not os.path.exists(real):
                continue
            elif real.startswith(f"{base.rstrip('/')}/"):
                targets.add(os.path.join(fixed, os.path.relpath(real, base)))
            else:
                refused = f"{path} is a link to {real}, which is outside of {fixed}"
        self._linked = targets - paths
        self.refused = "" if paths or targets else refused
        found: list[str] = []
        for path in sorted(paths | targets if links else paths):
            if not any(path.startswith(f"{outer}/") for outer in found):
                found.append(path)
        return found

    def is_linked(self, path: str) -> bool:
        """Whether the newest search found the path by a link alone."""
        return path in self._linked

    def _fixed(self) -> str:
        """Return the directory that must contain the matches: the job's, or an absolute glob's part without wildcards."""
        if not self._pattern.startswith("/"):
            return os.path.normpath(self._directory)
        before = re.split(r"[*?\[]", self._pattern)[0]
        return os.path.normpath(before.rpartition("/")[0] or "/")


def _glob(pattern: str, directory: str) -> set[str]:
    """Return what ``glob.glob(pattern, recursive=True)`` returns, which calls itself for each level that ``**`` enters."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern, root_dir=directory))
    first = parts.index("**")
    before, after = "/".join(parts[:first]), "/".join(parts[first + 1 :])
    tops = {"/" if pattern.startswith("/") else ""} if not before else set(glob.glob(f"{before}/", root_dir=directory))
    found: set[str] = set()
    for top in tops:
        for folder in _directories(os.path.join(directory, top)):
            below = os.path.join(top, folder)
            found |= {os.path.join(below, match) for match in _glob(after or "*", os.path.join(directory, below))}
            if below and not after:
                found.add(below)
    return found


def _directories(top: str) -> Iterator[str]:
    """Yield a directory (as the empty path) and those below it that are not hidden."""
    yield ""
    for found in trees.walk(top, trees.Problems()):
        if found.is_directory and not any(name.startswith(".") for name in found.path.split("/")):
            yield found.path


_FILE = "registry.json"


class RegistryFile:
    """Reads and writes the registry; ``storage`` is the private directory that contains it and the copies."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.storage = LocalStorage(directory, private=True)

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
        """Write the registry durably; on a full disk the former one stays, and the next scan tries again."""
        Path(self._directory).mkdir(parents=True, exist_ok=True, mode=0o700)
        with except_on_full_disk():
            self.storage.replace(_FILE, json.dumps(registry).encode(), durable=True)


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


SETTLE_SECONDS = 2.0  # without a change before something counts as written
QUIET_SECONDS = 0.02  # without a change before a copy begins: two ticks of the file systems' clock
_FEWER_FILES_SECONDS = 20.0  # without a change until a checkpoint with fewer files than the previous one counts
_LONGEST_STEP_SECONDS = (
    1.0  # counted between two looks: this process may have been stopped, and the writer killed meanwhile
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that writes the files: whether it has ended, and whether it had finished."""

    ended: bool = False
    well: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last look at a checkpoint found, when (by the check's clock), and for how long it has been so."""

    facts: Facts
    at: float
    quiet_seconds: float = 0.0


class CompletenessCheck:
    """Remembers each unfinished checkpoint from one scan to the next. ``clock`` gives monotonic seconds, ``pause`` waits some."""

    def __init__(self, clock: Callable[[], float], pause: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._pause = pause
        self._seen: dict[str, _Seen] = {}

    def is_complete(
        self, path: str, facts: Facts, *, writer: Writer, is_copied: bool, previous: Callable[[], Iterable[str]]
    ) -> bool:
        """Whether the files in ``facts`` are a complete checkpoint.

        ``is_copied``: it is copied before it can change. ``previous`` gives the files of the newest complete one.
        Raises CorruptCheckpointError where a format proves a file torn, OSError where a file cannot be read.
        """
        proofs = [script_files.check(member(path, name)) for name in facts]
        is_proven = proofs == [True] and "" in facts  # a single file that its format proves complete
        if writer.ended:
            return writer.well or is_proven  # anything else may have been cut short, however old it looks
        seen = self._look(path, facts)
        if is_proven and is_copied:
            return seen.quiet_seconds > 0 or self._is_quiet(path, facts)
        return seen.quiet_seconds >= SETTLE_SECONDS and not self._may_grow(seen, previous)

    def _look(self, path: str, facts: Facts) -> _Seen:
        now, before = self._clock(), self._seen.get(path)
        seen = _Seen(facts, now)
        if before is not None and before.facts == facts:
            step = min(now - before.at, _LONGEST_STEP_SECONDS)
            seen = _Seen(facts, now, before.quiet_seconds + step)
        self._seen[path] = seen
        return seen

    def _is_quiet(self, path: str, facts: Facts) -> bool:
        self._pause(QUIET_SECONDS)
        return facts_of(path) == facts

    def _may_grow(self, seen: _Seen, previous: Callable[[], Iterable[str]]) -> bool:
        """Whether files are missing that the previous one has, and that may still be written."""
        if seen.quiet_seconds >= _FEWER_FILES_SECONDS:
            return False
        kinds = {script_files.kind(name) for name in seen.facts}
        return any(script_files.kind(name) not in kinds for name in previous())


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
            script_files.take(path, target, link=replaced >= _SURE_REPLACEMENTS, most_bytes=most_bytes)
        except OSError as error:
            self.failure = f"{path} has no copy while it is overwritten: {error.strerror or error}"
            return ""
        self.failure = ""
        registry["inodes"][path] = [inode, replaced]
        if facts_of(path) == facts:
            script_files.check(str(target))
            return name
        script_files.delete(str(target.parent))
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
        script_files.put_back(self.path(entry), path)
        entry["facts"] = script_files.text(facts_of(path))
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
                    script_files.delete(str(self._storage.root / _FOLDER / name))


def is_torn(path: str) -> bool:
    """Whether the file is missing, or its format proves it incomplete."""
    try:
        script_files.check(path)
    except (FileNotFoundError, CorruptCheckpointError):
        return True
    except OSError:
        return False
    return False


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
        own = [p for p in matches if adopted.get(p) != script_files.text(facts_of(p)) and p not in removing]
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


LOOK_SECONDS = 1.0
OFTEN_SECONDS = 0.25  # for a file that each save overwrites
FIRST_WAIT_SECONDS = 0.05  # while such a file is being written; then 1.5 times as long each time
BUSY_SHARE = 0.2  # of the time, at most, is spent copying and hashing
MAX_SAMPLES = 4096
LINK = "link"
"""The kind of failure where the glob matches a link alone, and the link leads to another directory."""
COPY_FAILED = "copy"
"""The kind of failure where a file that each save overwrites could not be copied."""

NewestStep = Callable[[], "tuple[float, int, bool] | None"]
"""The time and the number of the newest step, and whether it is a guess; None where nothing is reported."""


class FileWatcher:
    """Registers and retains in a background thread; ``status`` gives the result, as for a persister.

    ``reported`` gives the step of a file whose name does not contain one.
    """

    def __init__(
        self,
        settings: WatchSettings,
        *,
        reported: NewestStep = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = ExternalCheckpoints(settings, clock=clock)
        self._reported = reported
        self._samples: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)
        self._guessed = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._attempt = 0
        self._ended = self._well = False
        self.status = PersisterStatus()

    def start(self, attempt: int) -> None:
        """Scan every second until ``close``; files registered from now on belong to ``attempt``."""
        with self._lock:
            self._attempt, self._ended, self._well = attempt, False, False
            self._samples.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-watcher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop after the scan in progress."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ended(self, *, well: bool) -> None:
        """Record the writer's end: of what is not registered by now, only what a format proves complete counts."""
        self._ended, self._well = True, well

    def look(self) -> None:
        """Register newly complete checkpoints, and apply retention. Storage errors appear in ``status``."""
        with self._lock:
            try:
                self._sample()
                fresh = self._files.scan(
                    attempt=self._attempt, writer_ended=self._ended, ended_well=self._well, step_at=self._step_at
                )
                if fresh:
                    self._publish(fresh[-1], len(fresh))
                    self._files.retain()
                elif self._files.refused_link and self.status.failure_kind != LINK:
                    self._fail(
                        f"{self._files.refused_link}: checkpoint.watch does not follow it; watch a place in the job's directory",
                        LINK,
                    )
                elif self._files.copy_failure and self._files.copy_failure != self.status.failure:
                    self._fail(self._files.copy_failure, COPY_FAILED)
            except (
                Exception
            ) as error:  # the files are the script's; if the thread ended, none of them would be registered
                known = isinstance(error, OSError | CheckpointError)
                shown = str(error) if known else f"{type(error).__name__}: {error}"
                self._fail(f"the files of checkpoint.watch could not be processed: {shown}", failure_kind(error))

    def _run(self) -> None:
        pause, waiting = FIRST_WAIT_SECONDS, False
        while not self._closing.wait(pause):
            began = time.monotonic()
            self.look()
            usual = OFTEN_SECONDS if self._files.has_fixed_name else LOOK_SECONDS
            if not self._files.is_waiting:
                pause = usual
            elif waiting:
                pause = min(usual, 1.5 * pause)
            else:
                pause = FIRST_WAIT_SECONDS
            waiting = self._files.is_waiting
            pause = max(pause, (time.monotonic() - began) / BUSY_SHARE)

    def _sample(self) -> None:
        newest = self._reported()
        if newest is None:
            return
        at, step, guessed = newest
        if guessed != self._guessed:  # the script has begun to report
            self._samples.clear()
            self._guessed = guessed
        if not self._samples or (at, step) > self._samples[-1]:
            self._samples.append((at, step))

    def _step_at(self, at: float) -> ReportedStep | None:
        """Return the step at time ``at``, interpolated between two reports."""
        index = bisect_right(self._samples, (at, sys.maxsize))
        around = [*self._samples][max(0, index - 1) : index + 1]
        if not around:
            return None
        (before, step), (after, most) = around[0], around[-1]
        if before < at < after:
            step += int((at - before) / (after - before) * (most - step))
        return ReportedStep(step=step, least=around[0][1], most=most, guessed=self._guessed)

    def _fail(self, message: str, kind: str) -> None:
        self.status = structs.replace(
            self.status,
            failures=self.status.failures + 1,
            failure=message,
            failure_kind=kind,
            persisted=self.status.persisted + 1,
        )

    def _publish(self, newest: CheckpointInfo, count: int) -> None:
        self.status = structs.replace(
            self.status,
            step=newest.step,
            attempt=newest.attempt,
            path=newest.path,
            bytes=newest.bytes,
            at=newest.created_at,
            persisted=self.status.persisted + count,
            failure=self._files.copy_failure,
            failure_kind=COPY_FAILED if self._files.copy_failure else "",
            watched=True,
            digest=newest.digest,
        )
