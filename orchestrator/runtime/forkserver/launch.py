"""T, from the fork to the user's first line: what the kernel records of the process, and the interpreter that looks fresh.

Owns session, parent, descriptors, signals and directory, and the state that Python and torch keep in memory and that a process started by hand would
have afresh. Ends either in a `Program` for server.py to run, so that only its outermost frame is below the user's code, or in exec. Every failure here
is reported once, in the process's stderr and to its keeper, with the exit code a shell would give: 127 not found, 126 not executable. State that
cannot be made fresh is found by warm.cold_reason. Also runs the rendezvous store of an attempt.

Adds two things to a script's interpreter. A SIGTERM that reaches one of its handlers is recorded: a script may exit with 0 after a
SIGTERM, as after its last step, so its exit status is no evidence. Therefore the two functions of the `signal` module through which
Python code sets and reads handlers are replaced: a SIGTERM handler is called through an object that records the time first, and the
script still sees its own handler. Without a handler of the script nothing is installed: SIGTERM then ends the process, and its status
shows it. A handler set by C code, or in a program that the process executes, is not seen. And `breakpoint()` uses the rank's terminal
(`sys.breakpointhook`), because a rank's standard input is the null device, at whose end of file `pdb` gives up.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime as dt
import errno
import fcntl
import functools
import importlib
import importlib.machinery
import importlib.util
import marshal
import os
import pkgutil
import runpy
import shlex
import signal
import socket
import sys
import termios
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from . import linux, warm
from .holder import MARK
from .masking import Masker
from .reports import MAX_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS, Reports, clip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from .warm import Baseline
    from .wire import Spawn

Run = Callable[[], object]

EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
CANNOT_EXECUTE = "CannotExecute"
"""The type of the error that is reported for a program that cannot be executed."""
_ELF = b"\x7fELF"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 256  # what the kernel reads of a first line
MAX_LIKELY_VICTIM = 1000
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
    restore(spawn, baseline)
    run = prepare(spawn)
    pass_gate(gate)
    linux.reset_signals(python=True)
    note_sigterm(reports.note_sigterm)
    connect_debugger()
    _report_started(reports, cold=None)
    linux.unblock_signals()
    return Program(run, reports)


def _mark(spawn: Spawn) -> None:
    """Make the kernel prefer this tree when memory runs out, and mark it so that it can be found without its keeper."""
    linux.adjust_oom_score(MAX_LIKELY_VICTIM)
    mark = spawn.env.get(MARK)
    if mark is not None:
        linux.mark_environment(MARK, mark)


def _cold_reason(spawn: Spawn, baseline: Baseline) -> str | None:
    if spawn.cold or baseline.cold is not None:
        return "asked for" if spawn.cold else baseline.cold
    if spawn.target == "-":
        return "script from standard input"
    return warm.cold_reason(baseline, spawn.env, spawn.python_options, search_path(spawn))


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
    restore(spawn, baseline)
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
        message = f"cannot enter the working directory {directory}: {error.strerror}"
        _fail(reports, type(error).__name__, message, EXIT_NOT_FOUND)


def _execute(argv: tuple[str, ...], env: dict[str, str], reports: Reports, *, cold: str | None) -> NoReturn:
    _report_started(reports, cold=cold)
    linux.reset_signals(python=False)
    linux.unblock_signals()
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        path = _lookup(argv[0], env)
        missing = argv[0] if path is None and os.sep in argv[0] else ""
        message = f"cannot execute {argv[0]!r}: {why_not_executed(argv[0], path, error)}"
        code = EXIT_NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else EXIT_NOT_EXECUTABLE
        _fail(reports, CANNOT_EXECUTE, message, code, missing_file=missing)


def _lookup(program: str, env: dict[str, str]) -> str | None:
    """Return the path that `os.execvpe` tried, as far as there is a file."""
    folders = [""] if os.sep in program else os.get_exec_path(env)
    return next((path for path in (os.path.join(folder, program) for folder in folders) if os.path.lexists(path)), None)


def why_not_executed(program: str, path: str | None, error: OSError) -> str:
    """Return the reason of a failed exec of ``path`` (None: no such file), with what to do.

    The kernel has one error for several reasons: "No such file or directory" is also that of a script whose interpreter is missing.
    """
    if path is None:
        named = os.sep in program
        hint = "a relative path begins at the job's working directory" if named else "is it in the job's PATH?"
        return f"{error.strerror}; {hint}"
    if os.path.isdir(path):
        return "it is a directory"
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)!r}, which does not exist on this machine"
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        head = b""
    if error.errno == errno.EACCES:
        return _why_not_permitted(path, head)
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOEXEC):
        return str(error.strerror)
    if head.startswith(b"#!"):
        return _why_not_interpreted(path, head)
    if head.startswith(_ELF) and error.errno == errno.ENOENT:
        return "its dynamic loader is missing on this machine (`readelf -l` names it)"
    if head.startswith(_ELF):
        return "it is a program for another kind of processor (`file` says which)"
    if head.startswith(_BYTE_ORDER_MARK):
        fix = f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(path)} removes it"
        return f"a byte order mark precedes its first line: {fix}"
    lacks = "its first line names no interpreter, as #!/bin/bash does" if head else "the file is empty"
    return f"{error.strerror}; {lacks}"


def _interpreter(head: bytes) -> str:
    """Return the interpreter that a script's first line names, as the kernel reads it: up to a blank or the line's end."""
    words = head[2:].split(b"\n")[0].strip(b" \t").replace(b"\t", b" ")
    return os.fsdecode(words.split(b" ")[0]) if head.startswith(b"#!") else ""


def _why_not_interpreted(path: str, head: bytes) -> str:
    name = _interpreter(head)
    if name.endswith("\r"):
        fix = f"sed -i 's/\\r$//' {shlex.quote(path)} removes them"
        return f"its first line names the interpreter {name!r}, which does not exist: the file has Windows line ends; {fix}"
    if not name:
        return "its first line, #!, names no interpreter"
    if os.path.exists(name):
        return f"its first line names the interpreter {name!r}, which cannot be executed itself"
    return f"its first line names the interpreter {name!r}, which does not exist on this machine"


def _why_not_permitted(path: str, head: bytes) -> str:
    if not os.access(path, os.X_OK):
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return "its file system is mounted with noexec: give its interpreter as the program, and it as an argument"
        return f"it is not executable: chmod +x {shlex.quote(path)}"
    name = _interpreter(head)
    if name and not os.access(name, os.X_OK):
        return f"its first line names the interpreter {name!r}, which is not executable"
    return str(os.strerror(errno.EACCES))


def _fail(reports: Reports, name: str, message: str, code: int, *, missing_file: str = "") -> NoReturn:
    os.write(2, f"orch: {message}\n".encode(errors="backslashreplace"))
    _report_error(reports, name, message, "", missing_file=missing_file)
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


# -- an interpreter that looks fresh


def search_path(spawn: Spawn) -> str:
    """Return what a fresh interpreter would put at sys.path[0]; the process is already in its working directory."""
    if spawn.mode == "module":
        return os.getcwd()
    if _is_importable(spawn.target):
        return _absolute(spawn.target)
    return os.path.dirname(os.path.realpath(spawn.target))


def restore(spawn: Spawn, baseline: Baseline) -> None:
    """Restore the state of a fresh interpreter that every kind of program needs."""
    _restore_environment(spawn)
    sys.path[:] = baseline.sys_path
    for name in baseline.own_modules:
        sys.modules.pop(name, None)
    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):
        main._set_native_id()  # noqa: SLF001 - before 3.12 a fork keeps its parent's
    _restore_imported_modules()
    _restore_random_state()
    _restore_threads(spawn, baseline)


def prepare(spawn: Spawn) -> Run:
    """Set argv, path and `__main__` for the script or module; return the callable that runs it."""
    search = search_path(spawn)
    if not sys.flags.safe_path:
        sys.path.insert(0, search)
    flag = ["-m"] if spawn.mode == "module" else []
    sys.orig_argv[:] = [sys.executable, "-u", *flag, spawn.target, *spawn.args]
    main = _fresh_main()
    if spawn.mode == "module":
        sys.argv[:] = ["-m", *spawn.args]
        return functools.partial(runpy._run_module_as_main, spawn.target)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    sys.argv[:] = [spawn.target, *spawn.args]
    if _is_importable(spawn.target):
        return functools.partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    return _prepare_script(spawn.target, main)


def _prepare_script(target: str, main: types.ModuleType) -> Run:
    path = _absolute(target)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        return functools.partial(_cannot_open, path, error)
    main.__file__ = path
    loader_class = importlib.machinery.SourceFileLoader
    try:
        if source[:4] == importlib.util.MAGIC_NUMBER or path.endswith(".pyc"):
            if source[:4] != importlib.util.MAGIC_NUMBER:
                raise RuntimeError("Bad magic number in .pyc file")  # noqa: TRY301 - shown as the script's own
            code = marshal.loads(source[16:])  # noqa: S302 - a .pyc that the user asked to run
            loader_class = importlib.machinery.SourcelessFileLoader  # type: ignore[assignment]  # either reads what was asked for
        else:
            code = compile(source, path, "exec", dont_inherit=True)
    except Exception as error:
        return functools.partial(_raise, error.with_traceback(None))
    main.__loader__ = loader_class("__main__", path)
    main.__dict__["__cached__"] = None
    return functools.partial(exec, code, main.__dict__)


def _absolute(target: str) -> str:
    """Return a script's `__file__` as CPython builds it: joined, not normalised."""
    return os.path.join(os.getcwd(), target)


def _cannot_open(path: str, error: OSError) -> None:
    os.write(2, f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n".encode())
    raise SystemExit(2)


def _raise(error: Exception) -> None:
    raise error


def _is_importable(target: str) -> bool:
    """Whether the target is a folder or an archive with a __main__ inside."""
    return pkgutil.get_importer(_absolute(target)) is not None


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    namespace = vars(main)
    namespace["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's second name for it, made when it was imported
        sys.modules["__mp_main__"] = main
    return main


def _restore_environment(spawn: Spawn) -> None:
    timezone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(spawn.env)
    if os.environ.get("TZ") != timezone:
        time.tzset()


def _restore_imported_modules() -> None:
    """Update what imported modules have stored about the process that imported them."""
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
    logging: Any = sys.modules.get("logging")
    if logging is not None and isinstance(logging._startTime, float):  # noqa: SLF001 - nanoseconds from 3.13 on
        logging._startTime = time.time()  # noqa: SLF001 - as above


def _restore_random_state() -> None:
    """Seed from the operating system, as in every fresh process; Python's own generator reseeds itself at a fork.

    torch's GPU generators start from a constant and are still untouched (warm.py).
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _restore_threads(spawn: Spawn, baseline: Baseline) -> None:
    torch: Any = sys.modules.get("torch")
    count = spawn.threads or _count(spawn.env.get("OMP_NUM_THREADS"))
    if torch is not None and baseline.default_threads is not None:
        torch.set_num_threads(count or baseline.default_threads)
    asked = _count(spawn.env.get("OPENBLAS_NUM_THREADS")) or _count(spawn.env.get("GOTO_NUM_THREADS"))
    blas_count = asked or count or len(os.sched_getaffinity(0))
    if blas_count != 1:  # warm.py set one; the library starts the others when this is called
        for set_threads in baseline.openblas_setters:
            set_threads(blas_count)


def _count(text: str | None) -> int | None:
    """Return a thread count as OpenMP reads it: of a list the first, for the outermost level; None if invalid."""
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


# -- requests to stop


class _Noting:
    """A handler of the script that records each call first."""

    __slots__ = ("handler", "note")

    def __init__(self, handler: Callable[[int, Any], object], note: Callable[[], None]) -> None:
        self.handler, self.note = handler, note

    def __call__(self, number: int, frame: Any) -> object:
        self.note()
        return self.handler(number, frame)


def note_sigterm(note: Callable[[], None]) -> None:
    """Call ``note`` before each call of a SIGTERM handler that Python code sets from now on."""
    set_handler, get_handler = signal.signal, signal.getsignal

    @functools.wraps(set_handler)
    def noting_signal(signalnum: Any, handler: Any) -> Any:
        noting = signalnum == signal.SIGTERM and callable(handler)
        return _of_script(set_handler(signalnum, _Noting(handler, note) if noting else handler))

    @functools.wraps(get_handler)
    def noting_getsignal(signalnum: Any) -> Any:
        return _of_script(get_handler(signalnum))

    signal.signal = noting_signal
    signal.getsignal = noting_getsignal


def _of_script(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Noting) else handler


# -- the debugger


_TERMINAL = "ORCH_TERMINAL"


def connect_debugger() -> None:
    """Make `breakpoint()` read from and write to the rank's terminal, if it has one and the script chooses no other debugger."""
    if os.environ.get(_TERMINAL):
        sys.breakpointhook = _breakpoint


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100 - Python's own hook reads that variable
    _debugger().set_trace(sys._getframe().f_back)  # noqa: SLF001 - as `pdb.set_trace` finds its caller
    return None


@functools.cache
def _debugger() -> Any:
    """Return the debugger of this process. Its modules are imported late: a script's own `code` or `cmd` comes first."""
    import pdb  # noqa: T100 - it is what a breakpoint starts

    class TerminalPdb(pdb.Pdb):
        """Uses the terminal while the prompt is open; an advisory lock on it then shows this to the rank's supervisor."""

        def interaction(self, *args: Any, **kwargs: Any) -> None:
            with _on_terminal(self):
                super().interaction(*args, **kwargs)

    return TerminalPdb()


@contextlib.contextmanager
def _on_terminal(debugger: Any) -> Iterator[None]:
    try:
        descriptor = os.open(os.environ.get(_TERMINAL, ""), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    saved = debugger.stdin, debugger.stdout, debugger.use_rawinput
    try:
        with _opened(descriptor, "r") as source, _opened(descriptor, "w") as sink:
            debugger.stdin, debugger.stdout, debugger.use_rawinput = source, sink, False
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
    finally:
        debugger.stdin, debugger.stdout, debugger.use_rawinput = saved
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would not unlock it: a forked worker has a copy
        os.close(descriptor)


def _opened(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]
