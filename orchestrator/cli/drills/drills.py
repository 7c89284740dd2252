"""Drills: one fault injected into a running job or its machine (a full disk, a killed helper), and the report of its recovery."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator import trees
from orchestrator.api.errors import OrchError, RefusedError
from orchestrator.units import plural, size

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
    """One drill on one job: ``run`` injects the fault and reports."""

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

    def run(self, kind: Kind, *, much: bool = False) -> DrillReport:
        """Run the drill of that kind; ``much`` as in ``fill_disk``."""
        match kind:
            case Kind.RANK:
                return self.kill_rank()
            case Kind.ACTOR:
                return self.kill_actor()
            case Kind.HANG:
                return self.hang()
            case Kind.TEAR_CHECKPOINT:
                return self.tear_checkpoint()
            case Kind.DAEMON:
                return self.kill_daemon()
            case Kind.AGENT:
                return self.kill_agent()
            case Kind.RAY:
                return self.kill_ray()
            case Kind.FILL_DISK:
                return self.fill_disk(much=much)

    def kill_agent(self) -> DrillReport:
        """Send SIGKILL to the agent of the rank's node. ``recovery_seconds`` counts until another one serves."""
        self._processes.require_here()
        report = DrillReport(job_id=self.job.id, drill="kill agent", attempt_before=self.job.attempt)
        raylet, old, step = self._raylet(), self._agent_pid(), self._step()
        began = time.time()
        report.did = send_signal(self._agent_pid, "the node's agent")
        self._wait("Ray makes another agent", lambda: [p for p, _ in _agents(raylet) if p != old])
        report.detection_seconds = round(time.time() - began, 3)
        self._wait("another agent serves", lambda: [p for p, made in _agents(raylet) if made and p != old])
        report.recovery_seconds = round(time.time() - began, 3)
        self._wait_for_step(report, step, "the agent's death")
        return self._judged(report)

    def kill_ray(self) -> DrillReport:
        """Send SIGKILL to Ray's head, which the daemon started: every job continues from its newest checkpoint on storage."""
        self._own_head()

        def inject() -> str:
            done = [send_signal(lambda: self._head_pid("raylet"), "the raylet")]
            with contextlib.suppress(RefusedError):  # the daemon may already have removed the rest
                done.append(send_signal(lambda: self._head_pid("gcs_server"), "the control store"))
            return " and ".join(done)

        return self._after_fault("kill ray", inject)

    def fill_disk(self, *, much: bool) -> DrillReport:
        """Fill the disk of the job's checkpoints until a save has failed and a later step was done.

        ``detection_seconds`` ends when the failed save is reported. ``recovery_seconds`` begins when the space is freed
        and ends when a checkpoint is complete. ``much`` allows taking more than a gigabyte.
        """
        self._processes.require_here()
        directory = self._saves_to()
        refuse_to_fill(directory, much=much)
        report = DrillReport(job_id=self.job.id, drill="fill disk", attempt_before=self.job.attempt)
        seen = self._client.events(self.job.id, tail=1)[-1].sequence
        with DiskFiller(directory) as filler:
            began = time.time()
            taken = filler.fill()
            report.did = f"took the {size(taken)} that were free for {directory}, and gave them back"

            def reported() -> EventView | None:
                filler.fill()  # takes space that retention or other programs have freed meanwhile
                return next((e for e in self._since(seen) if _is_failed_save(e)), None)

            failed = self._wait("a save that fails is reported", reported)
            report.detection_seconds = round(failed.at - began, 3)
            self._wait_for_step(report, self._step(), "the full disk")
        freed = time.time()

        def saved() -> EventView | None:
            found = (e for e in self._since(seen) if e.kind == "checkpoint_saved" and e.body["path"] and e.at > freed)
            return next(found, None)

        report.recovery_seconds = round(self._wait("it saves again", saved).at - freed, 3)
        return self._judged(report)

    # -- observations

    def _wait_for_step(self, report: DrillReport, step: int | None, what: str) -> None:
        """Wait for a later step, in the same attempt."""
        job = self._wait("a later step", lambda: self._beyond(step))
        report.steps_lost = 0
        if job.attempt != report.attempt_before:
            report.steps_lost = None
            report.problems.append(f"a new attempt was started: {what} should not affect running jobs")

    def _since(self, sequence: int) -> list[EventView]:
        return list(self._client.events(self.job.id, after=sequence))

    def _saves_to(self) -> Path:
        """Return the directory of the newest checkpoint with a path. Raises RefusedError if not on this machine."""
        saved = [c for c in self._client.checkpoints(self.job.id) if c.path]  # the others are in memory
        if not saved:
            raise RefusedError(
                f"{self.job.id} has not saved yet; the drill shows that it saves again",
                hint=f"wait for its first checkpoint: orch checkpoints {self.job.id}",
            )
        path = saved[0].path
        if "://" in path or not Path(path).exists():
            where = (
                "to a storage that is not a disk"
                if "://" in path
                else "to a directory that does not exist on this machine"
            )
            raise RefusedError(
                f"{self.job.id} saves {where}: {path}",
                hint="this drill needs a checkpoint.storage_path on a file system of this machine",
            )
        return Path(path).parent

    # -- processes

    def _raylet(self) -> int:
        """Return the process id of the raylet of the rank's actor."""
        import psutil

        try:
            return int(psutil.Process(self._processes.actor_pid()).ppid())
        except (psutil.Error, ValueError) as error:
            raise RefusedError(
                f"the actor of rank {self._rank} has no process on this machine",
                hint="it is being restarted: try again",
            ) from error

    def _agent_pid(self) -> int:
        """Return the process id of the agent of the rank's node; 0 if there is none at this moment."""
        found = [pid for pid, _ in _agents(self._raylet())]
        if len(found) < 2:
            return found[0] if found else 0
        named = {node.agent_pid for node in self._client.nodes()}  # another daemon also has an agent on this node
        return next((pid for pid in found if pid in named), 0)

    def _own_head(self) -> None:
        if not self._head_pid("raylet"):
            raise RefusedError(
                "the daemon did not start the Ray that it uses, or not on this machine; jobs of others would end with it",
                hint="run the drill on a daemon without --ray-address, on its machine and as its user",
            )

    def _head_pid(self, name: str) -> int:
        """Return the id of a process of the daemon's own Ray head; 0 if it has none alive on this machine."""
        import psutil

        health = self._client.health()
        try:
            head = json.loads((Path(health.home) / "ray" / "head.json").read_text())
            pid, created = head["pids"][name]
            alive = abs(psutil.Process(pid).create_time() - created) < 1.0
        except (OSError, ValueError, KeyError, psutil.Error):
            return 0
        return int(pid) if alive and head["gcs_address"] == health.ray_address else 0


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


MUCH_BYTES = 1024**3  # more than this is taken only with --yes
LOCAL_KINDS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
COMMON_PLACES = ("/", "/tmp", "/var", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - orch does not write there
_PIECES = (64 * 1024**2, 1024**2, 64 * 1024, 4096)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDY = "give the job a checkpoint.storage_path on a small file system of its own"


def refuse_to_fill(
    directory: Path, *, much: bool, common: Sequence[str] | None = None, much_bytes: int = MUCH_BYTES
) -> int:
    """Return the bytes that fill the file system of ``directory``. Raises RefusedError if that would affect others.

    ``much`` permits more than ``much_bytes``; ``common`` are directories that must not be filled (None: the usual).
    """
    device = directory.stat().st_dev
    for place in common if common is not None else (*COMMON_PLACES, str(Path.home())):
        with contextlib.suppress(OSError):
            if Path(place).stat().st_dev == device:
                raise RefusedError(
                    f"{directory} is on the file system of {place}, which other programs need", hint=_REMEDY
                )
    kind = file_system_kind(directory)
    if kind not in LOCAL_KINDS:
        raise RefusedError(
            f"{directory} is on {kind or 'an unknown'} file system, which others may share", hint=_REMEDY
        )
    free = _free_bytes(directory)
    if kind == "tmpfs" and free > _memory_available_bytes() // 2:
        raise RefusedError(f"filling {directory} would take half of the memory that is left", hint=_REMEDY)
    if free > much_bytes and not much:
        raise RefusedError(
            f"filling {directory} takes {size(free)} until the drill is over",
            hint=f"pass --yes to proceed; or {_REMEDY}",
        )
    return free


def file_system_kind(path: Path) -> str:
    """Return the kernel's name of the file system of ``path``; empty if unknown."""
    target, best, kind = str(path.resolve()), "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        where = before.split()[4].encode().decode("unicode_escape")
        inside = target == where or target.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):
            best, kind = where, after.split()[0]
    return kind


class DiskFiller:
    """A context manager that takes the space of a disk and frees it at the end."""

    def __init__(self, directory: Path) -> None:
        self._fd = _nameless(directory)
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def fill(self) -> int:
        """Take all free space, again at each call; return the bytes held. Raises OSError, but not for a full disk."""
        for piece in _PIECES:
            while self._grow(piece):
                pass
        return self.size_bytes

    def _grow(self, size: int) -> bool:
        try:
            os.posix_fallocate(self._fd, self.size_bytes, size)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        self.size_bytes += size
        return True


def _nameless(directory: Path) -> int:
    with contextlib.suppress(OSError):  # not every file system supports files without a name
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    handle, name = tempfile.mkstemp(prefix=".orch-drill-", dir=directory)
    Path(name).unlink()
    return handle


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail) * stat.f_frsize


def _memory_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


AGENT = "ray::NodeAgent"


def _is_failed_save(event: EventView) -> bool:
    return event.kind == "job_noted" and event.body.get("code") == "save_failed"


def _agents(raylet: int) -> list[tuple[int, bool]]:
    """Return process ids of the node agents under a raylet, and whether each has been created and serves."""
    import psutil

    from orchestrator.runtime.cluster.head import of_session

    found: list[tuple[int, bool]] = []
    for process in of_session(raylet):
        with contextlib.suppress(psutil.Error):
            title = next(iter(process.cmdline()), "")
            if title.startswith(AGENT) and process.uids().real == os.getuid():
                found.append((process.pid, "__init__" not in title))
    return found
