"""T, from the fork to the user's first line.

Owns what the kernel records of the process: session, parent, descriptors, signals, directory. Ends either in a
`Program` for server.py to run, or in exec. Every failure here is reported once, in the process's stderr and to its
keeper, with the exit code a shell would give: 127 not found, 126 not executable. Also runs the rendezvous store of an attempt.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import fcntl
import functools
import importlib
import os
import signal
import socket
import sys
import termios
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from . import interpreter, linux, warm
from .holder import MARK
from .masking import Masker
from .reports import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS, Reports, clip

if TYPE_CHECKING:
    from types import TracebackType

    from .interpreter import Run
    from .warm import Baseline
    from .wire import Spawn

EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
MOST_LIKELY_VICTIM = 1000
"""The highest oom_score_adj: the kernel kills such a process before any other with a lower value."""

MAX_CAUSES = 5
MAX_PATH_CHARACTERS = 4096

_FIRST_SPARE_FD = 64
_HERE = os.path.dirname(__file__)
_OPEN = b"."
# Longest wait of a client for a key; the ranks' own timeouts are shorter, and their messages say more.
_TIMEOUT = dt.timedelta(days=1)


class Gate:
    """Pipe between keeper and child, created before the fork: the child prepares itself, then waits before its first line."""

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def for_child(self) -> int:
        """Return the end that the child reads from, and close the other one, in the child."""
        os.close(self._writer)
        return self._reader

    def for_keeper(self) -> None:
        """Close the child's end, in the keeper."""
        os.close(self._reader)

    def open(self) -> None:
        """Let the child continue, in the keeper; later calls do nothing."""
        writer, self._writer = self._writer, -1
        if writer >= 0:
            with contextlib.suppress(BrokenPipeError):  # the child has ended
                os.write(writer, _OPEN)
            os.close(writer)


def pass_gate(reader: int) -> None:
    """Wait in the child until the gate opens; end the child if its keeper has ended.

    The parent-death signal arrives a moment after the keeper's files are closed.
    """
    if os.read(reader, 1) != _OPEN:
        os._exit(1)
    os.close(reader)


@dataclass(frozen=True, slots=True)
class Child:
    """The process of one keeper."""

    pid: int
    started_at: float
    reports: Reports
    gate: Gate


class Program:
    """Program that server.py runs once all frames of this package have returned."""

    def __init__(self, run: Run, reports: Reports) -> None:
        self._run: Run | None = run
        self._reports = reports

    def take(self) -> Run:
        """Return what to run, and drop it: its namespace must be freed with its module, or files are not flushed."""
        run, self._run = self._run, None
        assert run is not None
        return run

    def failing(self, error: BaseException) -> None:
        """Report what the program raised, before the interpreter prints it and ends."""
        error.__traceback__ = _without_our_frames(error.__traceback__)
        if not isinstance(error, SystemExit) or not isinstance(error.code, int | None):
            report_failure(self._reports, error)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE + os.sep):
        trace = trace.tb_next
    return trace


def launch(spawn: Spawn, baseline: Baseline, reports: Reports, keeper_pid: int, gate: int) -> Program:
    """Set up the new process, with all signals blocked; return what to run, or do not return.

    None of the user's code runs before the keeper opens the gate, whose reader is `gate`.
    """
    reports.attach_writer()
    reports.masker = Masker(spawn.secrets)
    if not linux.die_with_parent(keeper_pid):
        os._exit(1)  # the keeper died before the request; no process is left to report to
    os.setsid()
    linux.allow_looks()
    linux.set_process_name(baseline.process_name)
    if spawn.umask is not None:
        os.umask(spawn.umask)
    gate = _place_descriptors(spawn, baseline, gate)
    _enter(spawn.cwd, reports)
    if spawn.lease is not None or spawn.stdin is not None:
        _mark(spawn)
    if spawn.mode == "command":
        pass_gate(gate)
        _execute((spawn.target, *spawn.args), spawn.env, reports, cold=None)
    if spawn.mode == "store":
        pass_gate(gate)
        return _become_store(spawn, baseline, reports)
    reason = _cold_reason(spawn, baseline)
    if reason is not None:
        flag = ["-m"] if spawn.mode == "module" else []
        argv = (baseline.python, "-u", *spawn.python_options, *flag, spawn.target, *spawn.args)
        pass_gate(gate)
        _execute(argv, spawn.env, reports, cold=reason)
    interpreter.restore(spawn, baseline)
    run = interpreter.prepare(spawn)
    pass_gate(gate)
    linux.reset_signals(python=True)
    interpreter.note_sigterm(reports.note_sigterm)
    interpreter.connect_debugger()
    _report_started(reports, cold=None)
    linux.unblock_signals()
    return Program(run, reports)


def _mark(spawn: Spawn) -> None:
    """Make the kernel prefer this tree when memory runs out, and mark it so that it can be found without its keeper."""
    linux.adjust_oom_score(MOST_LIKELY_VICTIM)
    mark = spawn.env.get(MARK)
    if mark is not None:
        linux.mark_environment(MARK, mark)


def _cold_reason(spawn: Spawn, baseline: Baseline) -> str | None:
    if spawn.cold or baseline.cold is not None:
        return "asked for" if spawn.cold else baseline.cold
    if spawn.target == "-":
        return "script from standard input"
    return warm.cold_reason(baseline, spawn.env, spawn.python_options, interpreter.search_path(spawn))


def report_failure(reports: Reports, error: BaseException) -> None:
    """Report to the keeper the exception that is about to end the process."""
    text = "".join(traceback.format_exception(error))
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # a broken __str__ is the user's, and no reason to lose the report
        message = "(its text cannot be shown)"
    _report_error(reports, name, message, text, missing_file=_missing_file(error))


def _missing_file(error: BaseException) -> str:
    """Return the missing file that the exception, or the one it was raised from, names."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if isinstance(cause, FileNotFoundError) and isinstance(cause.filename, str | bytes):
            return clip(os.fsdecode(cause.filename), MAX_PATH_CHARACTERS)
        cause = None if cause is None else cause.__cause__
    return ""


def _report_error(reports: Reports, name: str, message: str, text: str, *, missing_file: str = "") -> None:
    reports.send(
        {
            "event": "error",
            "type": name,
            "missing_file": missing_file,
            "message": clip(reports.masker.text(message), MAX_MESSAGE_CHARACTERS),
            "traceback": clip(reports.masker.text(text), MAX_TRACEBACK_CHARACTERS),
            "at": time.time(),
        }
    )


def _report_started(reports: Reports, *, cold: str | None) -> None:
    reports.send({"event": "started", "pid": os.getpid(), "cold": cold, "at": time.time()})


def _become_store(spawn: Spawn, baseline: Baseline, reports: Reports) -> Program:
    interpreter.restore(spawn, baseline)
    linux.set_process_name("orch-store")
    linux.reset_signals(python=True)
    _report_started(reports, cold=None)
    linux.unblock_signals()
    assert spawn.listen is not None
    return Program(functools.partial(_serve_store, spawn.listen), reports)


def _place_descriptors(spawn: Spawn, baseline: Baseline, gate: int) -> int:
    """Make 0 the requested stdin or /dev/null, place 1 and 2, and close all others.

    Returns the new number of `gate`.
    """
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    wanted = {0: null if spawn.stdin is None else spawn.stdin, 1: spawn.stdout, 2: spawn.stderr}
    # First moved to unused numbers: a source may have the number that is another one's target.
    first = max(_FIRST_SPARE_FD, *wanted, *wanted.values()) + 1
    gate = fcntl.fcntl(gate, fcntl.F_DUPFD_CLOEXEC, first)
    spare = {target: fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, first) for target, source in wanted.items()}
    for target, source in spare.items():
        os.dup2(source, target, inheritable=True)
    keep = set(wanted) | set(baseline.descriptors) | {gate}
    if spawn.listen is not None:
        keep.add(spawn.listen)
    linux.close_all_but(keep)
    if spawn.stdin is not None and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    return gate


def _enter(directory: str, reports: Reports) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        _fail(reports, error, f"cannot enter the working directory {directory}: {error.strerror}", EXIT_NOT_FOUND)


def _execute(argv: tuple[str, ...], env: dict[str, str], reports: Reports, *, cold: str | None) -> NoReturn:
    _report_started(reports, cold=cold)
    linux.reset_signals(python=False)
    linux.unblock_signals()
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        found = error.errno not in (errno.ENOENT, errno.ENOTDIR)
        what = f"cannot execute {argv[0]!r}: {error.strerror}"
        hint = "is it executable, and does its first line name an interpreter?" if found else "is it in the job's PATH?"
        _fail(reports, error, f"{what}; {hint}", EXIT_NOT_EXECUTABLE if found else EXIT_NOT_FOUND)


def _fail(reports: Reports, error: OSError, message: str, code: int) -> NoReturn:
    os.write(2, f"orch: {message}\n".encode(errors="backslashreplace"))
    _report_error(reports, type(error).__name__, message, "")
    sys.stdout.flush()
    os._exit(code)


def _serve_store(listen_fd: int) -> None:
    """Serve until the process is killed; raise when the socket or this interpreter's torch is unsuitable."""
    distributed = importlib.import_module("torch.distributed")
    with socket.socket(fileno=listen_fd) as listener:
        host, port = listener.getsockname()[:2]
        listener.detach()  # the store owns it from here
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - bound by the caller
    store = distributed.TCPStore(
        wildcards.get(host, host),
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    while store is not None:
        signal.pause()
