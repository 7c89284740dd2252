"""Runs ``orch demo``: the main job in a minute, on its own daemon: train, lose a rank, recover, finish, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.api.client import Client
from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, DaemonUnreachableError, RefusedError
from orchestrator.api.launch import ServeOptions
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.daemon.process.up import up
from orchestrator.spec.settings import Settings
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.launch import DemoOptions
    from orchestrator.api.views import JobView

RANKS: Final = 2
KILL_AT_FRACTION: Final = 0.5
GOOD_ACCURACY: Final = 0.95
PATIENCE_SECONDS: Final = 180.0
"""Time without a new step or state after which the demo gives up; a slow machine may take longer in all."""

STOP_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Printer:
    """Prints each step, unless only the result is wanted."""

    quiet: bool
    began: float

    def print_line(self, text: str) -> None:
        """Print one line, with the seconds since the demo began."""
        if not self.quiet:
            print(f"{time.monotonic() - self.began:6.1f}s  {text}", flush=True)

    def progress(self, job: JobView) -> None:
        """Print one line of the job's progress, over the previous one on a terminal."""
        if self.quiet or job.progress is None or job.progress.step is None:
            return
        shown = job.progress
        loss = shown.metrics.get("loss")
        text = f"step {shown.step}/{shown.total_steps}" + (f"  loss {loss:.4f}" if loss is not None else "")
        self.print_line(f"  {job.state.lower()}: {text}")


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return exit code 0 when the job succeeded with a good model. Raises RefusedError."""
    printer = _Printer(quiet=options.json, began=time.monotonic())
    home = Path(tempfile.mkdtemp(prefix="orch-demo-"))
    settings = Settings.from_environ({**os.environ, "ORCH_HOME": str(home)})
    client = Client(Endpoint(socket_path=str(settings.socket)))
    try:
        result = _run_scenario(settings, client, printer)
    finally:
        _stop(client, printer)
        trees.remove(home)
    good = result["state"] == "SUCCEEDED" and (result["accuracy"] or 0.0) >= GOOD_ACCURACY
    if options.json:
        print(json.dumps(result))
    elif good:
        printer.print_line("everything is stopped and removed; next: `orch init train.py`, then `orch submit job.yaml`")
    return EXIT_OK if good else EXIT_JOB_FAILED


def _run_scenario(settings: Settings, client: Client, printer: _Printer) -> dict[str, Any]:
    simulated, gpu = _gpus()
    what = f"{simulated} simulated GPUs" if simulated else "this machine's GPUs"
    printer.print_line(f"starting a daemon of its own, with Ray and {what}")
    reply = up(settings, ServeOptions(simulate_gpus=simulated, read_listen=""))
    printer.print_line(f"ready (process {reply.pid})")
    job_id = _submit(client, gpu)
    printer.print_line(f"submitted {job_id}: LeNet-5 on handwritten digits, {RANKS} ranks, DistributedDataParallel")
    job = _follow(client, job_id, printer)
    accuracy = job.progress.metrics.get("accuracy") if job.progress else None
    _print_end(job, accuracy, client, printer)
    recoveries = job.timings.recovery_seconds
    return {
        "job_id": job.id,
        "state": job.state,
        "restarts": job.restarts,
        "steps_lost": job.timings.steps_lost,
        "submit_to_first_step_seconds": job.timings.submit_to_first_step_seconds,
        "recovery_seconds": recoveries[0] if recoveries else None,
        "accuracy": accuracy,
    }


def _gpus() -> tuple[int, float]:
    """Return how many GPUs to simulate, and how many a rank requests."""
    from orchestrator.gpu.drivers.inventory import discover

    real = len(discover())
    if real == 0:
        return RANKS, 1.0
    return 0, 1.0 if real >= RANKS else 0.0


def _submit(client: Client, gpu: float) -> str:
    with as_file(files("orchestrator.data") / "digits") as directory:
        job_file = Path(directory) / "job.yaml"
        reply = client.submit_text(
            job_file.read_text(),
            source="job.yaml",
            cwd=str(directory),
            overrides=(f"resources.resources_per_worker.gpu={gpu:g}", f"entrypoint={_entrypoint(job_file)}"),
        )
    if reply.job_id is None:
        raise RefusedError("the demo's job was not accepted", hint="`orch doctor` looks for the reason")
    return reply.job_id


def _entrypoint(job_file: Path) -> str:
    """Return the example's entry point in this interpreter, which has torch, regardless of PATH; it saves every step.

    Under orch a save is a copy in memory, so a killed rank costs one step at most.
    """
    import yaml

    entry: str = yaml.safe_load(job_file.read_text())["entrypoint"]
    return entry.replace("python ", f"{sys.executable} ", 1) + " --save-every 1"


def _follow(client: Client, job_id: str, printer: _Printer, now: Callable[[], float] = time.monotonic) -> JobView:
    """Return the job when it has ended; kill one of its ranks half-way. Raises RefusedError if it makes no progress."""
    version: int | None = None
    killed = False
    shown_step = 0
    seen: object = None
    last_change = now()
    while True:
        version = client.wait_change(version, job_ids=[job_id], timeout_seconds=5.0)
        job = client.job(job_id)
        if job.is_terminal:
            return job
        progress = job.progress
        current = (job.state, job.attempt, progress.step if progress else None)
        if current != seen:
            seen, last_change = current, now()
        elif now() - last_change > PATIENCE_SECONDS:
            at = f" at step {progress.step}" if progress and progress.step else ""
            raise RefusedError(
                f"the demo's job is {job.state}{at} and has not progressed for {duration(PATIENCE_SECONDS)}",
                hint="`orch doctor` checks this machine",
            )
        if progress is None or progress.step is None or not progress.total_steps:
            continue
        if progress.step - shown_step >= progress.total_steps // 12:
            shown_step = progress.step
            printer.progress(job)
        if not killed and progress.step >= KILL_AT_FRACTION * progress.total_steps and job.state == "RUNNING":
            killed = _kill_one(job, printer)


def _kill_one(job: JobView, printer: _Printer) -> bool:
    victim = job.gpus[-1]
    if victim.pid is None:
        return False
    os.kill(victim.pid, signal.SIGKILL)
    printer.print_line(f"kill -9 {victim.pid}: rank {victim.rank} is dead")
    return True


def _print_end(job: JobView, accuracy: float | None, client: Client, printer: _Printer) -> None:
    if printer.quiet:
        return
    timings = job.timings
    for recovery in timings.recovery_seconds:
        printer.print_line(
            f"recovered in {duration(recovery)} from death to the next new step; {timings.steps_lost} steps done again"
        )
    printer.print_line(
        f"{job.state}: {job.reason}" + (f"; test accuracy {accuracy:.1%}" if accuracy is not None else "")
    )
    printer.print_line("timeline, in seconds since the submission:")
    for event in sorted(client.events(job.id), key=lambda each: each.at):
        if event.kind != "checkpoint_saved":
            printer.print_line(f"  {event.at - job.submitted_at:8.3f}  {event.summary}")


def _stop(client: Client, printer: _Printer) -> None:
    try:
        for job in client.jobs().jobs:
            if not job.is_terminal:
                client.cancel(job.id)
                client.wait(job.id, timeout_seconds=STOP_SECONDS)
        daemon = client.health().pid
        client.shutdown()
    except DaemonUnreachableError:
        return
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if _is_gone(daemon):
            return
        time.sleep(0.05)
    printer.print_line("the daemon is slow to stop; see `ps`")


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # a child of the demo must be reaped
        os.waitpid(pid, os.WNOHANG)
    return not Path(f"/proc/{pid}").exists()
