"""A real daemon with its own ORCH_HOME and embedded Ray, driven as a user does: through the command line and the client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from orchestrator import trees
from orchestrator.api.client import Client
from orchestrator.api.errors import OrchError
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.views import JobView
from orchestrator.process_ends import wait_ended
from orchestrator.runtime.nodes.directories import namespace, node_directory, page_directory
from orchestrator.spec.settings import Settings
from tests.support.leftovers import note_home

PYTHON = sys.executable
ORCH = [PYTHON, "-m", "orchestrator.cli.main"]
PATIENCE_SECONDS = 900.0
"""Limit for things that take at most seconds on an idle machine: a long deadline costs nothing where the test passes, and
a machine that does other work is five times as slow."""


FIRST_INTERVAL_SECONDS = 0.02
LAST_INTERVAL_SECONDS = 0.25


def wait_until(what: str, condition: Any, seconds: float = PATIENCE_SECONDS, interval: float | None = None) -> Any:
    """Poll until ``condition()`` is true, and return its value; fail with ``what`` at the deadline.

    Polls every ``interval`` seconds; without one, the pauses grow: a poll often costs the daemon as much as this process.
    """
    deadline = time.monotonic() + seconds
    pause = FIRST_INTERVAL_SECONDS
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause if interval is None else interval)
        pause = min(1.2 * pause, LAST_INTERVAL_SECONDS)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Stack:
    """One home. ``up`` starts the daemon; ``close`` ends everything that belongs to the home, whatever state it is in."""

    in_use: ClassVar[list[Self]] = []
    """Stacks of this process with a started daemon that are not closed: a failure shows their evidence."""

    last_words: ClassVar[list[tuple[str, str]]] = []
    """Evidence of the stacks that a test closed while it failed."""

    def __init__(
        self,
        *,
        simulate_gpus: int = 0,
        extra: tuple[str, ...] = (),
        home: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home or Path(tempfile.mkdtemp(prefix="orch-t-"))
        note_home(self.home)
        self.environ = {
            **{
                k: v
                for k, v in os.environ.items()
                if not k.startswith(("ORCH_", "RAY_")) and k not in ("COLUMNS", "LINES")
            },
            "ORCH_HOME": str(self.home),
            "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
            **(environ or {}),
        }
        self.settings = Settings.from_environ(self.environ)
        self.client = Client(Endpoint(socket_path=str(self.settings.socket)), environ=self.environ)
        self._arguments = ["--read-listen", "127.0.0.1:0", *extra]
        if simulate_gpus:
            self._arguments += ["--simulate-gpus", str(simulate_gpus)]

    @property
    def node_root(self) -> Path:
        """Directory in which the home's nodes keep their sockets and locks."""
        return node_directory(namespace(self.home), "local").parent

    # -- the daemon

    def up(self) -> dict[str, Any]:
        self._note_use()
        done = self.orch("up", *self._arguments, "--json", seconds=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def serve(self, program: str | None = None) -> subprocess.Popen[bytes]:
        """Start the daemon as a child; ``program`` is Python code that changes it and calls ``main``."""
        self._note_use()
        orch = ORCH if program is None else [PYTHON, "-c", program]
        with self.serve_log_path.open("ab") as log:
            return subprocess.Popen([*orch, "serve", *self._arguments], env=self.environ, stdout=log, stderr=log)

    def _note_use(self) -> None:
        if self not in self.in_use:
            self.in_use.append(self)

    def answers(self) -> bool:
        """Whether a daemon answers and is ready."""
        try:
            return self.client.health().ready
        except OrchError:
            return False

    def leftovers(self, job_id: str) -> list[Path]:
        """Return the job's files outside its directory, and its secrets."""
        found = [self.settings.paths.secrets(job_id), *page_directory(namespace(self.home)).glob(f"{job_id}.*")]
        return [path for path in (*found, *self.node_root.glob(f"*/ranks/{job_id}.*")) if path.exists()]

    def serve_log(self) -> str:
        """Return the end of the output of daemons started by ``serve``."""
        return self.serve_log_path.read_text()[-3000:]

    @property
    def serve_log_path(self) -> Path:
        """File with the output of daemons started by ``serve``."""
        return self.home / "serve.log"

    def daemon_log(self) -> str:
        """Return the end of the log of the daemon started by ``up``."""
        return self.settings.paths.daemon_log.read_text()[-6000:]

    def daemon_pid(self) -> int:
        return self.client.health().pid

    def kill_daemon(self) -> None:
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until("the daemon is dead", lambda: not psutil.pid_exists(pid) or _is_zombie(pid))

    def head_pids(self) -> dict[str, int]:
        """Return the process ids of the home's Ray head, by name. Raises FileNotFoundError: there is none, or it is being started."""
        data = json.loads((self.settings.paths.ray / "head.json").read_text())
        if not data["pids"]:
            raise FileNotFoundError("the head is being started")
        return {name: pid for name, (pid, _created) in data["pids"].items()}

    def close(self) -> None:
        """Stop the daemon and its jobs if it answers, then kill every process of this home and remove its files."""
        if sys.exception() is not None and self in self.in_use:
            from tests.support.evidence import sections

            self.last_words.extend(sections(self))
        with contextlib.suppress(OrchError, AssertionError):
            for job in self.client.jobs().jobs:
                if not job.is_terminal:
                    self.client.cancel(job.id)
            for job in self.client.jobs().jobs:
                self.client.wait(job.id, timeout_seconds=60)
        with contextlib.suppress(OrchError):
            pid = self.daemon_pid()
            self.client.shutdown()
            wait_until("the daemon has stopped", lambda: not psutil.pid_exists(pid) or _is_zombie(pid))
        self._kill_leftovers()
        trees.remove(self.home)
        if self in self.in_use:
            self.in_use.remove(self)

    def processes(self) -> list[psutil.Process]:
        """Return every process that belongs to the home, by its environment, command line, directory, or parents."""
        markers = (str(self.home), str(self.node_root))
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                home = process.environ().get("ORCH_HOME", "")  # the daemon's only mark
                here = [home, *process.cmdline(), os.readlink(f"/proc/{process.pid}/cwd")]
                if any(marker in part for part in here for marker in markers):
                    found.update({p.pid: p for p in (process, *process.children(recursive=True))})
        found.pop(os.getpid(), None)
        return list(found.values())

    def kill_everything(self) -> None:
        """Send SIGKILL to every process of the home at the same moment, as in a power cut; return when none is left."""
        kill_all(self.processes, f"what belongs to {self.home}")

    def _kill_leftovers(self) -> None:
        self.kill_everything()
        trees.remove(self.node_root)
        trees.remove(page_directory(namespace(self.home)))

    # -- as a user

    def orch(
        self, *arguments: str, seconds: float = PATIENCE_SECONDS, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*ORCH, *arguments],
            env=self.environ,
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def submit(self, spec: str, directory: Path, **files: str) -> str:
        """Submit ``spec`` from ``directory``, after writing ``files`` (``train`` becomes train.py) there."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / f"{name}.py").write_text(text)
        reply = self.client.submit_text(spec, cwd=str(directory))
        assert reply.job_id is not None
        return reply.job_id

    def job(self, job_id: str) -> JobView:
        return self.client.job(job_id)

    def wait(self, job_id: str, seconds: float = PATIENCE_SECONDS) -> JobView:
        return self.client.wait(job_id, timeout_seconds=seconds)

    def wait_state(self, job_id: str, *states: str, seconds: float = PATIENCE_SECONDS) -> JobView:
        wanted = " or ".join(states)

        def reached() -> JobView | None:
            job = self.job(job_id)
            assert job.state in states or not job.is_terminal, f"{job_id} is not {wanted}: {job.state}, {job.reason}"
            return job if job.state in states else None

        return wait_until(f"{job_id} is {wanted}; it was {self.job(job_id).state}", reached, seconds)

    def wait_step(self, job_id: str, step: int, seconds: float = PATIENCE_SECONDS) -> JobView:
        def reached() -> JobView | None:
            job = self.job(job_id)
            return job if job.progress and (job.progress.step or 0) >= step else None

        return wait_until(f"{job_id} reaches step {step}", reached, seconds)

    def log(self, job_id: str, attempt: int | None = None, rank: int | None = None) -> str:
        return "\n".join(line.text for line in self.client.logs(job_id, attempt=attempt, rank=rank))

    def pids(self, job_id: str) -> list[int]:
        job = self.wait_state(job_id, "RUNNING")
        return [gpu.pid for gpu in job.gpus if gpu.pid is not None]


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def process_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that waits for its parent counts)."""
    return not psutil.pid_exists(pid) or _is_zombie(pid)


def kill_all(find: Callable[[], list[psutil.Process]], what: str) -> None:
    """Send SIGKILL to all that ``find`` returns, until it finds none; fail when new ones start again and again.

    All are frozen before the first is killed: no process can react to the death of another.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS

    def living(but: Container[int] = ()) -> list[psutil.Process]:
        assert time.monotonic() < deadline, f"{what} comes back again and again"
        return [process for process in find() if process.pid not in but and not process_gone(process.pid)]

    while living():
        frozen: dict[int, psutil.Process] = {}
        while new := living(but=frozen):
            _to_all(new, psutil.Process.suspend)
            frozen.update({process.pid: process for process in new})
        _to_all(frozen.values(), psutil.Process.kill)
        wait_ended(list(frozen.values()), 300.0)


def _to_all(processes: Iterable[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            do(process)
