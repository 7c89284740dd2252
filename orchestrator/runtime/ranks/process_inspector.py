"""Inspects a rank's processes from outside: kernel state, stacks, and a cheap sample each second.

Reads /proc, and has py-spy read the stacks without stopping any process. Decides nothing (core.health does), and never
fails: ``problem`` names what is unreadable. Linux only, like everything that starts ranks.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from orchestrator.core.diagnosis.health import TIMER, Frame, RankLook, Thread, Wait, in_set_up
from orchestrator.core.diagnosis.observation import ProcessSeen
from orchestrator.gpu.proc import Sleep, in_process_group, sleeps_in
from orchestrator.parts import install_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STACK_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.9
REPORT_SECONDS: Final = 5.0
_ENDED: Final = ("Z", "X")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
# The number of the system call in which a lock waits. Any other sleep waits for something outside of the process.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
NANOSLEEP: Final = {"x86_64": (35, 230), "aarch64": (101, 115)}.get(platform.machine(), ())
_PROC: Final = Path("/proc")
_LONGEST_SIZE: Final = 8
_REFUSED: Final = "the kernel does not permit reading its stacks (sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE for the daemon)"


def look_at(rank: int, root_pid: int, *, training_pid: int | None = None, stacks: bool) -> RankLook:
    """Inspect the rank with the process ``root_pid``; ``stacks`` costs some 20 ms of processor time.

    ``training_pid`` is the process below it that reports, if known: with `bash run.sh` the root does not train.
    """
    at = time.monotonic()
    tree = process_tree(root_pid)
    pid = training_pid if training_pid in tree else root_pid
    fields = _stat(pid)
    if not fields:
        return RankLook(rank=rank, at=at, pid=pid, problem="its process is gone")
    state, cpu, io, stopped = fields[0], 0, 0, 0
    for process in tree:
        each = _stat(process)
        cpu += _ticks(each)
        io += _io_bytes(process)
        if each[:1] == ["T"] and not stopped:
            stopped = process
    wait, name = _wait(pid, state)
    threads, problem = _stacks(pid) if stacks else ((), "")
    sets_up = bool(threads) and in_set_up(threads[0].frames)
    return RankLook(
        rank=rank,
        at=at,
        pid=pid,
        state="T" if stopped else state,
        stopped_pid=stopped,
        cpu_seconds=cpu / _TICKS,
        io_bytes=io,
        wait=wait,
        wait_name=name,
        threads=threads,
        problem=problem,
        world_size=_world_size(pid) if sets_up else None,
    )


def report_lines(look: RankLook) -> list[str]:
    """Return the inspection as lines for the rank's log and for users."""
    what = f"process {look.pid}, state {look.state or 'gone'}, {look.cpu_seconds:.2f} s of processor time"
    lines = [f"[orch] stacks of rank {look.rank}: {what}" + (f", in {look.wait_name}" if look.wait_name else "")]
    if look.stopped_pid:
        lines.append(f"[orch]   process {look.stopped_pid} is stopped")
    if look.problem:
        lines.append(f"[orch]   {look.problem}")
    for thread in look.threads:
        lines.append(f"[orch]   thread {thread.name}")
        lines += [f"[orch]     {frame}" for frame in thread.frames]
    return lines


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # a Path for each costs more than the read
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int, proc: Path = _PROC) -> list[str]:
    """Return the fields of a process from its state on; empty when it is gone."""
    fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 21 else []


def _ticks(fields: Sequence[str]) -> int:
    """Return the processor time of a process and of its ended children."""
    return sum(map(int, fields[11:15]))


def _io_bytes(pid: int) -> int:
    lines = _read(f"/proc/{pid}/io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def process_tree(pid: int, proc: Path = _PROC) -> list[int]:
    """Return the process and everything below it."""
    found = [pid]
    for process in found:
        for task in _tasks(proc, process):
            found += [int(child) for child in _read(f"{proc}/{process}/task/{task}/children").split()]
    return found


def _tasks(proc: Path, pid: int) -> list[str]:
    try:
        return os.listdir(f"{proc}/{pid}/task")  # noqa: PTH208  # the same
    except OSError:
        return []


def _wait(pid: int, state: str) -> tuple[Wait, str]:
    """Return the main thread's system call, and the kernel's name for its wait."""
    if state == "R":
        return Wait.RUNNING, ""
    name = _read(f"/proc/{pid}/wchan").strip().strip("0")
    fields = _read(f"/proc/{pid}/syscall").split()
    if len(fields) < 6 or not fields[0].isdigit():
        return (Wait.UNKNOWN if name.startswith("futex") or not name else Wait.OUTSIDE), name
    if int(fields[0]) != _FUTEX:
        return Wait.OUTSIDE, TIMER if int(fields[0]) in NANOSLEEP else name
    endless = int(fields[4], 16) == 0
    return (Wait.LOCK if endless else Wait.OUTSIDE), name


def _stacks(pid: int) -> tuple[tuple[Thread, ...], str]:
    """Return the Python threads of a process, its main thread first, or why there are none."""
    dump, problem = _py_spy_output(pid)
    if dump is None:
        return (), problem
    try:
        return _threads(pid, json.loads(dump)), ""
    except (ValueError, KeyError, TypeError) as error:
        return (), f"py-spy's output cannot be parsed: {error}"


def _world_size(pid: int) -> int | None:
    """Return the size of the process group that the main thread sets up, from torch's own variables; None if unknown."""
    dump, _ = _py_spy_output(pid, "--locals")
    try:
        threads = json.loads(dump or "[]")
        frames = [frame for thread in threads if thread.get("os_thread_id") == pid for frame in thread["frames"]]
        sizes = [
            str(local.get("repr") or "")
            for frame in frames
            if "/torch/distributed/" in frame["filename"]
            for local in frame.get("locals") or ()
            if local["name"] in ("group_size", "world_size")
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((int(text) for text in sizes if text.isdigit() and len(text) < _LONGEST_SIZE), None)


def _py_spy_output(pid: int, *options: str) -> tuple[str | None, str]:
    """Return py-spy's JSON output about a process, or why there is none."""
    tool = find_py_spy()
    if tool is None:
        return None, f"py-spy is not installed on its node ({install_line('stacks')}), so there are no stacks"
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--full-filenames", "--json", *options, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STACK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"py-spy did not answer: {error}"
    if done.returncode != 0:
        stderr = " ".join(done.stderr.split())[:300]
        return (
            None,
            _REFUSED if "ermission" in stderr or "ptrace" in stderr else f"py-spy could not read its stacks: {stderr}",
        )
    return done.stdout, ""


def _threads(pid: int, dump: Sequence[dict[str, Any]]) -> tuple[Thread, ...]:
    ordered = sorted(dump, key=lambda thread: thread.get("os_thread_id") != pid)
    return tuple(
        Thread(
            name=thread.get("thread_name") or str(thread.get("os_thread_id") or thread["thread_id"]),
            frames=tuple(Frame(f["name"], f["filename"], int(f["line"])) for f in thread["frames"]),
        )
        for thread in ordered
    )


def find_py_spy() -> str | None:
    """Find the py-spy beside this interpreter, else the one in PATH; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


class ProcessWatch:
    """Samples of a rank, the evidence about scripts that report nothing: ``newest`` is the last reported, ``number`` its number. ``clock`` gives monotonic seconds."""

    def __init__(self, *, procfs: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = procfs
        self._clock = clock
        self.number = 0
        self.newest: ProcessSeen | None = None
        self.begin()

    def begin(self) -> None:
        """Prepare for a new process."""
        self.newest = None
        self._seen = ProcessSeen(at=0.0)
        self._grouped_pid = 0
        self._looked_at = self._reported_at = self._clock() - REPORT_SECONDS

    def look(self, root_pid: int, training_pid: int | None) -> None:
        """Sample the training thread, and less often all processes of the rank, when due."""
        now = self._clock()
        if not root_pid or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        pid = training_pid or root_pid
        fields = _stat(pid, self._proc)
        if not fields or fields[0] in _ENDED:
            return
        sleep = sleeps_in(pid, self._proc) if fields[0] == "S" else None
        locked, asleep = sleep is Sleep.LOCK, fields[0] == "D" or sleep is Sleep.OUTSIDE
        seen = self._seen
        self._seen = replace(seen, looks=seen.looks + 1, asleep=seen.asleep + asleep, locked=seen.locked + locked)
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._publish(root_pid, pid, now)

    def _publish(self, root_pid: int, pid: int, now: float) -> None:
        cpu, pages = 0, 0
        for process in process_tree(root_pid, self._proc):
            fields = _stat(process, self._proc)
            if fields and fields[0] not in _ENDED:
                cpu += _ticks(fields)
                pages += int(fields[21])
        self._seen = replace(
            self._seen,
            at=now,
            cpu_seconds=cpu / _TICKS,
            resident_bytes=pages * _PAGE_BYTES,
            available_bytes=_available(self._proc),
            grouped=(self._seen.grouped and pid == self._grouped_pid) or in_process_group(pid, self._proc),
        )
        self._grouped_pid = pid  # a process does not leave its group: forty threads need not be read again
        self.newest = self._seen
        self.number += 1


def _available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found is not None and found.isdigit() else None
