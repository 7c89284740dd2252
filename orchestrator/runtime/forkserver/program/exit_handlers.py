"""Leaves out what C++ libraries do at a process's end, where they would only take themselves apart.

The interpreter's own end is that of every Python process: threads are joined, `atexit` is run, objects end, files are written. After it, libtorch
and what it brings along take their registries apart, which the kernel does at once: nearly half of what a process that does nothing costs
(`benchmarks/rank_end.py`).

A library that was loaded since the fork may have something to write at its end (HDF5 closes its files there): with one of those, everything is run.
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
"""Loaded at the first call of a GPU; what they hold the kernel takes back, as after a kill."""

_PACKAGES = ("torch", "numpy")
"""Libraries of these are loaded late as well, and write nothing at their ends."""


def leave_out(loaded_before: Collection[str]) -> bool:
    """Have the process end without exit handlers, where every library that is loaded but was not before allows it; whether it does."""
    return (
        all(map(_ends_quietly, linux.loaded_libraries() - frozenset(loaded_before)))
        and linux.end_without_exit_handlers()
    )


def _ends_quietly(library: str) -> bool:
    if os.path.basename(library).startswith(_DRIVERS):
        return True
    return library.startswith(_quiet_folders())


def _quiet_folders() -> tuple[str, ...]:
    """Python's own extensions, those packages, and NVIDIA's libraries beside torch."""
    found = [str(sysconfig.get_config_var("DESTSHARED"))]
    for name in _PACKAGES:
        init = getattr(sys.modules.get(name), "__file__", None)
        if init is not None:
            package = os.path.dirname(os.path.realpath(init))
            found += [package, os.path.join(os.path.dirname(package), "nvidia")]
    return tuple(os.path.realpath(folder) + os.sep for folder in found)
