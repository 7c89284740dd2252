"""Files whose existence proves something: written whole, synced, renamed into place, the directory's entry synced.

A rename alone is not enough: after a power cut the new name can exist without the content, and a file taken for complete
because it exists is then empty. Standard library only, imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Create or replace ``path``; it is complete and on disk once this returns, and unchanged where this raises OSError."""
    with whole_file(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path``, on disk, when the block ends; it is removed where the block raises."""
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.new")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the directory ``path`` survive a power cut: created, renamed and removed ones."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """Put every regular file and directory below ``root``, a directory or a file, and the entry of ``root`` itself on disk.

    No link is followed. All files begin to be written before the first is waited for, so that the disk is not idle in between.
    """
    paths = [*_tree(root)]
    for wait in (False, True):
        for path, is_directory in reversed(paths):  # a directory after what is in it
            if is_directory and not wait:
                continue
            kind = os.O_DIRECTORY if is_directory else os.O_NONBLOCK
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind)
            try:
                if wait:
                    os.fsync(handle)
                else:
                    os.posix_fadvise(
                        handle, 0, 0, os.POSIX_FADV_DONTNEED
                    )  # starts writing dirty pages, without waiting
            finally:
                os.close(handle)
    sync_directory(root.parent)


def _tree(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield every directory (True) and regular file below ``root``, itself included, a directory before what is in it."""
    if not stat.S_ISDIR(root.lstat().st_mode):
        yield os.fspath(root), False
        return
    left = [os.fspath(root)]
    while left:
        folder = left.pop()
        yield folder, True
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path, False


def boot_id() -> str:
    """Return the id of this boot of the machine; the same text on every boot where the kernel tells none."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return "unknown"
