"""A control group for each training process: limits its memory, counts its use, and kills all of its processes.

Owns the files below /sys/fs/cgroup, of both versions, and one directory name. Where they are not writable, as in most
containers and for users without delegation, there is no group, and every function here returns None or False.

A group is created below the group that the fork server runs in, so a service manager that ends its own group ends the ranks
too. With version 2 a group that holds processes cannot enable the memory controller below it: a new group there can be used
to find and to end processes, but not to limit their memory (`CgroupParent.has_memory`). A parent that was delegated to this
user is then preferred.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from dataclasses import dataclass

ROOT = "/sys/fs/cgroup"
PREFIX = "orch-rank-"
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near the largest one."""

_DELEGATED = ("user.delegate", "trusted.delegate")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_FILES = {
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.peak", "memory.events"),
}


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A group below which this process may create others."""

    path: str
    version: int
    has_memory: bool
    """Groups below it can limit memory."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory use of a group's processes since its creation; None where the kernel does not report it."""

    peak_bytes: int | None
    limit_bytes: int | None
    kills: int


def find_place(root: str = ROOT, membership: str = "/proc/self/cgroup") -> CgroupParent | None:
    """Return where this process may create groups; None where it may not."""
    try:
        lines = _read(membership).splitlines()
    except OSError:
        return None
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
    for controllers, path in own.items():
        if "memory" in controllers.split(","):
            directory = _below(f"{root}/memory", path)
            return CgroupParent(directory, 1, True) if _writable(directory) else None
    if "" not in own:
        return None
    base = root if os.path.exists(f"{root}/cgroup.controllers") else f"{root}/unified"
    return _unified_place(base, own[""])


def memory_group() -> str:
    """Return the group below which this process may make groups that limit memory; empty where there is none."""
    place = find_place()
    return place.path if place is not None and place.has_memory else ""


def _unified_place(base: str, path: str) -> CgroupParent | None:
    directory = _below(base, path)
    parent = os.path.dirname(directory)
    # systemd's DelegateSubgroup= puts the service into its own group below the delegated one.
    if directory != base and _is_delegated(parent) and _writable(parent) and _passes_memory_on(parent):
        return CgroupParent(parent, 2, True)
    if not _writable(directory):
        return None
    return CgroupParent(directory, 2, _passes_memory_on(directory))


def _below(base: str, path: str) -> str:
    """Return a group's directory, or `base` where it does not exist: a container may see its own group as the root."""
    directory = os.path.normpath(f"{base}/{path.lstrip('/')}")
    return directory if os.path.isdir(directory) else base


def _writable(directory: str) -> bool:
    return os.access(directory, os.W_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK)


def _is_delegated(directory: str) -> bool:
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    with contextlib.suppress(OSError):
        return os.geteuid() != 0 and os.stat(directory).st_uid == os.geteuid()
    return False


def _passes_memory_on(directory: str) -> bool:
    """Whether groups below have the memory controller; enables it where the kernel allows that."""
    with contextlib.suppress(OSError):
        if "memory" in _read(f"{directory}/cgroup.subtree_control").split():
            return True
        if "memory" in _read(f"{directory}/cgroup.controllers").split():
            _write(f"{directory}/cgroup.subtree_control", "+memory")  # EBUSY: the group holds processes
            return True
    return False


class Group:
    """One process's group. Its keeper creates it and removes it when no process is left in it."""

    def __init__(self, path: str, version: int, *, has_memory: bool) -> None:
        self.path = path
        self._version = version
        self._has_memory = has_memory

    @classmethod
    def create(cls, place: CgroupParent | None) -> Group | None:
        """Create an empty group with a unique name; None where that is not possible."""
        if place is None:
            return None
        path = f"{place.path}/{PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        try:
            os.mkdir(path, 0o755)
        except OSError:
            return None
        return cls(path, place.version, has_memory=place.has_memory)

    @classmethod
    def open(cls, path: str, root: str = ROOT) -> Group | None:
        """Open an existing group by the path that a keeper recorded; None when it is gone or not one of ours."""
        inside = os.path.normpath(path) == path and path.startswith(f"{root}/")
        if not inside or not os.path.basename(path).startswith(PREFIX) or not os.path.isdir(path):
            return None
        version = 1 if os.path.exists(f"{path}/tasks") else 2
        return cls(path, version, has_memory=os.path.exists(f"{path}/{_FILES[version][0]}"))

    def join(self, pid: int) -> bool:
        """Move a process into the group; processes that it starts later are in the group too."""
        try:
            _write(f"{self.path}/cgroup.procs", str(pid))
        except OSError:
            return False
        return True

    def limit_memory(self, size: int) -> bool:
        """Limit the group to `size` bytes of memory, page cache and shared memory included; False where that fails."""
        if not self._has_memory:
            return False
        try:
            _write(f"{self.path}/{_FILES[self._version][0]}", str(size))
        except OSError:
            return False
        return True

    def usage(self) -> Usage | None:
        """Return what the group used; None where the kernel does not count it."""
        if not self._has_memory:
            return None
        limit, peak, events = (self._file(name) for name in _FILES[self._version])
        found = _COUNT.search(events)
        limit_bytes = int(limit) if limit.strip().isdigit() else None
        return Usage(
            peak_bytes=int(peak) if peak.strip().isdigit() else None,
            limit_bytes=limit_bytes if limit_bytes is not None and limit_bytes < NO_LIMIT_BYTES else None,
            kills=int(found[1]) if found else 0,
        )

    def _file(self, name: str) -> str:
        try:
            return _read(f"{self.path}/{name}")
        except OSError:
            return ""

    def members(self) -> list[int]:
        """List the processes in the group and in groups below it; the kernel leaves out those that are ending."""
        found: list[int] = []
        for directory in self._directories():
            with contextlib.suppress(OSError):
                found += [int(word) for word in _read(f"{directory}/cgroup.procs").split()]
        return found

    def _directories(self) -> list[str]:
        """List the group's directory and those below it, each before what is in it; a job may have nested any number."""
        found = [self.path]
        for directory in found:  # which grows meanwhile
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        return found

    def kill(self) -> None:
        """Send SIGKILL to every process in the group. With version 1 processes forked meanwhile need a second call."""
        with contextlib.suppress(OSError):
            _write(f"{self.path}/cgroup.kill", "1")
            return
        for pid in self.members():
            if pid > 0:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; False while a process is in it, even one that has ended and still has memory."""
        for directory in reversed(self._directories()[1:]):  # created by the process itself
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        try:
            os.rmdir(self.path)
        except OSError as error:
            return error.errno not in (errno.EBUSY, errno.ENOTEMPTY)
        return True


def remove_empty(place: CgroupParent | None) -> None:
    """Remove the groups of keepers that were killed; keep those that hold a process."""
    if place is None:
        return
    for name in os.listdir(place.path):
        if name.startswith(PREFIX):
            with contextlib.suppress(OSError):
                os.rmdir(f"{place.path}/{name}")


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode("ascii"))
    finally:
        os.close(handle)
