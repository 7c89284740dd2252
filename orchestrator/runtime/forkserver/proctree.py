"""Finds and kills every process below another one.

Each sweep reads parents and children from the kernel anew, because a process that forks while it is being killed makes
every list stale. The caller repeats sweeps, one after each child's death, until waitpid reports no child (ECHILD). With
the caller a subreaper this terminates: a killed process no longer forks, and orphans become the caller's own children.
"""

from __future__ import annotations

import os
import signal

_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # CONFIG_PROC_CHILDREN


def _read(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 65536)
    finally:
        os.close(handle)


def _children_from_tasks(pid: int) -> list[int]:
    """Return the children of all threads of a process; empty when it has ended."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.extend(int(word) for word in file.read().split())
    except OSError:
        pass
    return found


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = _read(f"/proc/{name}/stat")
            except OSError:
                continue  # it has ended meanwhile
            # pid (comm) state ppid …: comm may hold spaces and parentheses, so cut at the last one.
            parents[int(name)] = int(stat[stat.rindex(b")") + 2 :].split(maxsplit=2)[1])
    return parents


def _descendants_from_scan(root: int) -> list[int]:
    below: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        below.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        children = below.get(queue.pop(), [])
        found.extend(children)
        queue.extend(children)
    return found


def _descendants_from_tasks(root: int) -> list[int]:
    found: list[int] = []
    queue = [root]
    while queue:
        children = _children_from_tasks(queue.pop())
        found.extend(children)
        queue.extend(children)
    return found


def descendants(root: int, *, from_lists: bool = _HAS_CHILDREN_FILES) -> list[int]:
    """List every process below `root` at this moment, zombies included, parents before their children.

    The per-task lists are quick but may miss a process while its siblings end, and not every kernel has them; an empty
    result is therefore confirmed by a scan of /proc, which is slow (about 20 µs a process) but complete. `from_lists` false
    uses only the scan.
    """
    found = _descendants_from_tasks(root) if from_lists else []
    return found or _descendants_from_scan(root)


def children(parent: int, *, from_lists: bool = _HAS_CHILDREN_FILES) -> list[int]:
    """List the direct children of `parent`, zombies included."""
    if from_lists:
        return _children_from_tasks(parent)
    return [pid for pid, its_parent in _parents().items() if its_parent == parent]


def kill_sweep(root: int, *, from_lists: bool = _HAS_CHILDREN_FILES) -> int:
    """Send SIGKILL to every process below `root`; return how many there were.

    A number read from /proc could belong to another process by the time it is used, but only after the kernel has
    gone once around its whole range of process numbers within microseconds.
    """
    found = descendants(root, from_lists=from_lists)
    for pid in found:
        kill(pid, signal.SIGKILL)
    return len(found)


def kill(pid: int, number: int) -> bool:
    """Send a signal; False when the process no longer exists or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
