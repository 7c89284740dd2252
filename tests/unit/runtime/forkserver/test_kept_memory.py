"""Forks of the server keep freed memory: a step takes it again without a page fault."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from orchestrator.runtime.forkserver import linux

if sys.argv[1] == "kept":
    linux.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 20 << 20

def step():
    blocks = [libc.malloc(size) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)

for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_a_step(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other limits")
def test_memory_that_a_step_frees_is_there_for_the_next_one() -> None:
    assert faults_of_a_step("kept") < 100 < 1000 < faults_of_a_step("plain")
