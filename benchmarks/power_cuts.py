"""Cuts the power of the disk below a home, again and again, at every point of a job's life, and checks what is left.

The home is on an ext4 file system in a file, whose shutdown call loses what was not synced, as a power cut does. After each cut every
process of the home is killed, the disk is mounted again, and a daemon is started on it. Then: the daemon starts, every acknowledged job
is there and ends SUCCEEDED, and each job that SUCCEEDED has proved outside of the disk, in its last line, that it ran with the whole content
that was submitted, to its last step. Needs root, and loop devices.

The points: ``submit`` (while a submission is written), ``queued`` (some seconds after it was acknowledged, before it starts), ``start``, ``save``
(while it saves, every tenth of a second), ``restart`` (just after a rank was killed), ``backup`` (while one is written; it is whole or absent), ``up``
(while a daemon starts), ``first`` (while or just after the first daemon of a new home starts).
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import measure
from orchestrator.api.errors import OrchError
from tests.support.disks import LossyDisk
from tests.support.stack import ORCH, PYTHON, Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS: Final = 20
DATA_BYTES: Final = 200_000
SCRIPT: Final = """\
import hashlib, json, sys, time
from pathlib import Path
from part import module
from orchestrator.train import context
ctx = context()
found = ctx.load()
n, total = (found.state["n"], found.state["total"]) if found is not None else (0, 0)
while n < int(sys.argv[2]):
    time.sleep(0.05)
    n += 1
    total += n
    ctx.report(step=n)
    if n % 2 == 0:
        ctx.save({"n": n, "total": total}, step=n)
digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path().rglob("*")) if path.suffix in (".py", ".bin"))).hexdigest()
with open(sys.argv[1], "a") as ledger:
    ledger.write(json.dumps({"job": ctx.job_id, "n": n, "total": total, "digest": digest, "module": module.WORD}) + "\\n")
"""
MODULE: Final = 'WORD = "whole"\n'


@dataclass(slots=True)
class Tally:
    """Cuts by point, jobs that were acknowledged, and what was wrong."""

    cuts: collections.Counter[str] = field(default_factory=collections.Counter)
    acknowledged: int = 0
    unacknowledged: int = 0
    homes: int = 0
    problems: list[str] = field(default_factory=list)


class Place:
    """A disk with a home, whose power is cut. ``folder`` is on another disk: the job's directory and the ledger are there."""

    def __init__(self, folder: Path, tally: Tally, seed: int) -> None:
        self._folder, self._tally, self._dice = folder, tally, random.Random(seed)
        self._work, self._ledger = folder / "work", folder / "ledger"
        (self._work / "part").mkdir(parents=True)
        (self._work / "train.py").write_text(SCRIPT)
        (self._work / "part" / "module.py").write_text(MODULE)
        (self._work / "part" / "data.bin").write_bytes(self._dice.randbytes(DATA_BYTES))
        parts = (path for path in sorted(self._work.rglob("*")) if path.suffix in (".py", ".bin"))
        self._digest = hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()
        self._disk = LossyDisk(folder)
        self._jobs: dict[str, bool] = {}  # by id: whether it was acknowledged
        self._keys: set[str] = set()
        self.points: dict[str, Callable[[], None]] = {
            "first": self._first,
            "submit": self._submit,
            "queued": self._queued,
            "start": self._start,
            "save": self._save,
            "restart": self._restart,
            "backup": self._backup,
            "up": self._up,
        }
        self._new_home()

    def _new_home(self) -> None:
        self._tally.homes += 1
        self._stack = Stack(home=self._disk.where / f"home-{self._tally.homes}")
        self._stack.home.mkdir()
        self._jobs.clear()

    def close(self) -> None:
        """End everything, and remove the disk."""
        self._stack.close()
        self._disk.close()

    def run(self, point: str) -> None:
        """Cut the power once at this point, and check what is left."""
        if point != "first" and not self._stack.answers():
            self._stack.up()
        self.points[point]()
        self._disk.cut()
        self._stack.kill_everything()
        self._disk.boot()
        self._tally.cuts[point] += 1
        self._check(point)

    # -- the points: each returns at the moment of the cut

    def _submission(self, *, hold: bool = False) -> str:
        spec = {
            "version": 1,
            "name": "cut",
            "entrypoint": f"{PYTHON} train.py {self._ledger} {STEPS}",
            "resources": {"resources_per_worker": {"gpu": 0, "cpu": 0.1}},
            "hold": hold,
        }
        reply = self._stack.client.submit_text(json.dumps(spec), cwd=str(self._work))
        assert reply.job_id is not None
        self._jobs[reply.job_id] = True
        return reply.job_id

    def _wait(self, most: float) -> None:
        time.sleep(self._dice.uniform(0, most))

    def _submit(self) -> None:
        def try_to() -> None:
            with contextlib.suppress(OrchError, OSError):
                self._submission()

        thread = threading.Thread(target=try_to, daemon=True)
        thread.start()
        self._wait(0.4)

    def _queued(self) -> None:
        self._submission(hold=True)
        self._wait(8.0)

    def _start(self) -> None:
        self._submission()
        self._wait(0.5)

    def _save(self) -> None:
        job_id = self._submission()
        self._stack.wait_step(job_id, 1)
        self._wait(1.0)

    def _restart(self) -> None:
        job_id = self._submission()
        self._stack.wait_step(job_id, 4)
        for pid in _ranks(self._stack, job_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait(0.4)

    def _backup(self) -> None:
        self._submission(hold=True)
        self._target = self._disk.where / f"backup-{uuid.uuid4().hex}.sqlite3"
        subprocess.Popen(
            [*ORCH, "backup", str(self._target)],
            env=self._stack.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait(1.5)

    def _up(self) -> None:
        self._submission(hold=True)
        self._stack.client.shutdown()
        wait_until("the daemon has stopped", lambda: not self._stack.answers())
        self._begin_up()
        self._wait(6.0)

    def _first(self) -> None:
        self._stack.kill_everything()
        self._new_home()
        self._begin_up()
        self._wait(25.0)

    def _begin_up(self) -> None:
        command = [*ORCH, "up", "--read-listen", "127.0.0.1:0"]
        subprocess.Popen(
            command, env=self._stack.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._folder
        )

    # -- what is left

    def _check(self, point: str) -> None:
        self._stack.home.mkdir(exist_ok=True)  # where the first daemon had not yet made it
        try:
            self._stack.up()
        except AssertionError as error:
            self._wrong(point, f"the daemon does not start: {error}")
            self._new_home()
            return
        if point == "backup" and self._target.exists():
            done = self._stack.orch("backup", str(self._target), "--check")
            if done.returncode:
                self._wrong(point, f"the backup is not whole: {done.stdout}{done.stderr}")
            self._target.unlink()
        there = {job.id: job for job in self._stack.client.jobs().jobs}
        for job_id in self._jobs.keys() - there.keys():
            self._wrong(point, f"{job_id} was acknowledged, and is gone")
        self._tally.unacknowledged += len(there.keys() - self._jobs.keys())
        for job_id in there:
            with contextlib.suppress(OrchError):  # it was not on hold
                self._stack.client.resume(job_id)
        for job_id in there:
            job = self._stack.wait(job_id)
            proofs = self._proofs()
            if job.state != "SUCCEEDED":
                self._wrong(point, f"{job_id} is {job.state}: {job.reason}")
            elif not proofs.get(job_id):
                self._wrong(point, f"{job_id} is SUCCEEDED, and its script did not reach its end")
            elif wrong := [line for line in proofs[job_id] if line != self._right]:
                self._wrong(point, f"{job_id} ran with other content, or from a wrong state: {wrong[0]}")
        self._tally.acknowledged += len(self._jobs)
        self._jobs.clear()
        self._stack.client.prune(older_than_seconds=0)

    @property
    def _right(self) -> dict[str, Any]:
        return {"n": STEPS, "total": STEPS * (STEPS + 1) // 2, "digest": self._digest, "module": "whole"}

    def _proofs(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
        for line in map(json.loads, lines):
            found.setdefault(line.pop("job"), []).append(line)
        return found

    def _wrong(self, point: str, text: str) -> None:
        self._tally.problems.append(f"cut {sum(self._tally.cuts.values())} ({point}): {text}")


def _ranks(stack: Stack, job_id: str) -> list[int]:
    """Return the training processes of a job, by their working directory."""
    work = str(stack.settings.paths.work(job_id))
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((proc / "cwd").readlink()) == work and b"train.py" in (proc / "cmdline").read_bytes():
                found.append(int(proc.name))
    return found


def cut_power(
    count: int, seed: int, seconds: float = float("inf"), say: Callable[[str], None] = lambda _: None
) -> Tally:
    """Cut the power ``count`` times, at each point in turn, or until ``seconds`` are over; return what was found."""
    tally, deadline = Tally(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="orch-cuts-") as folder:
        place = Place(Path(folder), tally, seed)
        try:
            while sum(tally.cuts.values()) < count and time.monotonic() < deadline:
                point = list(place.points)[sum(tally.cuts.values()) % len(place.points)]
                began = time.monotonic()
                place.run(point)
                say(
                    f"{sum(tally.cuts.values())} {point} {time.monotonic() - began:.0f} s: {tally.problems or 'all is well'}"
                )
        finally:
            place.close()
    return tally


def main() -> int:
    """Run and report; return exit code 1 when something was lost or wrong."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument("--cuts", type=int, default=200, help="number of power cuts (default: 200)")
    options.add_argument("--seconds", type=float, default=float("inf"), help="end after this time (default: never)")
    options.add_argument("--seed", type=int, default=20_261_128)
    chosen = options.parse_args()
    tally = cut_power(chosen.cuts, chosen.seed, chosen.seconds, lambda text: print(text, file=sys.stderr, flush=True))
    result = {
        "cuts": dict(tally.cuts),
        "acknowledged jobs": tally.acknowledged,
        "jobs that exist without an acknowledgement": tally.unacknowledged,
        "homes": tally.homes,
        "seed": chosen.seed,
        "problems": tally.problems,
    }
    measure.report(result, chosen.json)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
