"""Drills that a whole machine feels: a full disk, stopped or killed helpers of orch and Ray."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchestrator.api.errors import RefusedError
from orchestrator.cli.drills.drills import Drill, DrillReport, Kind, send_signal
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.views import EventView


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


class MachineDrill(Drill):
    """The drills of ``Drill``, and those on the job's environment."""

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
