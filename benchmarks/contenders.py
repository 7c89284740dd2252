"""The contenders of the start and recovery benchmarks: each starts the workload as its user would, and ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from benchmarks.measure import wait_for
from orchestrator.api.client import Client
from orchestrator.api.errors import OrchError
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.process_ends import wait_ended
from orchestrator.spec.settings import Settings

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

ROOT = Path(__file__).parents[1]
WORKLOAD = ROOT / "benchmarks" / "workloads" / "steps.py"
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("ORCH_", "RAY_"))},
    "OMP_NUM_THREADS": "1",
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the ledger."""

    number: int
    at_seconds: float
    pid: int


def worker_pids(ledger: Path) -> dict[int, int]:
    """Return the newest process of each rank."""
    lines = Path(f"{ledger}.pids").read_text().splitlines()
    return {int(rank): int(pid) for rank, pid in (line.split() for line in lines)}


class Run:
    """One run of the workload under a contender; a context manager that ends everything it started."""

    def __init__(self, process: subprocess.Popen[bytes], ledger: Path, began: float) -> None:
        self.process, self.ledger, self.began = process, ledger, began
        self._steps: list[Step] = []
        self._read_bytes = 0

    def steps(self) -> list[Step]:
        """Return the steps so far. Reads only new ones: polling every two milliseconds must not distort the result."""
        with contextlib.suppress(FileNotFoundError), self.ledger.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self._steps += [
                Step(int(a), int(b) / 1e9, int(c)) for a, b, c in (line.split() for line in whole.splitlines())
            ]
        return self._steps

    def __enter__(self) -> Self:
        return self

    def first_step_seconds(self) -> float:
        """Return the seconds from before the process was started to after rank 0's first optimizer step."""
        steps = wait_for("the first step", self.steps)
        return float(steps[0].at_seconds - self.began)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(psutil.Error):
            victims = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            self.process.send_signal(signal.SIGTERM)
            for process in wait_ended(victims, 3.0):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        with contextlib.suppress(FileNotFoundError):
            for pid in worker_pids(self.ledger).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        shutil.rmtree(self.ledger.parent, ignore_errors=True)


def _start(command: list[str], ledger: Path, **more: str) -> Run:
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **more},
        cwd=ledger.parent,
        stdin=subprocess.DEVNULL,
        stdout=(ledger.parent / "stdout").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Run(process, ledger, began)


def _ledger() -> Path:
    return Path(tempfile.mkdtemp(prefix="orch-bench-")) / "ledger"


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of a job's ranks, and their device: ``cpu``, or ``cuda`` with a GPU for each."""

    ranks: int
    device: str

    @property
    def gpus(self) -> int:
        """Number of GPUs of each rank."""
        return 0 if self.device == "cpu" else 1


TWO_RANKS = Shape(2, "cpu")
ONE_GPU = Shape(1, "cuda")


def add_shape(options: argparse.ArgumentParser) -> None:
    """Add the options for the shape and the peers of a measurement."""
    options.add_argument("--peers", default="torchrun,ray_train", help="which peers, by comma; empty for none")
    options.add_argument(
        "--gpu", action="store_true", help="one rank on a GPU, with NCCL, instead of two on processors"
    )


def shape_of(options: argparse.ArgumentParser, chosen: argparse.Namespace) -> Shape:
    """Return the requested shape; a wrong combination ends the program."""
    if chosen.gpu and "ray_train" in chosen.peers:
        options.error("Ray Train is measured on processors only: --peers torchrun")
    return ONE_GPU if chosen.gpu else TWO_RANKS


def torchrun(steps: int, seconds_per_step: float, save_every: int = 10, shape: Shape = TWO_RANKS) -> Run:
    """Start ``torchrun --standalone``, with as many restarts as it takes."""
    ledger = _ledger()
    ranks = f"--nproc-per-node={shape.ranks}"
    command = [str(BIN / "torchrun"), "--standalone", ranks, "--max-restarts=100", str(WORKLOAD)]
    return _start([*command, str(ledger), str(steps), str(seconds_per_step), str(save_every), shape.device], ledger)


def ray_train(steps: int, seconds_per_step: float, save_every: int = 10) -> Run:
    """Start Ray Train V2, cold, as a script."""
    ledger = _ledger()
    script = ROOT / "benchmarks" / "peers" / "ray_train.py"
    command = [sys.executable, str(script), str(ledger), str(steps), str(seconds_per_step), str(save_every)]
    return _start(command, ledger, RAY_TRAIN_V2_ENABLED="1")


class Orch:
    """A daemon of its own, and submissions to it."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="orch-bench-home-"))
        self.environ = {k: v for k, v in ENVIRONMENT.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        self.environ["ORCH_HOME"] = str(self.home)
        settings = Settings.from_environ(self.environ)
        self.client = Client(Endpoint(socket_path=str(settings.socket)), environ=self.environ)

    def up(self, simulate_gpus: int = 0) -> float:
        """Start the daemon; return the seconds until ``orch up`` reported that it is ready."""
        began = time.monotonic()
        command = [str(BIN / "orch"), "up", "--read-listen", "127.0.0.1:0", "--simulate-gpus", str(simulate_gpus)]
        subprocess.run(command, env=self.environ, check=True, capture_output=True)
        return time.monotonic() - began

    def submit(
        self,
        steps: int,
        seconds_per_step: float,
        *,
        workload: str = WORKLOAD.name,
        cpus: float = 1,
        checkpoint: str = "{}",
        arguments: str = "",
        shape: Shape = TWO_RANKS,
    ) -> OrchRun:
        """Start ``orch submit job.yaml``, the whole process; ``checkpoint`` is that key of the job file.

        ``arguments`` are the workload's own, after those that all workloads have.
        """
        ledger = _ledger()
        job = ledger.parent / "job.yaml"
        shutil.copy(WORKLOAD.with_name(workload), ledger.parent / workload)
        job.write_text(
            "version: 1\nname: bench\n"
            f"entrypoint: python {workload} {ledger} {steps} {seconds_per_step} {arguments}\n"
            f"resources: {{num_workers: {shape.ranks}, resources_per_worker: {{gpu: {shape.gpus}, cpu: {cpus:g}}}}}\n"
            f"checkpoint: {checkpoint}\n"
            "retry: {max_restarts: {infra: 1000}, max_no_progress: 1000, backoff: {initial: 0s, max: 0s}}\n"
        )
        began = time.monotonic()
        process = subprocess.Popen(
            [str(BIN / "orch"), "submit", "job.yaml"],
            env=self.environ,
            cwd=ledger.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return OrchRun(process, ledger, began, self.client)

    def close(self) -> None:
        """Stop the daemon, with whatever an interrupted benchmark has left running, and remove its home."""
        with contextlib.suppress(OrchError):
            pid = self.client.health().pid
            self.client.shutdown(stop_jobs=True)
            wait_for("the daemon stops", lambda: not psutil.pid_exists(pid), 60)
        shutil.rmtree(self.home, ignore_errors=True)


class OrchRun(Run):
    """A submitted job; leaving cancels it and waits for its end."""

    def __init__(self, process: subprocess.Popen[bytes], ledger: Path, began: float, client: Client) -> None:
        super().__init__(process, ledger, began)
        self.client = client
        self.id = ""

    def first_step_seconds(self) -> float:
        """Return the seconds to the first step, as for every run; the job's id is known afterwards."""
        seconds = super().first_step_seconds()
        self.job_id()
        return seconds

    def job_id(self) -> str:
        """Return the job's id, once ``orch submit`` has ended."""
        if not self.id:
            self.id = self._read_id()
        return self.id

    def _read_id(self) -> str:
        out, err = self.process.communicate(timeout=60)
        if self.process.returncode != 0:
            raise RuntimeError(err.decode())
        return out.decode().strip()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job and wait until its processes are gone."""
        job_id = self.job_id()
        with contextlib.suppress(OrchError):
            self.client.cancel(job_id)
        self.client.wait(job_id, timeout_seconds=30)
        shutil.rmtree(self.ledger.parent, ignore_errors=True)
