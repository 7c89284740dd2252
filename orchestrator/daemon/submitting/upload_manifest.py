"""Reads the manifest of an uploaded working directory; nothing of it is trusted before it is checked."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import BadRequestError
from orchestrator.api.protocol import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES
from orchestrator.runtime.nodes.workdir_walk import ALWAYS_IGNORED, IGNORE_FILES, MAX_DEPTH, MAX_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 2048
MOST_HOPS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file, in pieces."""

    path: str
    size_bytes: int
    executable: bool
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """A symbolic link: relative to another place of the directory, absolute to one outside."""

    path: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """An empty directory."""

    path: str


Entry = FileEntry | LinkEntry | DirectoryEntry


def read_manifest(text: bytes, *, max_bytes: int) -> tuple[Entry, ...]:
    """Return the entries. Raises BadRequestError for anything but a directory of at most ``max_bytes``."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise _invalid(f"it has {len(text)} bytes, {MAX_MANIFEST_BYTES} at most")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid("it is not JSON") from error
    items = found.get("entries") if isinstance(found, dict) and found.get("version") == 1 else None
    if not isinstance(items, list) or len(items) > MAX_FILES:
        raise _invalid(f"it is not of version 1 with at most {MAX_FILES} entries")
    entries = tuple(_entry(item) for item in items)
    _refuse_conflicts(entries)
    _refuse_links_out({entry.path: entry.target for entry in entries if isinstance(entry, LinkEntry)})
    size = sum(entry.size_bytes for entry in entries if isinstance(entry, FileEntry))
    if size > max_bytes:
        raise _invalid(f"its files have {size} bytes, {max_bytes} at most")
    return entries


def _entry(item: Any) -> Entry:
    if not isinstance(item, dict):
        raise _invalid("an entry is not an object")
    path = _path(item.get("path"))
    match item.get("type"):
        case "file":
            return FileEntry(
                path=path,
                size_bytes=_size(item.get("size"), path),
                executable=item.get("executable") is True,
                pieces=_pieces(item.get("pieces"), item.get("size"), path),
            )
        case "link":
            return LinkEntry(path=path, target=_target(item.get("target"), path))
        case "directory":
            return DirectoryEntry(path=path)
    raise _invalid(f"{path!r} is neither a file, a link nor a directory")


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or len(_encoded(value)) > MAX_PATH_BYTES:
        raise _invalid(f"a path is text of at most {MAX_PATH_BYTES} bytes")
    names = value.split("/")
    if "\0" in value or any(name in {"", ".", ".."} or len(_encoded(name)) > MAX_NAME_BYTES for name in names):
        raise _invalid(f"{value!r} is not in the directory")
    if not ALWAYS_IGNORED.isdisjoint(names):
        raise _invalid(f"{value!r} is of a kind that is never copied ({', '.join(sorted(ALWAYS_IGNORED))})")
    if len(names) > MAX_DEPTH + 1:
        raise _invalid(f"{value!r} is more than {MAX_DEPTH} directories deep")
    return value


def _target(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(_encoded(value)) > MAX_PATH_BYTES:
        raise _invalid(f"{path!r} has no valid target")
    if value.startswith("/") and posixpath.basename(path) in IGNORE_FILES:
        raise _invalid(f"{path!r} links to {value!r}, outside of the directory; it is read here: make it a file")
    return value


def _size(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _invalid(f"{path!r} has no size")
    return value


def _pieces(value: Any, size: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(digest, str) for digest in value):
        raise _invalid(f"{path!r} has no pieces")
    if len(value) != -(-int(size) // MAX_PIECE_BYTES):
        raise _invalid(f"{path!r} has {len(value)} pieces for {size} bytes")
    return tuple(value)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"{text!r} is not UTF-8") from error


def _refuse_conflicts(entries: tuple[Entry, ...]) -> None:
    """Refuse a path that occurs twice, and an entry below another one: no file goes through a link."""
    leaves = {entry.path for entry in entries}
    if len(leaves) != len(entries):
        raise _invalid("it names a path twice")
    for entry in entries:
        above = posixpath.dirname(entry.path)
        while above:
            if above in leaves:
                raise _invalid(f"{entry.path!r} is below {above!r}, which is an entry of its own")
            above = posixpath.dirname(above)


def _refuse_links_out(links: Mapping[str, str]) -> None:
    """Refuse a relative link that leads out of the directory, by its own text or through other links.

    A client sends a link to a place outside as an absolute one, which is kept and reported; nothing here follows it.
    """
    for path, target in links.items():
        if target.startswith("/"):
            continue
        here, ahead, hops = path.split("/")[:-1], target.split("/")[::-1], 0
        while ahead and hops <= MOST_HOPS:  # more: a loop, which leads nowhere
            name = ahead.pop()
            through = links.get("/".join((*here, name)), "")
            if through.startswith("/") or (name == ".." and not here):
                raise _invalid(f"{path!r} links to {target!r}, outside of the directory")
            if through:
                hops += 1
                ahead += through.split("/")[::-1]
            elif name == "..":
                here.pop()
            elif name not in {"", "."}:
                here.append(name)


def _invalid(reason: str) -> BadRequestError:
    return BadRequestError(f"the upload's manifest is refused: {reason}", hint="send it with `orch submit`")
