"""Facts about a checkpoint that a script writes by itself: its files, their sizes and times, their content."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import trees
from orchestrator.checkpoint.external import file_formats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Facts = dict[str, tuple[int, int]]
"""Size and modification time (ns) of each file, by its path in the checkpoint; a single file has the empty path."""


def facts_of(path: str) -> Facts:
    """Return the facts of every regular file of a checkpoint; links are left out."""
    found: Facts = {}
    if os.path.islink(path):
        return found
    if os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            found[""] = (status.st_size, status.st_mtime_ns)
        return found
    for each in trees.walk(path, trees.Problems()):
        if each.is_file:
            found[each.path] = (each.status.st_size, each.status.st_mtime_ns)
    return found


def changed_at(path: str, facts: Facts) -> float:
    """Return when the checkpoint last changed: a file written, created or removed (seconds since the epoch)."""
    times = [mtime for _, mtime in facts.values()]
    for folder in (path, *(os.path.join(path, os.path.dirname(name)) for name in facts if name)):
        with contextlib.suppress(OSError):
            times.append(os.lstat(folder).st_mtime_ns)
    return max(times, default=0) / 1e9


def text(facts: Facts) -> str:
    """Return the facts as the registry stores them."""
    return json.dumps(sorted((name, *values) for name, values in facts.items()))


def member(path: str, name: str) -> str:
    """Return the path of a checkpoint's file."""
    return os.path.join(path, name) if name else path


def digests(path: str, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return size and SHA-256 of the named files of a checkpoint. Raises OSError."""
    return {name: list(file_formats.digest(member(path, name))) for name in names}


def damage(path: str, files: Mapping[str, Sequence[Any]]) -> str:
    """Return how a checkpoint differs from the sizes and digests of ``files``; empty when it does not."""
    facts = facts_of(path)
    for name, (size, digest) in files.items():
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


def delete(path: str) -> None:
    """Delete a file or a tree. Links are left alone."""
    if not os.path.islink(path):  # never followed, and not orch's
        trees.remove(path).left.refuse(path)


def kind(name: str) -> str:
    """Return a file's name without its numbers."""
    return re.sub(r"\d+", "#", name)
