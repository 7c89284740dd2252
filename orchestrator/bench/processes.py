"""The ranks of a benchmark as processes of this machine: started once, given one command at a time, reliably ended.

A command is a line of JSON on a rank's standard input, its answer a line on a pipe of its own. What a rank prints goes to
its log. A rank ends itself when its input closes, so none outlives this process. The ranks find each other by a file:
there is not a port that another program could occupy.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.bench.plan import BenchError, RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSWER_SECONDS: Final = 900.0
"""A run takes seconds. A longer one waits for a rank that hangs."""
END_SECONDS: Final = 10.0
LOG_TAIL_BYTES: Final = 2000
MAX_ANSWER_BYTES: Final = 64 << 20


def last_line(log: Path) -> str:
    """Return the last line of a process's output."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


class _Rank:
    """One process, its log, and the end of the pipe that its answers come from."""

    def __init__(self, number: int, log: Path, environ: Mapping[str, str]) -> None:
        self.number = number
        self.log = log
        self.answers, theirs = os.pipe()
        self.received = b""
        command = [sys.executable, "-m", "orchestrator.bench.rank.main", str(theirs)]
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environ),
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)

    def ask(self, line: bytes) -> None:
        """Send a command; if the rank has ended, ``read`` raises the error."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def read(self) -> Any:
        """Return a whole answer, or None before there is one. Raises RankError when the rank has ended."""
        part = os.read(self.answers, 1 << 20)
        if not part:
            raise RankError(f"rank {self.number} ended: {last_line(self.log)}", hint=f"its output is in {self.log}")
        self.received += part
        if len(self.received) > MAX_ANSWER_BYTES:
            raise RankError(f"rank {self.number} answers without end", hint=f"its output is in {self.log}")
        if not self.received.endswith(b"\n"):
            return None
        line, self.received = self.received, b""
        return json.loads(line)

    def end(self) -> None:
        """Close the rank's input, and kill the rank if it does not end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)


def make_logs(output: Path) -> Path:
    """Create the directory of the ranks' logs below ``output``. Raises BenchError."""
    logs = output / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"{logs} cannot be made: {error.strerror}", hint="name another directory with --output-dir"
        ) from error
    return logs


class RankProcesses:
    """The ranks, from the first command to ``close``. After a RankError they must be closed: some may wait for ever."""

    def __init__(self, logs: Path, environ: Mapping[str, str], *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._logs = logs
        self._environ = environ
        self._answer_seconds = answer_seconds
        self._ranks: list[_Rank] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="orch-bench-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, count: int) -> None:
        """Start missing ranks; existing ones stay."""
        while len(self._ranks) < count:
            number = len(self._ranks)
            self._ranks.append(_Rank(number, self._logs / f"rank{number}.log", self._environ))

    def join(self, sizes: Sequence[int], device: str) -> None:
        """Connect all ranks, with a process group for each size."""
        store = str(Path(self._scratch.name) / "store")
        self.ask(
            {"do": "join", "store": store, "sizes": sorted(sizes), "device": device, "ranks": len(self._ranks)},
            len(self._ranks),
        )

    def ask(self, command: Mapping[str, Any], ranks: int) -> list[Any]:
        """Return the answers of the first ranks to a command, in order. Raises RankError for the first that fails."""
        asked = self._ranks[:ranks]
        for rank in asked:
            rank.ask(json.dumps({**command, "rank": rank.number}).encode() + b"\n")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._answer_seconds
        with selectors.DefaultSelector() as selector:
            for rank in asked:
                selector.register(rank.answers, selectors.EVENT_READ, rank)
            while len(answers) < len(asked):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = ", ".join(str(rank.number) for rank in asked if rank.number not in answers)
                    raise RankError(
                        f"no answer from rank {silent} within {self._answer_seconds:g}s", hint=f"see {self._logs}"
                    )
                for key, _ in ready:
                    answer = key.data.read()
                    if answer is None:
                        continue
                    if "error" in answer:
                        raise RankError(
                            f"rank {key.data.number}: {answer['error']}", hint=f"its output is in {key.data.log}"
                        )
                    answers[key.data.number] = answer["value"]
                    selector.unregister(key.fd)
        return [answers[rank.number] for rank in asked]

    def close(self) -> None:
        """End every rank. Ranks that wait for each other in a collective end because their inputs close."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        self._scratch.cleanup()


def rank_environ(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return a rank's environment: threads, loopback interface for gloo unless another is named, GPUs by bus id."""
    return {
        **environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
    }
