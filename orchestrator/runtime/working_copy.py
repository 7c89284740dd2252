"""A job's working copy on a node: laid out from a snapshot's blobs, and searched for the files that ``outputs`` names.

Plain files, no Ray: the daemon uses it for its own node, a node's agent for a node that does not share the home.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pathspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_OUTPUTS: Final = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A file that an ``outputs`` pattern names: its path below the working copy, its size, and its permission bits."""

    path: str
    size_bytes: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is to be brought back, and how many files (and bytes) are not, because they are too much."""

    files: tuple[Output, ...]
    left_files: int = 0
    left_bytes: int = 0


def lay_out(digest: str, blob: Callable[[str], Path], target: Path) -> None:
    """Make a writable copy of the snapshot at ``target``, whole or not at all; what is there already is kept."""
    if target.exists():
        return
    manifest = json.loads(blob(digest).read_bytes())
    draft = target.with_name(f"{target.name}.laying-out")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for entry in manifest["entries"]:
        path = draft / entry["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        match entry["type"]:
            case "directory":
                path.mkdir(exist_ok=True)
            case "link":
                path.symlink_to(entry["target"])
            case _:
                shutil.copyfile(blob(entry["digest"]), path)
                path.chmod(entry["mode"])
    draft.replace(target)


def digests(digest: str, blob: Callable[[str], Path]) -> list[str]:
    """Every blob that a snapshot needs, its manifest first, each once."""
    entries = json.loads(blob(digest).read_bytes())["entries"]
    return list(dict.fromkeys([digest, *(entry["digest"] for entry in entries if "digest" in entry)]))


def find_outputs(work: Path, patterns: Sequence[str], max_bytes: int) -> Outputs:
    """The regular files below ``work`` that a pattern names, by path, as many as ``max_bytes`` holds.

    A pattern is that of .gitignore, counted from ``work``: ``out/**`` is all below out, ``*.pt`` lies at the top. Links
    are not followed and not brought back, so nothing outside of ``work`` is ever read.
    """
    spec = pathspec.GitIgnoreSpec.from_lines(f"/{pattern}" for pattern in patterns)
    chosen: list[Output] = []
    size = left_files = left_bytes = 0
    for found in sorted(_regular_files(work), key=lambda each: each.path):
        if not spec.match_file(found.path):
            continue
        if size + found.size_bytes > max_bytes or len(chosen) >= MAX_OUTPUTS:
            left_files, left_bytes = left_files + 1, left_bytes + found.size_bytes
            continue
        chosen.append(found)
        size += found.size_bytes
    return Outputs(files=tuple(chosen), left_files=left_files, left_bytes=left_bytes)


def _regular_files(work: Path) -> Iterator[Output]:
    for directory, _, names in os.walk(work, followlinks=False):
        for name in names:
            path = Path(directory, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                relative = path.relative_to(work).as_posix()
                yield Output(path=relative, size_bytes=status.st_size, mode=stat.S_IMODE(status.st_mode) & 0o777)


def keep_output(work: Path, found: Output, target: Path) -> None:
    """Have a file of this node in the directory of outputs: a second name of it, or a copy on another filesystem."""
    source, place = work / found.path, place_for(target, found.path)
    if place.exists() and place.samefile(source):
        return
    draft = place.with_name(f".{place.name}.bringing")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, draft, follow_symlinks=False)
        draft.chmod(found.mode)
    draft.replace(place)


def place_for(target: Path, relative: str) -> Path:
    """Where a file goes below ``target``, its directory made. Raises ValueError for a path that leads out of it."""
    place = target / relative
    if relative.startswith("/") or ".." in Path(relative).parts:
        raise ValueError(f"{relative!r} leads out of {target}; nothing was written")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.resolve().is_relative_to(target.resolve()):
        raise ValueError(f"{place.parent} leads out of {target}; remove the link in there")
    return place
