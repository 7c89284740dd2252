"""Drills: one fault injected into a running job, and the report of its recovery."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.api.errors import OrchError, RefusedError
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import EventView, JobView


class Kind(enum.StrEnum):
    """A kind of drill, as ``--kinds`` names it."""

    RANK = "rank"
    ACTOR = "actor"
    HANG = "hang"
    TEAR_CHECKPOINT = "tear-checkpoint"
    DAEMON = "daemon"
    AGENT = "agent"
    RAY = "ray"
    FILL_DISK = "fill-disk"


WHAT: Final = {
    Kind.RANK: "kills the training process of rank {rank}; the job continues from its newest checkpoint",
    Kind.ACTOR: "kills the actor of rank {rank}; the gang is started again and continues from its newest checkpoint on storage",
    Kind.AGENT: "kills the agent of the node of rank {rank}; Ray starts another, and all jobs keep running",
    Kind.RAY: "kills Ray's head; EVERY job of this daemon continues from its newest checkpoint on storage",
    Kind.FILL_DISK: "fills the disk of its checkpoints until a save has failed; the job keeps running and saves again",
    Kind.DAEMON: "kills the daemon and starts it again; all jobs keep running; submissions fail meanwhile",
    Kind.HANG: "stops rank {rank} without ending it; when the hang is detected, the job continues from its newest checkpoint",
    Kind.TEAR_CHECKPOINT: "destroys the newest checkpoint and kills the actor of rank {rank}; the job goes back to the one before",
}
IN_A_CAMPAIGN: Final = (Kind.RANK, Kind.ACTOR, Kind.HANG, Kind.TEAR_CHECKPOINT, Kind.DAEMON, Kind.AGENT)
"""The default kinds of a campaign: without those that fill a disk or end Ray for every job."""
FELT_BY_ALL: Final = frozenset({Kind.DAEMON, Kind.AGENT, Kind.RAY})
"""Kinds that affect other jobs of the daemon too."""
CHARGED_TO: Final = {
    Kind.RANK: "infra",
    Kind.ACTOR: "infra",
    Kind.TEAR_CHECKPOINT: "infra",
    Kind.RAY: "infra",
    Kind.HANG: "hang",
}
"""Failure class that the fault leads to; its budget of restarts is charged."""


class RankProcesses:
    """The training process of one rank of a job, and its actor. ``job`` is the job at the start of the drill."""

    def __init__(self, client: Client, job: JobView, rank: int) -> None:
        self._client = client
        self._job = job
        self._rank = rank

    def require_here(self) -> None:
        """Raise RefusedError unless the rank runs on this machine."""
        job, rank = self._job, self._rank
        node = job.gpus[rank].node if rank < len(job.gpus) else "?"
        if node != socket.gethostname():
            raise RefusedError(
                f"rank {rank} of {job.id} runs on {node}, this is {socket.gethostname()}",
                hint=f"run the drill on {node}, or choose a rank of this machine with --rank",
            )

    def rank_pid(self) -> int:
        """Return the id of the present training process; 0 if there is none."""
        job = self._client.job(self._job.id)
        pid = job.gpus[self._rank].pid if self._rank < len(job.gpus) and job.state == "RUNNING" else None
        return pid or 0

    def actor_pid(self) -> int:
        """Return the process id of the newest gang's actor; 0 if no gang was placed."""
        placed = [e for e in self._client.events(self._job.id) if e.kind == "gang_placed"]
        return int(placed[-1].body["seats"][self._rank]["actor_pid"]) if placed else 0


def send_signal(find: Callable[[], int], what: str, number: signal.Signals = signal.SIGKILL) -> str:
    """Send a signal to the process that ``find`` returns both before and after it is held; return what was done.

    Raises RefusedError if ``find`` returns 0, another process the second time, or another user's process.
    """
    pid = find()
    try:
        held = os.pidfd_open(pid) if pid else -1
    except OSError:
        held = -1
    if held < 0:
        raise RefusedError(f"{what} has no process on this machine", hint="it is just being restarted: try again")
    try:
        if find() != pid:
            raise RefusedError(f"{what} was restarted just now", hint="try again")
        signal.pidfd_send_signal(held, number)
    except PermissionError as error:
        raise RefusedError(f"{what} is another user's process", hint="run the drill as the daemon's user") from error
    finally:
        os.close(held)
    did = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}.get(number, f"sent {number.name} to")
    return f"{did} {what} (process {pid})"


POLL_SECONDS = 0.02
STEP_SECONDS = 30.0
SUPERVISOR_SECONDS = 3.0  # time in which a service manager may restart the daemon


class NotRecoveredError(RefusedError):
    """The fault was injected, and the expected recovery was not seen in time. `orch explain` shows what happened."""

    code = "not_recovered"


@dataclass(slots=True, kw_only=True)
class DrillReport:
    """The result of a drill. Seconds count from the fault; None if there is nothing to measure.

    ``intact``: the job continues, its attempts follow one another without overlap, and its newest checkpoint verifies.
    """

    job_id: str
    drill: str
    did: str = ""
    detection_seconds: float | None = None
    recovery_seconds: float | None = None
    steps_lost: int | None = None
    attempt_before: int = 0
    attempt_after: int = 0
    checkpoint_step: int | None = None
    intact: bool = False
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)


class Drill:
    """One drill on one job: ``check`` refuses or describes the fault, ``run`` injects it and reports."""

    def __init__(self, client: Client, ref: str, *, rank: int = 0, seconds: float = 120.0) -> None:
        self._client = client
        self._rank = rank
        self._seconds = seconds
        self.job = client.job(ref)
        if self.job.state != "RUNNING":
            raise RefusedError(
                f"{self.job.id} is {self.job.state}; a drill needs a running job",
                hint=f"wait until it runs: orch status {self.job.id} --watch",
            )
        if not 0 <= rank < self.job.num_workers:
            raise RefusedError(f"{self.job.id} has ranks 0 to {self.job.num_workers - 1}", hint="choose another --rank")
        self._processes = RankProcesses(client, self.job, rank)

    # -- faults

    def kill_rank(self) -> DrillReport:
        """Send SIGKILL to the training process of the rank."""
        self._processes.require_here()
        return self._after_fault("kill rank", lambda: send_signal(self._processes.rank_pid, f"rank {self._rank}"))

    def kill_actor(self) -> DrillReport:
        """Send SIGKILL to the rank's actor: its lifeline closes, and the whole gang is created again."""
        self._processes.require_here()
        return self._after_fault(
            "kill actor", lambda: send_signal(self._processes.actor_pid, f"the actor of rank {self._rank}")
        )

    def hang(self) -> DrillReport:
        """Send SIGSTOP to the training process of the rank. If the hang is only reported, the process is continued."""
        self._processes.require_here()
        what = f"rank {self._rank}"
        try:
            return self._after_fault("hang", lambda: send_signal(self._processes.rank_pid, what, signal.SIGSTOP))
        finally:
            if self._client.job(self.job.id).attempt == self.job.attempt:
                with contextlib.suppress(RefusedError):
                    send_signal(self._processes.rank_pid, what, signal.SIGCONT)

    def tear_checkpoint(self) -> DrillReport:
        """Truncate the newest checkpoint's largest file by half, then kill the rank's actor so that it is read again."""
        self._processes.require_here()
        saved = [c for c in self._client.checkpoints(self.job.id, verify=True) if c.valid and Path(c.path).is_dir()]
        if len(saved) < 2:
            raise RefusedError(
                f"{self.job.id} has {plural(len(saved), 'good checkpoint')} on this machine; tearing one needs another to go back to",
                hint=f"wait for the next: orch checkpoints {self.job.id}",
            )
        torn = saved[0]

        def inject() -> str:
            files = (each for each in trees.walk(torn.path, trees.Problems()) if each.is_file)
            size, name = max((each.status.st_size, each.path) for each in files)
            victim = Path(torn.path, name)
            os.truncate(victim, size // 2)
            return f"tore {victim} and {send_signal(self._processes.actor_pid, f'the actor of rank {self._rank}')}"

        report = self._after_fault("tear checkpoint", inject)
        trusted = [c for c in self._client.checkpoints(self.job.id, verify=True) if c.path == torn.path and c.valid]
        if trusted:
            report.problems.append(f"the torn checkpoint of step {torn.step} verifies as good")
        report.intact = not report.problems
        return report

    def kill_daemon(self) -> DrillReport:
        """Send SIGKILL to the daemon; restart it with the same command line unless something else does so."""
        import psutil

        pid = self._client.health().pid
        try:
            process = psutil.Process(pid)
            command, environ, cwd = process.cmdline(), process.environ(), process.cwd()
        except psutil.Error as error:
            raise RefusedError(
                f"the daemon is process {pid}, which is not visible from here ({error})",
                hint="run the drill on the daemon's machine, as its owner",
            ) from error
        report = DrillReport(job_id=self.job.id, drill="kill daemon", attempt_before=self.job.attempt)
        step = self._step()
        began = time.time()
        report.did = send_signal(lambda: pid, "the daemon")
        try:
            self._until_daemon(pid, lambda: _start(command, environ, cwd))
        except (KeyboardInterrupt, SystemExit):  # an interrupted drill must also leave a running daemon
            if not _answers(self._client, other_than=pid):
                _start(command, environ, cwd)
            raise
        job = self._wait("a later step", lambda: self._beyond(step))
        report.recovery_seconds = round(time.time() - began, 3)
        report.steps_lost = 0
        if job.attempt != report.attempt_before:
            report.problems.append("a new attempt was started: the daemon did not adopt what was running")
        return self._judged(report)

    # -- results

    def _after_fault(self, drill: str, inject: Callable[[], str]) -> DrillReport:
        report = DrillReport(job_id=self.job.id, drill=drill, attempt_before=self.job.attempt)
        reports_steps = self._step() is not None
        seen = self._client.events(self.job.id, tail=1)[-1].sequence
        began = time.time()
        report.did = inject()

        def done() -> Sequence[EventView] | None:
            fresh = self._client.events(self.job.id, after=seen)
            last = "first_step" if reports_steps else "attempt_running"
            ended = any(e.kind == "job_finished" for e in fresh)
            ended |= any(e.body.get("code") == "hang" for e in fresh)  # the hang is only reported: no recovery follows
            again = any(e.kind == last and (e.attempt or 0) > report.attempt_before for e in fresh)
            return fresh if ended or again else None

        fresh = self._wait("the job continues", done)
        for event in fresh:
            found = event.kind == "attempt_failed" or event.body.get("code") == "hang"
            if found and report.detection_seconds is None:
                report.detection_seconds = round(event.at - began, 3)
            if (event.attempt or 0) <= report.attempt_before:
                continue
            if event.kind == "first_step":
                report.recovery_seconds = round(float(event.body["step_at"]) - began, 3)
                report.steps_lost = int(event.body["steps_lost"])
            elif event.kind == "attempt_running" and not reports_steps:
                report.recovery_seconds = round(event.at - began, 3)
        return self._judged(report)

    def _judged(self, report: DrillReport) -> DrillReport:
        job = self._client.job(self.job.id)
        report.attempt_after = job.attempt
        if job.state in ("FAILED", "CANCELLED"):
            report.problems.append(f"the job is {job.state}: {job.reason}")
        report.problems += overlaps(self._client.events(job.id))
        saved = [c for c in self._client.checkpoints(job.id, verify=True) if c.valid]
        if saved:
            report.checkpoint_step = saved[0].step
        elif job.checkpoint is not None and job.checkpoint.path:
            report.problems.append("no checkpoint verifies")
        report.intact = not report.problems
        return report

    def _step(self) -> int | None:
        """Return the job's newest step; None for a job that reports none in time."""
        deadline = time.monotonic() + STEP_SECONDS
        while time.monotonic() < deadline:
            job = self._client.job(self.job.id)
            if job.progress is not None and job.progress.step is not None:
                return job.progress.step
            if job.progress is not None or job.is_terminal:
                break
            time.sleep(POLL_SECONDS)
        return None

    def _beyond(self, step: int | None) -> JobView | None:
        try:
            job = self._client.job(self.job.id)
        except OrchError:
            return None
        newer = step is None or (job.progress is not None and (job.progress.step or 0) > step)
        return job if newer or job.is_terminal else None

    def _until_daemon(self, old_pid: int, start: Callable[[], None]) -> None:
        deadline, started = time.monotonic() + SUPERVISOR_SECONDS, False

        def back() -> bool:
            nonlocal started
            try:
                return self._client.health().pid != old_pid
            except OrchError:
                if not started and time.monotonic() > deadline:
                    started = True
                    start()
                return False

        self._wait("the daemon answers again", back)

    def _wait(self, what: str, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            found = ask()
            if found:
                return found
            time.sleep(POLL_SECONDS)
        raise NotRecoveredError(
            f"the drill was done, but this was not seen within {self._seconds:g} s: {what}",
            hint=f"orch events {self.job.id} shows its state; --timeout waits longer",
        )


def _answers(client: Client, *, other_than: int) -> bool:
    try:
        return client.health().pid != other_than
    except OrchError:
        return False


def overlaps(history: Sequence[EventView]) -> list[str]:
    """Return errors in the order of attempts: each must start once, and only after the end of the previous one."""
    problems: list[str] = []
    started: set[int] = set()
    live: int | None = None
    for event in history:
        number = event.attempt or 0
        if event.kind == "attempt_started":
            if number in started:
                problems.append(f"attempt {number} was started twice")
            if live is not None:
                problems.append(f"attempt {number} was started while attempt {live} was not confirmed gone")
            started.add(number)
            live = number
        elif (event.kind in ("attempt_gone", "attempt_succeeded") and number == live) or event.kind == "gang_released":
            live = None
    return problems


def _start(command: Sequence[str], environ: dict[str, str], cwd: str) -> None:
    subprocess.Popen(
        command,
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
