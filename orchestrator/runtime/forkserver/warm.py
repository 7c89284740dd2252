"""Warms the fork server up once, before it serves; decides later whether a fork of it would differ from a fresh interpreter.

Owns the list of what is worth importing, and the record of a fresh interpreter's state (`Baseline`). Never touches a GPU. Leaves one
thread, the caller's.

A warm start runs the script in the fork; a cold start replaces the fork by a fresh interpreter, which is a second or two slower and exact.
A variable matters when its value differs from the one the fork server started with *and* it has been read already: Python code (recorded
while warming) or code in C, which is listed here by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import linecache
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import linux

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView

# Read by OpenBLAS when numpy loads it: a thread pool in the fork server would make every fork unsafe. The
# interpreter of each training process sets the count that it would have had (launch.py).
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}

# The names differ by build: with 64-bit integers, and with numpy's and scipy's own prefix.
_OPENBLAS_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)

# A process with one of these open has called a driver, and its forks cannot.
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/neuron", "/dev/xpu")

_TORCH_MODULES = (
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch.utils.data.distributed",
)

# Read in C, by the loader, the allocator, the interpreter and the numerical libraries, before any script can run. Found by
# watching getenv while torch 2.13 was imported; PYTORCH_CUDA_ALLOC_CONF is read by builds with CUDA alone.
_PREFIXES = (
    "ACC_",
    "ASAN_",
    "BLIS_",
    "DNNL_",
    "GFORTRAN_",
    "GOMP_",
    "GOTO_",
    "INTEL_LIBITTNOTIFY",
    "I_MPI_",
    "KMP_",
    "LC_",
    "LD_",
    "LSAN_",
    "MALLOC_",
    "MKLDNN_",
    "MKL_",
    "NPY_",
    "NUMPY_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENSSL_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_ALLOW_",
    "TORCH_AUTOGRAD_",
    "TORCH_BLAS_",
    "TORCH_CPP_",
    "TORCH_LINALG_",
    "TORCH_ROCM_",
    "TQDM_",
    "TSAN_",
    "UBSAN_",
)
_NAMES = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "GLIBC_TUNABLES",
        "LANG",
        "THP_MEM_ALLOC_ENABLE",
        "TORCH_CUSTOM_TERMINATE",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_SHOW_CPP_STACKTRACES",
    }
)
# Set through the libraries in the fork, read again at every use, or the same in every training process.
_HANDLED = frozenset(
    {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONBREAKPOINT",
        "PYTHONUNBUFFERED",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
    }
)

_WARM_OPTIONS = frozenset({"-u"})


class NotServableError(Exception):
    """The process must not be forked from; the message names the reason, and the server's log holds more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """State of a fresh interpreter that cannot be read again later."""

    cold: str | None
    """Reason that nothing was imported and every start is a cold one; None: the normal case."""
    python: str
    """The interpreter's path, as the process that started it wrote it."""
    process_name: str
    environ: dict[str, str]
    """Environment with which the interpreter started."""
    own_modules: tuple[str, ...]
    """The names under which this package is imported; hidden from scripts."""
    consulted: frozenset[str]
    """The variables that imports have read: another value for one of them needs a fresh interpreter."""
    startup_modules: frozenset[str]
    """Modules that a bare interpreter imports; a module beside the script cannot shadow these."""
    modules: dict[str, str | None]
    """Every imported top-level module, and its file."""
    sys_path: tuple[str, ...]
    default_threads: int | None
    """torch's thread count on this machine when nothing sets it; None without torch."""
    openblas_setters: tuple[Callable[[int], object], ...]
    """Functions that set the thread count, one for each loaded copy of OpenBLAS."""
    torch_version: str | None
    warm_seconds: float
    descriptors: frozenset[int]
    """Descriptors that imported libraries hold open; normally none."""


class _RecordingEnviron(type(os.environ)):  # type: ignore[misc]  # the class is private, the instance is not
    """os.environ that records which names were read.

    A loop over all variables records no name: tqdm runs such a loop, torch imports tqdm where it is installed, and every
    variable that differs would cause a cold start. The variables that tqdm uses are among ``_PREFIXES``.
    """

    def __getitem__(self, key: str) -> str:
        _consulted.add(key)
        return str(super().__getitem__(key))

    def items(self) -> ItemsView[str, str]:
        return self.copy().items()

    def values(self) -> ValuesView[str]:
        return self.copy().values()

    def copy(self) -> dict[str, str]:
        return {self.decodekey(key): self.decodevalue(value) for key, value in self._data.items()}

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            _consulted.add(key)
        return bool(super().__contains__(key))


_consulted: set[str] = set()


@contextlib.contextmanager
def _recorded_environment() -> Iterator[None]:
    plain = type(os.environ)
    saved = {name: os.environ.get(name) for name in SINGLE_THREADED}
    os.environ.update(SINGLE_THREADED)
    os.environ.__class__ = _RecordingEnviron
    try:
        yield
    finally:
        os.environ.__class__ = plain
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def warm(
    preload: Sequence[str], log: Callable[..., None], startup_modules: frozenset[str], *, cold: str | None
) -> Baseline:
    """Import and exercise the modules; return the baseline. Raises NotServableError.

    With `cold`, a reason, it imports nothing: forks of such a server only execute fresh interpreters.
    """
    started = time.monotonic()
    environ = dict(os.environ)
    sys_path = tuple(sys.path)
    open_before = linux.open_descriptors()
    gc.disable()  # imported objects stay: a collection would find nothing
    try:
        torch_version, default_threads = (None, None) if cold else _import_all(preload, log)
    finally:
        gc.enable()
    _check_servable()
    # Work and writes that children then need not do: each page that a child writes to must be copied first.
    linecache.clearcache()
    names = [name for name in sys.modules if name and "." not in name]
    modules = {name: getattr(sys.modules[name], "__file__", None) for name in names}
    setters = tuple(_openblas_setters())
    gc.collect()
    gc.freeze()  # no collection in a child touches what was imported here
    return Baseline(
        cold=cold,
        modules=modules,
        own_modules=tuple(name for name in sys.modules if f"{name}.".startswith(f"{__package__}.")),
        openblas_setters=setters,
        python=sys.executable,
        process_name=linux.process_name(),
        environ=environ,
        consulted=frozenset(_consulted),
        startup_modules=startup_modules,
        sys_path=sys_path,
        default_threads=default_threads,
        torch_version=torch_version,
        warm_seconds=time.monotonic() - started,
        descriptors=frozenset(linux.open_descriptors() - open_before),
    )


def _import_all(preload: Sequence[str], log: Callable[..., None]) -> tuple[str | None, int | None]:
    """Import torch and ``preload``; return torch's version and default thread count, None without torch.

    A missing module is only logged: the job's own import reports it.
    """
    version, threads = None, None
    with _recorded_environment():
        try:
            torch = importlib.import_module("torch")
            version, threads = str(torch.__version__), int(torch.get_num_threads())
            _exercise(torch)
        except Exception as error:
            log("forkserver.torch_absent" if version is None else "forkserver.torch_not_exercised", error=repr(error))
        for name in preload:
            try:
                importlib.import_module(name)
            except Exception as error:
                log("forkserver.preload_absent", module=name, error=repr(error))
    return version, threads


def _openblas_setters() -> Iterator[Callable[[int], object]]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        yield from (getattr(library, name) for name in _OPENBLAS_SETTERS if hasattr(library, name))


def _exercise(torch: Any) -> None:
    """Import what torch imports late: the first step of a model spends a second on loading modules."""
    with _no_gpu(torch):
        for name in _TORCH_MODULES:
            importlib.import_module(name)
        # teardown.patch_teardown(torch.distributed)
        torch.set_num_threads(1)
        _train_once(torch)
        torch.nn.modules.module.register_module_module_registration_hook(_keep_process_group)


_kept: list[Any] = []


def _keep_process_group(_module: object, _name: str, _submodule: object) -> None:
    """Hold the default process group to the end of the process, against a deadlock in torch 2.13 with gloo; called in a training process.

    The thread that ran a collective of the backward pass takes the GIL to release the pass's Python context. If the main thread reaches the
    group's destructor first, it joins that thread with the GIL held, and both wait for ever. A fresh process, which imports and compiles while it
    trains, rarely does so; a third of the forked ones do, right after their last step. Torch calls this hook when a module gets a submodule, as
    DistributedDataParallel does.
    """
    distributed: Any = sys.modules["torch.distributed"]
    if distributed.is_initialized():
        _kept[:] = [distributed.group.WORLD]


def _train_once(torch: Any) -> None:
    """Run one small step with each of two optimizers, then save and load the model, as nearly every script does.

    A backward pass makes the autograd engine query every driver that torch was built for its devices, and start a thread for each one:
    no fork could use a GPU after that, nor be restricted to its own GPUs. In builds for GPUs the gradients are set to zero instead.
    """
    file = io.BytesIO()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1]))
        optimizer.zero_grad()
        if _is_built_for_gpus(torch):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))


def _is_built_for_gpus(torch: Any) -> bool:
    return bool(torch.backends.cuda.is_built() or torch.xpu._is_compiled())  # noqa: SLF001 - torch has no public function for it


@contextlib.contextmanager
def _no_gpu(torch: Any) -> Iterator[None]:
    """Keep torch from querying the driver for the number of GPUs, which alone would make every fork unusable."""
    saved = (torch.cuda.is_available, torch.cuda.device_count)
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = saved


def _check_servable() -> None:
    others = [thread for thread in os.listdir("/proc/self/task") if thread != str(os.getpid())]
    if others:
        named = ", ".join(sorted(map(_thread_name, others)))
        raise NotServableError(f"importing left other threads ({named}); forks of such a process can deadlock")
    for number in linux.open_descriptors():
        target = os.readlink(f"/proc/self/fd/{number}")
        if target.startswith(_DEVICE_FILES):
            raise NotServableError(f"importing opened {target}; a driver's state does not survive a fork")
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or _is_cuda_spoilt_in_forks(torch)):
        raise NotServableError("an import initialized the CUDA driver; its state does not survive a fork")


def _thread_name(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as name:
        return name.read().strip()


def _is_cuda_spoilt_in_forks(torch: Any) -> bool:
    """Whether torch would refuse CUDA in a fork of this process; checks it in a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)  # noqa: SLF001 - torch has no public function for it
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


# -- warm or cold


def cold_reason(baseline: Baseline, env: dict[str, str], options: Sequence[str], search: str) -> str | None:
    """Return why this process needs a fresh interpreter, or None.

    `search` is the directory that will be sys.path[0].
    """
    for option in options:
        if option not in _WARM_OPTIONS:
            return f"interpreter option {option}"
    for name in sorted(baseline.environ.keys() | env.keys()):
        if baseline.environ.get(name) != env.get(name) and _was_read(name, baseline.consulted):
            return f"environment variable {name}"
    shadow = _shadowing(search, baseline.modules, baseline.startup_modules)
    return None if shadow is None else f"module {shadow} beside the script"


def _was_read(name: str, consulted: Iterable[str]) -> bool:
    if name in _HANDLED:
        return False
    return name in consulted or name in _NAMES or name.startswith(_PREFIXES)


def _shadowing(search: str, loaded: dict[str, str | None], startup_modules: frozenset[str]) -> str | None:
    """Return a module in `search` that a fresh interpreter would import instead of one imported here from elsewhere."""
    try:
        entries = list(os.scandir(search))
    except OSError:
        return None
    for entry in entries:
        name = _module_name(entry)
        if name is None or name not in loaded or name in startup_modules:
            continue
        origin = loaded[name]
        if name in sys.builtin_module_names or (origin is not None and _is_below(origin, entry.path)):
            continue
        return name
    return None


def _module_name(entry: os.DirEntry[str]) -> str | None:
    """Return the top-level module that a directory entry provides."""
    stem, dot, suffix = entry.name.partition(".")
    if dot:
        return stem if suffix in ("py", "pyc") or suffix.endswith("so") else None
    # A folder without __init__ is a namespace package, which never takes precedence over a regular module elsewhere.
    return stem if os.path.exists(os.path.join(entry.path, "__init__.py")) else None


def _is_below(origin: str, place: str) -> bool:
    origin, place = os.path.realpath(origin), os.path.realpath(place)
    return origin == place or origin.startswith(place + os.sep)
