"""Decides whether a forked interpreter would differ from a fresh one, and why.

A warm start runs the script in the fork; a cold start replaces the fork by a fresh interpreter, which is a second or two
slower and exact. Pure except for one listing of the script's directory.

A variable matters when its value differs from the one the fork server started with *and* it has been read already:
Python code (recorded while warming, see warm.py) or code in C, which is listed here by name.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..warm import Baseline

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
