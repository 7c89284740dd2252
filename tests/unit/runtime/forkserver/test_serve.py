"""Identification of the server of a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import serve

HOLDER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(handle, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
os.pwrite(handle, str(os.getpid()).encode(), 0)
print("noted", flush=True)
sys.stdin.readline()
"""


def test_a_server_that_has_just_begun_is_known_once_it_has_noted_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, socket_file = tmp_path / "s.lock", tmp_path / "s"
    socket_file.touch()  # left by the server before
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

        def goes_on(_: float) -> None:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write("\n")
            assert holder.stdout.readline() == "noted\n"

        monkeypatch.setattr(serve.time, "sleep", goes_on)
        assert serve._lock(str(lock), str(socket_file)) == (None, holder.pid)
        holder.stdin.write("\n")


def test_a_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    """Each server that starts appends to it."""
    log = tmp_path / "server.log"
    for before, kept in ((0, 0), (serve.MAX_LOG_BYTES, serve.MAX_LOG_BYTES), (serve.MAX_LOG_BYTES + 1, 0)):
        log.write_bytes(b"x" * before)
        handle = serve._open_log(str(log))
        os.write(handle, b"ready")
        os.close(handle)
        assert log.stat().st_size == kept + len("ready")
