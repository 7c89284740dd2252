"""Interpreters forked from one that has already imported torch: a test of ten processes imports it once.

``start`` and ``run`` are ``subprocess.Popen`` and ``subprocess.run`` of ``python -c``: the process has a process id, files,
an environment and a directory of its own, and ends as an interpreter does. Only settings that an interpreter reads when
it starts (options, ``PYTHONWARNINGS``) are those of the process from which it is forked.
"""

from __future__ import annotations

import array
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from tests.support.stack import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
TRAINING = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "orchestrator.train.script.training_context",
    "orchestrator.checkpoint",
)
"""Modules that training scripts import."""

STORE = ("orchestrator.core.events", "orchestrator.store.store", "tests.support.disks", "tests.unit.store.lives")
"""Modules that scripts import that write to the store."""

SHARDED = (*TRAINING, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pytest")
"""Modules that scripts with sharded state import."""

FRAMEWORKS = (
    *TRAINING,
    *(
        module
        for module in ("transformers.trainer", "lightning.pytorch", "accelerate")
        if importlib.util.find_spec(module.partition(".")[0])
    ),
)
"""Modules that scripts for another library import, if that library is installed."""


class Parent:
    """The process from which others are forked."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_program", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a pool of threads does not survive a fork
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> socket.socket:
        """Fork a process; return the socket that receives its process id and later its exit code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            handles = array.array("i", [*files, theirs.fileno()])
            self._control.sendmsg(
                [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles.tobytes())]
            )
        return ours

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait()


_parents: dict[tuple[str, ...], Parent] = {}
_making = threading.Lock()


def _parent(modules: tuple[str, ...]) -> Parent:
    """Return the parent for these modules; if several threads need it first, one of them creates it."""
    with _making:
        if modules not in _parents:
            _parents[modules] = Parent(modules)
        return _parents[modules]


def end() -> None:
    """End all parents, at the end of the session."""
    while _parents:
        _parents.popitem()[1].close()


class Warm:
    """A forked process with the interface of ``subprocess.Popen``, as far as tests need it."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        modules: tuple[str, ...] = TRAINING,
    ) -> None:
        self.args = ["-c", *arguments]
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        request = {
            "code": code,
            "argv": self.args,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        with contextlib.ExitStack() as theirs:
            given, self.stdin = _end(theirs, stdin, 0, "w")
            out, self.stdout = _end(theirs, stdout, 1, "r")
            err, self.stderr = _end(theirs, stderr, 2, "r")
            self._answer = _parent(modules).fork(request, [given, out, err])
        self.pid = self._number(PATIENCE_SECONDS)

    def _number(self, seconds: float | None) -> int:
        self._answer.settimeout(seconds)
        try:
            text = self._answer.recv(64)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self.args, seconds or 0.0) from error
        assert text, "the process that others are forked from has ended"
        return int(text)

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
            self._answer.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return the rest of the output of both pipes. Raises ``subprocess.TimeoutExpired``."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        self.wait(timeout)
        return self._rest(self.stdout), self._rest(self.stderr)

    @staticmethod
    def _rest(pipe: IO[str] | None) -> str:
        if pipe is None or pipe.closed:
            return ""
        with pipe:
            return pipe.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def _end(theirs: contextlib.ExitStack, wanted: int | None, inherited: int, mode: str) -> tuple[int, IO[str] | None]:
    """Return the child's end of a file, and this process's end if it is a pipe."""
    if wanted is None:
        return inherited, None
    if wanted == subprocess.DEVNULL:
        return theirs.enter_context(open(os.devnull, "r+b")).fileno(), None
    if wanted != subprocess.PIPE:
        return wanted, None
    reading, writing = os.pipe()
    mine, other = (writing, reading) if mode == "w" else (reading, writing)
    theirs.callback(os.close, other)
    return other, os.fdopen(mine, mode)


def run(
    code: str, *arguments: str, timeout: float = PATIENCE_SECONDS, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run code to its end; return its output and exit code. Kills it after ``timeout``, and raises TimeoutExpired."""
    deadline = time.monotonic() + timeout
    out, err = _scratch(), _scratch()
    with out, err:
        process = Warm(code, *arguments, stdout=out.fileno(), stderr=err.fileno(), **options)
        try:
            code_of_end = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(process.args, code_of_end, out.read(), err.read())


def _scratch() -> IO[str]:
    """Return a file without a name, which no reader has to drain while it is written."""
    return os.fdopen(os.memfd_create("warm"), "w+")
