"""Resources that a job could have left in this process: files, terminals, threads, child processes, memory."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_GROWN_BYTES: Final = 64 * 1024 * 1024
_OF_RAY: Final = ("socket:", "anon_inode:", "/proc/")
"""Prefixes of what Ray opens and closes at any time: its connections, and files of /proc about its own process."""

_PROC: Final = Path("/proc/self")
_POOL: Final = ("asyncio_", "uvloop_")
"""Prefixes of the threads of ``asyncio.to_thread``, which keep nothing of their calls; Ray uses uvloop if installed."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that this process held at one time."""

    files: frozenset[str]
    threads: frozenset[str]
    processes: frozenset[str]
    memory_bytes: int

    @classmethod
    def now(cls) -> Self:
        """Return the present footprint of this process."""
        names = frozenset(thread.name for thread in threading.enumerate() if not thread.name.startswith(_POOL))
        children = frozenset(f"process {pid}" for pid in _children())
        return cls(frozenset(_open_files()), names, children, _resident_bytes())

    def grown(self) -> tuple[str, ...]:
        """Return what the process now holds beyond this footprint; empty: nothing."""
        now = self.now()
        pairs = ((now.files, self.files), (now.threads, self.threads), (now.processes, self.processes))
        found = [name for later, earlier in pairs for name in sorted(later - earlier)]
        if now.memory_bytes - self.memory_bytes > MOST_GROWN_BYTES:
            found.append(f"{now.memory_bytes - self.memory_bytes} bytes")
        return tuple(found)


def _open_files() -> Iterator[str]:
    for descriptor in (_PROC / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as the directory's own
            target = str(descriptor.readlink())
            if not target.startswith(_OF_RAY):
                yield target


def _children() -> list[str]:
    found: list[str] = []
    for task in (_PROC / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += (task / "children").read_text().split()
    return found


def _resident_bytes() -> int:
    return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
