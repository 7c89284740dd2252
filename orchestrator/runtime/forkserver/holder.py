"""The content of a rank's lock file while its process tree lives: enough to find and end the tree without its keeper.

The keeper writes the record before the process runs and clears it when no process is left. A record beside a free lock
therefore means that the keeper was killed: its tree may still live, or its memory may still be being freed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from . import linux

MARK = "ORCH_PROCESS_TREE"
"""The variable that names a rank's tree in the environment of each of its processes."""

MARK_CHARACTERS = 200
_MAX_BYTES = 4096
_MAX_PATH = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a process: its number and its start, in clock ticks since the boot."""

    pid: int
    started: int

    def lives(self) -> bool:
        """Whether the process exists and is not a zombie; it lives until its memory is freed."""
        try:
            fields = linux.stat_fields(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.started and fields[0] not in (b"Z", b"X")

    def open(self) -> int | None:
        """Return a descriptor of the process (pidfd); None where nothing, or another process, has its number."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return None
        if identity_of(self.pid) == self:
            return handle
        os.close(handle)
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """A tree's keeper, the process under it, and its control group, if there is one."""

    keeper: Identity
    process: Identity
    group: str | None


def identity_of(pid: int) -> Identity | None:
    """Return the identity of the process that has this number now; None when there is none."""
    try:
        return Identity(pid, linux.start_ticks(pid))
    except OSError:
        return None


def write(handle: int, holder: Holder) -> None:
    """Write the record into the lock file."""
    text = json.dumps(
        {
            "boot": linux.boot_id(),
            "keeper": [holder.keeper.pid, holder.keeper.started],
            "process": [holder.process.pid, holder.process.started],
            "group": holder.group,
        }
    )
    data = text.encode("ascii")
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))


def clear(handle: int) -> None:
    """Empty the lock file: no process of the tree is left."""
    os.ftruncate(handle, 0)


def is_clear(handle: int) -> bool:
    """Whether the last tree ended under its keeper, or there was none."""
    return os.fstat(handle).st_size == 0


def read(handle: int) -> Holder | None:
    """Read the record of this boot in a lock file; None when there is none or it is invalid."""
    try:
        fields = json.loads(os.pread(handle, _MAX_BYTES, 0))
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("boot") != linux.boot_id():
        return None
    keeper, process, group = _identity(fields.get("keeper")), _identity(fields.get("process")), fields.get("group")
    if keeper is None or process is None or not (group is None or (isinstance(group, str) and len(group) < _MAX_PATH)):
        return None
    return Holder(keeper, process, group)


def _identity(value: Any) -> Identity | None:
    if not isinstance(value, list) or len(value) != 2 or any(type(part) is not int for part in value):
        return None
    pid, started = value
    return Identity(pid, started) if pid > 1 and started >= 0 else None
