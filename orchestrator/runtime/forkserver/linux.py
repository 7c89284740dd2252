"""Linux calls that Python lacks, functions that undo what a process inherits from a Ray worker, and trees of processes.

Owns prctl, signal dispositions and /proc; contains nothing about jobs. Everything here is callable between fork and user code.

Each sweep over a tree reads parents and children from the kernel anew, because a process that forks while it is being killed makes
every list stale. The caller repeats sweeps, one after each child's death, until waitpid reports no child (ECHILD). With
the caller a subreaper this terminates: a killed process no longer forks, and orphans become the caller's own children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2 ** (8 * ctypes.sizeof(ctypes.c_ulong)) - 1
_READ_BYTES = 65536

# Resolved once, in the fork server: a keeper should not call dlopen between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)

ALL_SIGNALS = frozenset(signal.valid_signals())
_CANNOT_BE_HANDLED = {signal.SIGKILL, signal.SIGSTOP}
# A Python process starts with these ignored; a program that it executes expects them at their default.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> bool:
    """Request SIGKILL at the death of the parent. False: the parent is already dead, and the caller must end itself."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def allow_looks() -> None:
    """Let processes of the same user read this one's stacks where Yama would allow only its ancestors to do so."""
    with contextlib.suppress(OSError):  # EINVAL: a kernel without Yama, which forbids nothing
        _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show; the kernel cuts it at 15 bytes."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def process_name() -> str:
    """Return the kernel's short name of this process."""
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        return file.read().rstrip("\n")


def mark_environment(name: str, value: str) -> bool:
    """Write `value` into /proc/self/environ, over what the process was started with under `name`.

    Forks inherit it. False when the process was started without the variable, or with too short a value.
    """
    fields = stat_fields()
    start, end = int(fields[47]), int(fields[48])
    area = ctypes.string_at(start, end - start)
    prefix = f"{name}=".encode()
    at = 0 if area.startswith(prefix) else area.find(b"\0" + prefix) + 1
    data = value.encode(errors="surrogateescape")
    if not area.startswith(prefix) and at == 0:
        return False
    at += len(prefix)
    room = area.index(b"\0", at) - at
    if len(data) > room or b"\0" in data:
        return False
    ctypes.memset(start + at, 0, room)
    ctypes.memmove(start + at, data, len(data))
    return True


def stat_fields(pid: int | str = "self") -> list[bytes]:
    """Return a process's stat file from its third field, the state, on; the second may hold spaces and parentheses."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2].split()


def start_ticks(pid: int | str = "self") -> int:
    """Return the start of a process in clock ticks since the boot; with its number this identifies the process."""
    return int(stat_fields(pid)[19])


def boot_id() -> str:
    """Return the kernel's identifier of the current boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def reset_signals(*, python: bool) -> None:
    """Reset every signal to its default, as after exec; with `python`, to those of a fresh Python interpreter.

    The mask is unchanged: callers fork with all signals blocked and unblock them when they are ready.
    """
    signal.set_wakeup_fd(-1)
    for number in ALL_SIGNALS - _CANNOT_BE_HANDLED:
        # The C library keeps two real-time signals for itself.
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
    if python:
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def block_signals() -> None:
    """Block all signals until unblock_signals, so that none runs a handler inherited from the parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)


def unblock_signals() -> None:
    """Unblock all signals, as in a process started by hand."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL_SIGNALS)


def restore_priorities() -> None:
    """Undo the nice level and the out-of-memory score of Ray's workers, where this user may.

    Lowering a nice level needs a privilege; without it the level stays and `hello` reports it.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    adjust_oom_score(0)


def adjust_oom_score(value: int) -> bool:
    """Set this process's oom_score_adj, which its children inherit; False where the kernel refuses.

    Raising it needs no privilege, nor does lowering it to the value with which a privileged process started this one.
    """
    try:
        handle = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(handle, str(value).encode("ascii"))
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def oom_score_adjustment() -> int:
    """Return the calling process's oom_score_adj, -1000 to 1000."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


def open_descriptors() -> set[int]:
    """Return the numbers of this process's open file descriptors."""
    numbers = {int(name) for name in os.listdir("/proc/self/fd")}
    # The listing's own descriptor is among them, and is closed by now.
    return {number for number in numbers if _is_open(number)}


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def read_end(descriptor: int) -> int | None:
    """Open a read end of the pipe that ``descriptor`` writes to; None for anything else, or where that fails."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def drop_output(pipe: int) -> bool:
    """Discard the output of a rank without an owner: its writes would block at a full pipe, and fail at a closed one.

    Close the pipe and return False when every writer has closed it.
    """
    try:
        if os.read(pipe, _READ_BYTES):
            return True
    except BlockingIOError:
        return True
    os.close(pipe)
    return False


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    low = 0
    for number in sorted(keep):
        if number > low:
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, max(open_descriptors() | {low}) + 1)


# -- trees of processes


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


def _children_from_scan() -> Callable[[int], list[int]]:
    """Return a function that gives a process's children, as they are now."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                below.setdefault(int(stat_fields(int(name))[1]), []).append(int(name))
    return lambda pid: below.get(pid, [])


def _below(root: int, children_of: Callable[[int], list[int]]) -> list[int]:
    found = [root]
    for pid in found:  # which grows meanwhile
        found += children_of(pid)
    return found[1:]


def descendants(root: int) -> list[int]:
    """List every process below `root` at this moment, zombies included, parents before their children.

    The per-task lists are quick but may miss a process while its siblings end, and not every kernel has them; an empty
    result is therefore confirmed by a scan of /proc, which is slow (about 20 µs a process) but complete.
    """
    return _below(root, _children_from_tasks) or _below(root, _children_from_scan())


def children(parent: int) -> list[int]:
    """List the direct children of `parent`, zombies included."""
    return _children_from_tasks(parent) or _children_from_scan()(parent)


def kill_sweep(root: int) -> int:
    """Send SIGKILL to every process below `root`; return how many there were.

    A number read from /proc could belong to another process by the time it is used, but only after the kernel has
    gone once around its whole range of process numbers within microseconds.
    """
    found = descendants(root)
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
