"""Skips the exit handlers of C++ libraries at a process's end, where they would only tear the libraries down.

The interpreter itself ends as in every Python process: threads are joined, `atexit` handlers run, objects are freed, files are written. After it,
libtorch and the libraries that it loads would destroy their registries, which the kernel frees at once: this is nearly half of the cost of a
process that does nothing (`benchmarks/rank_end.py`).

A library that was loaded after the fork may have something to write at its end (HDF5 closes its files there): if there is one, all handlers run.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import TYPE_CHECKING

from .. import linux

if TYPE_CHECKING:
    from collections.abc import Collection

_DRIVERS = ("libcuda.so", "libnvidia-")
"""Libraries that are loaded at the first use of a GPU; the kernel frees what they hold, as after a kill."""

_PACKAGES = ("torch", "numpy")
"""Packages with libraries that are also loaded late, and write nothing at their end."""


def leave_out(loaded_before: Collection[str]) -> bool:
    """Make the process end without exit handlers if every library loaded since ``loaded_before`` allows it; return whether it will."""
    return (
        all(map(_ends_quietly, linux.loaded_libraries() - frozenset(loaded_before)))
        and linux.end_without_exit_handlers()
    )


def _ends_quietly(library: str) -> bool:
    if os.path.basename(library).startswith(_DRIVERS):
        return True
    return library.startswith(_quiet_folders())


def _quiet_folders() -> tuple[str, ...]:
    """Return the folders of Python's own extensions, of those packages, and of NVIDIA's libraries beside them."""
    found = [str(sysconfig.get_config_var("DESTSHARED"))]
    for name in _PACKAGES:
        init = getattr(sys.modules.get(name), "__file__", None)
        if init is not None:
            package = os.path.dirname(os.path.realpath(init))
            found += [package, os.path.join(os.path.dirname(package), "nvidia")]
    return tuple(os.path.realpath(folder) + os.sep for folder in found)
