"""Makes a forked interpreter look fresh, and prepares the program that then runs as `__main__`.

Owns the state that Python and torch keep in memory and that a process started by hand would have afresh. The result is a
callable that server.py calls from its outermost frame, so that only this frame is below the user's code. State that
cannot be made fresh is found by cold_start.py.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import importlib.util
import marshal
import os
import pkgutil
import runpy
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import linux, warm

if TYPE_CHECKING:
    from ..request import Spawn
    from ..warm import Baseline

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


def rehearse() -> None:
    """Write to the pages that every training process writes to, before its request: the first write copies a page."""
    os.environ.update(dict(os.environ))
    _restore_random_state()
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch.optim" in sys.modules:
        warm.train_once(torch)


def prepare(spawn: Spawn) -> Run:
    """Set argv, path and `__main__` for the script or module; return the callable that runs it."""
    search = search_path(spawn)
    if not sys.flags.safe_path:
        sys.path.insert(0, search)
    flag = ["-m"] if spawn.mode == "module" else []
    sys.orig_argv[:] = [sys.executable, "-u", *flag, spawn.target, *spawn.args]
    linux.set_title(" ".join(sys.orig_argv))
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
