"""Checkpoints that a script writes by itself: found by a glob, registered with digests, verified, retained.

A script's own files have no manifest and appear bit by bit, so two questions have careful answers here. *Is it whole?*
When nothing in it has changed for a while, files of formats that can tell (safetensors, JSON, torch's zip) say yes, and
it has the files that the one before had. What was still changing when its writer was killed never counts. *Is it still what it
was?* Sizes and SHA-256 of every file are noted when it is registered. The script's files are never renamed or marked:
what is known about them lies in a registry of the job.

Links are neither followed nor counted, and only retention deletes: registered ones, never the newest good one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint import tensorfile
from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.info import CheckpointInfo, CheckpointStatus
from orchestrator.checkpoint.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SETTLE_SECONDS = 2.0  # without a change before something counts as written
_FEWER_FILES_SECONDS = 20.0  # before one that lacks files of the one before counts all the same
_REGISTRY = "registry.json"
_HEADER_LIMIT = 16 * 1024 * 1024

Facts = dict[str, tuple[int, int]]
"""Size and modification time (ns) of each file, by its path in the checkpoint; of a single file, by the empty path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What to watch: a glob (relative to ``directory`` unless absolute), where the registry is, how many to keep."""

    pattern: str
    directory: str
    registry: str
    keep: int | None = 3


class WatchedFiles:
    """The checkpoints under one glob. Blocking; several processes may have one each, and the last to write wins."""

    def __init__(self, settings: WatchSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._settings = settings
        self._storage = LocalStorage(settings.registry)
        self._seen: dict[str, Facts] = {}
        self.problems: list[str] = []

    def adopt_none(self) -> None:
        """What is there now was there before the job: it is no checkpoint of the job's unless it is written again."""
        registry = self._read()
        registry["foreign"] = {path: _text(_facts(path)) for path in self._matches()}
        self._write(registry)

    def scan(
        self, *, attempt: int, writer_gone_at: float | None = None, ended_well: bool = False
    ) -> list[CheckpointInfo]:
        """Register what has become whole; the new ones, oldest first.

        ``writer_gone_at`` (seconds since the epoch): nobody writes any more, since then; ``ended_well``: he finished.
        """
        registry, fresh = self._read(), []
        before = json.dumps(registry)
        for path in self._unregistered(registry):
            facts = _facts(path)
            settled = bool(facts) and self._is_settled(path, facts, writer_gone_at, ended_well=ended_well)
            if settled and not ended_well and self._lacks_files(path, facts, registry):
                settled = False
            entry = self._register(path, facts, attempt) if settled else None
            if entry is not None:
                registry["known"][path] = entry
                fresh.append(_info(path, entry))
            elif writer_gone_at is not None:  # it stays half-written, and must not look settled to the next attempt
                registry["foreign"][path] = _text(facts)
        if json.dumps(registry) != before:
            self._write(registry)
        return sorted(fresh, key=lambda info: info.created_at or 0.0)

    def newest_good(self, *, attempt: int) -> str | None:
        """The newest that still is what it was, the same for every call of one attempt; None when there is none.

        Each that is not is marked in the registry, and told of in ``problems``.
        """
        registry = self._read()
        chosen: dict[str, str | None] = registry["chosen"]
        if str(attempt) not in chosen:
            good = None
            for info in self._infos(registry):
                if info.status is not CheckpointStatus.COMPLETE:
                    continue
                why = self._damage(info.path, registry["known"][info.path])
                if not why:
                    good = info.path
                    break
                registry["known"][info.path]["why"] = why
                self.problems.append(f"{info.path}: {why}")
            chosen[str(attempt)] = good
            self._write(registry)
        return chosen[str(attempt)]

    def infos(self) -> list[CheckpointInfo]:
        """Everything registered that is still there, newest first. Reads no content."""
        return self._infos(self._read())

    def verify(self, info: CheckpointInfo) -> CheckpointInfo:
        """Compare every byte with what was registered; the same entry with its status. Changes nothing."""
        entry = self._read()["known"].get(info.path)
        if entry is None:
            return info
        return _info(info.path, {**entry, "why": entry["why"] or self._damage(info.path, entry)})

    def retain(self) -> list[str]:
        """Delete what is older than the ``keep`` newest good ones; what was deleted.

        Nothing goes unless the newest of those that stay verifies.
        """
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
        """Matches that are new, or were written again since they were registered; those are forgotten."""
        for path in self._matches():
            if path in registry["removing"] or registry["foreign"].get(path) == _text(_facts(path)):
                continue
            entry = registry["known"].get(path)
            if entry is None or _text(_facts(path)) != entry["facts"]:
                registry["known"].pop(path, None)
                yield path

    def _is_settled(self, path: str, facts: Facts, gone_at: float | None, *, ended_well: bool) -> bool:
        if ended_well:
            return True
        changed_at = _changed_at(path, facts)
        if gone_at is not None:
            return changed_at <= gone_at - SETTLE_SECONDS
        before = self._seen.get(path)
        self._seen[path] = facts
        return before == facts and self._clock() - changed_at >= SETTLE_SECONDS

    def _lacks_files(self, path: str, facts: Facts, registry: Mapping[str, Any]) -> bool:
        """Whether files are missing that the newest registered one has, and may still come."""
        others = [info for info in self._infos(registry) if info.status is CheckpointStatus.COMPLETE]
        if not others or self._clock() - _changed_at(path, facts) >= _FEWER_FILES_SECONDS:
            return False
        kinds = {_kind(name) for name in facts}
        return any(_kind(name) not in kinds for name in registry["known"][others[0].path]["files"])

    def _register(self, path: str, facts: Facts, attempt: int) -> dict[str, Any] | None:
        """The registry's entry; None when it changed while it was read, or is no whole file of its format."""
        try:
            for name in facts:
                _check_format(_member(path, name))
            files = _digests(path, facts)
        except (OSError, CorruptCheckpointError):
            return None  # it is looked at again; what stays like that never counts
        if _facts(path) != facts:
            return None
        return {
            "facts": _text(facts),
            "files": files,
            "created_at": _changed_at(path, facts),
            "attempt": attempt,
            "step": _step(path),
            "why": "",
        }

    # -- the registry

    def _read(self) -> dict[str, Any]:
        try:
            registry: dict[str, Any] = json.loads(bytes(self._storage.read(_REGISTRY)))
        except (FileNotFoundError, ValueError):
            registry = {}
        return {"known": {}, "foreign": {}, "removing": [], "chosen": {}, **registry}

    def _write(self, registry: Mapping[str, Any]) -> None:
        Path(self._settings.registry).mkdir(parents=True, exist_ok=True)
        self._storage.replace(_REGISTRY, json.dumps(registry).encode())

    def _infos(self, registry: Mapping[str, Any]) -> list[CheckpointInfo]:
        infos = [_info(path, entry) for path, entry in registry["known"].items() if os.path.lexists(path)]
        return sorted(infos, key=lambda info: (info.created_at or 0.0, info.step), reverse=True)

    def _damage(self, path: str, entry: Mapping[str, Any]) -> str:
        """How a checkpoint differs from what was registered; empty when it does not."""
        facts = _facts(path)
        for name, (size, digest) in entry["files"].items():
            shown = name or Path(path).name
            if name not in facts:
                return f"{shown} is missing"
            if facts[name][0] != size:
                return f"{shown} has {facts[name][0]} bytes instead of {size}"
            try:
                found = _digests(path, {name: facts[name]})[name][1]
            except OSError as error:
                return f"{shown} cannot be read: {error.strerror or error}"
            if found != digest:
                return f"{shown} was changed: its SHA-256 differs from the one registered"
        return ""

    def _finish_removals(self, registry: dict[str, Any]) -> None:
        for path in list(registry["removing"]):
            if path in self._matches() or not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    _delete(path)
            if not os.path.lexists(path):
                registry["removing"].remove(path)
                self._write(registry)


def _facts(path: str) -> Facts:
    """Every regular file of a checkpoint; links are left out."""
    found: Facts = {}
    if os.path.islink(path):
        return found
    if os.path.isfile(path):
        facts = os.lstat(path)
        return {"": (facts.st_size, facts.st_mtime_ns)}
    for folder, _, names in os.walk(path):
        for name in names:
            member = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(member)
                if os.path.isfile(member) and not os.path.islink(member):
                    found[os.path.relpath(member, path)] = (facts.st_size, facts.st_mtime_ns)
    return found


def _changed_at(path: str, facts: Facts) -> float:
    """When anything of it was last written, a file made or removed."""
    times = [mtime for _, mtime in facts.values()]
    for folder in (path, *(os.path.join(path, os.path.dirname(name)) for name in facts if name)):
        with contextlib.suppress(OSError):
            times.append(os.lstat(folder).st_mtime_ns)
    return max(times, default=0) / 1e9


def _text(facts: Facts) -> str:
    return json.dumps(sorted((name, *values) for name, values in facts.items()))


def _member(path: str, name: str) -> str:
    return os.path.join(path, name) if name else path


def _digests(path: str, facts: Facts) -> dict[str, list[Any]]:
    storage = LocalStorage("/")
    found = {name: storage.digest(_member(path, name).lstrip("/")) for name in facts}
    return {name: [record.bytes, record.sha256] for name, record in found.items()}


def _check_format(path: str) -> None:
    """Raise CorruptCheckpointError when a file of a format that can tell is not whole; reads no more than it must."""
    suffix = path.rpartition(".")[2]
    size = Path(path).stat().st_size
    if suffix == "safetensors":
        _check_safetensors(path, size)
    elif suffix == "json" and size <= _HEADER_LIMIT:
        try:
            json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise CorruptCheckpointError(f"{path} is not JSON: {error}") from error
    elif suffix in ("pt", "pth", "bin", "ckpt", "npz"):
        with open(path, "rb") as file:
            is_zip = file.read(2) == b"PK"
        if size == 0 or (is_zip and not zipfile.is_zipfile(path)):  # the table of contents is written last
            raise CorruptCheckpointError(f"{path} is torn")


def _check_safetensors(path: str, size: int) -> None:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, size):
            raise CorruptCheckpointError(f"{path} is torn")
        file.seek(0)
        head = file.read(8 + length)
    entries, _ = tensorfile.parse(head, data_bytes=size - 8 - length)
    if max((entry.end for entry in entries), default=0) != size - 8 - length:
        raise CorruptCheckpointError(f"{path} is torn")


def _delete(path: str) -> None:
    if os.path.islink(path):  # never followed, and not ours
        return
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _step(path: str) -> int:
    """The last number in the name, as in ``ckpt-120``; 0 where there is none."""
    numbers = re.findall(r"\d+", Path(path).name)
    return int(numbers[-1]) if numbers else 0


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
    )
