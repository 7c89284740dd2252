"""Makes a forked interpreter look fresh, and prepares the program that then runs as `__main__`.

Owns the state that Python and torch keep in memory and that a process started by hand would have afresh. The result is a
callable that server.py calls from its outermost frame, so that only this frame is below the user's code. State that
cannot be made fresh is found by warm.cold_reason.

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
import fcntl
import functools
import importlib.machinery
import importlib.util
import marshal
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .warm import Baseline
    from .wire import Spawn

Run = Callable[[], object]


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
