"""Exit handlers of C libraries are skipped where they only free memory, and run where they may write something."""

from __future__ import annotations

import _csv
import ctypes
import ctypes.util
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np  # noqa: F401  # its libraries are known once it is loaded
import pytest
import torch

from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.forkserver.program import exit_handlers

PACKAGES = Path(torch.__file__).resolve().parents[1]
PROGRAM = """
import ctypes, sys
from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.forkserver.program import exit_handlers

libc = ctypes.CDLL(None)
libc["__cxa_atexit"](ctypes.cast(libc.unlink, ctypes.c_void_p), ctypes.c_char_p(b"before"), None)
known = linux.loaded_libraries()
if len(sys.argv) > 1:
    ctypes.CDLL(sys.argv[1])
libc.printf(b"of C, ")  # into a buffer: this is a pipe
print("of Python", end=", ")
print(exit_handlers.leave_out(known), end=", ")
late = ctypes.c_char_p(b"after")
libc["__cxa_atexit"](ctypes.cast(libc.unlink, ctypes.c_void_p), late, None)
sys.exit(7)
"""
DESTRUCTOR = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((destructor)) static void end(void) { close(open("written", O_CREAT | O_WRONLY, 0600)); }
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="`on_exit` is a function of glibc")


def ended(place: Path, *arguments: str) -> tuple[int, set[str], set[str]]:
    """Return the exit code, the printed words, and the files that exist afterwards."""
    for name in ("before", "after"):
        (place / name).touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    files = {path.name for path in place.iterdir()} - {"ends.so", "ends.c"}
    return done.returncode, set(filter(None, done.stdout.split(", "))), files


@glibc
def test_handlers_of_what_was_loaded_before_are_left_out(tmp_path: Path) -> None:
    assert ended(tmp_path) == (7, {"of C", "of Python", "True"}, {"before"})


@glibc
def test_with_a_library_of_the_script_s_every_handler_runs(tmp_path: Path) -> None:
    source, library = tmp_path / "ends.c", tmp_path / "ends.so"
    source.write_text(DESTRUCTOR)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert ended(tmp_path, str(library)) == (7, {"of C", "of Python", "False"}, {"written"})


@pytest.mark.parametrize(
    ("library", "quiet"),
    [
        (str(Path(_csv.__file__ or "").resolve()), True),
        (f"{PACKAGES}/torch/lib/libtorch_global_deps.so", True),
        (f"{PACKAGES}/numpy/linalg/lapack_lite.so", True),
        (f"{PACKAGES}/nvidia/cudnn/lib/libcudnn_ops.so.9", True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15", True),
        (f"{PACKAGES}/h5py/h5.cpython-311-x86_64-linux-gnu.so", False),
        (f"{PACKAGES}/torchaudio/lib/libtorchaudio.so", False),
        ("/opt/tool/libtrace.so", False),
    ],
)
def test_which_libraries_have_nothing_to_write(monkeypatch: pytest.MonkeyPatch, library: str, *, quiet: bool) -> None:
    registered: list[bool] = []
    monkeypatch.setattr(linux, "loaded_libraries", lambda: frozenset({"/known.so", library}))
    monkeypatch.setattr(linux, "end_without_exit_handlers", lambda: registered.append(True) or True)
    assert exit_handlers.leave_out(frozenset({"/known.so"})) is quiet
    assert registered == [True] * quiet


def test_what_is_loaded_is_known() -> None:
    library = Path(ctypes.util.find_library("c") or "libc.so.6").name
    assert any(Path(path).name == library for path in linux.loaded_libraries())
    assert all(path.startswith("/") for path in linux.loaded_libraries())


def test_another_c_library_ends_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_libc", object())
    assert linux.end_without_exit_handlers() is False
