"""Linux calls that Python lacks, and functions that undo what a process inherits from a Ray worker.

Owns prctl and signal dispositions; contains nothing about jobs. Everything here is callable between fork and user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat

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


def set_title(text: str) -> None:
    """Set the command line that `ps` shows; cut to the size of the original one (startup.py's --room).

    The kernel shows the text up to its first NUL when the last byte of the arguments' memory is not one.
    """
    start, end = _title_area()
    data = text.encode(errors="replace").replace(b"\0", b" ")[: end - start - 2]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))
    ctypes.memset(end - 1, ord("."), 1)


def _title_area() -> tuple[int, int]:
    """Return where the kernel finds this process's arguments: fields 48 and 49 of its stat file."""
    fields = stat_fields()
    return int(fields[45]), int(fields[46])


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


def loaded_libraries() -> frozenset[str]:
    """Return the files from which this process has mapped code."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        fields = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    return frozenset(parts[5] for parts in fields if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/"))


def end_without_exit_handlers() -> bool:
    """Make C's `exit` flush its streams and end the process without running handlers registered before this call.

    Handlers run in the reverse order of their registration: those that are registered after this call still run. False where the C library
    has no `on_exit` (musl), or it fails: the process then ends as usual.
    """
    try:
        register, flush, end = _libc.on_exit, _libc.fflush, _libc._exit  # noqa: SLF001 - a function of C
        at_exit = _libc["__cxa_atexit"]
    except AttributeError:
        return False
    # `on_exit` passes the exit code to its function, `__cxa_atexit` its argument: fflush(NULL) flushes all streams.
    if register(ctypes.cast(end, ctypes.c_void_p), None) != 0:
        return False
    at_exit(ctypes.cast(flush, ctypes.c_void_p), None, None)
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
