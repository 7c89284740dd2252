"""What users, their jobs and the machine do to a daemon beside killing its processes; each function checks its own promise.

A tree that no recursive program can remove, requests that are given up, a checkpoint whose writer dies twice, a full disk while jobs are
submitted, and a Ray that does not answer while the daemon connects. The job that is disturbed must make a new step after each.
"""

from __future__ import annotations

import json
import signal
import socket
import tempfile
from contextlib import ExitStack, closing, contextmanager
from os import kill
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import OrchError
from tests.support.disks import fill, free_bytes
from tests.support.stack import Stack, process_gone, wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

LEVELS: Final = 1500
"""Directories in one another: more than Python's limit of recursion."""
ABANDONED: Final = 8
"""Requests that are given up: more than a pool has threads."""
LARGE_BYTES: Final = 9_000_000_000
SLACK_BYTES: Final = 64 * 1024 * 1024
"""What may be used of the disk after it was full: the store's reserve, and logs."""

DEEP: Final = """
import os, sys
os.makedirs(sys.argv[1] if len(sys.argv) > 1 else os.environ["ORCH_SNAPSHOT_DIR"], exist_ok=True)
os.chdir(sys.argv[1] if len(sys.argv) > 1 else os.environ["ORCH_SNAPSHOT_DIR"])
for level in range({levels}):
    os.mkdir("deep")
    os.chdir("deep")
"""
LARGE: Final = """
import os
os.makedirs("out", exist_ok=True)
with open("out/large", "wb") as file:
    file.truncate({size})
"""
SMALL: Final = """
import os
os.makedirs("out", exist_ok=True)
open("out/file", "w").close()
"""
# The first death comes after a whole save, the second while the next attempt overwrites the file.
OVERWRITES: Final = """
import os, signal, sys, time, zipfile
deaths = sum(os.path.exists(f"death-{number}") for number in range(2))
os.makedirs("out", exist_ok=True)
step = 0
if os.path.exists("out/state.zip"):
    with zipfile.ZipFile("out/state.zip") as file:
        step = int(file.read("step"))
assert deaths == 0 or step == 30, f"begins at {step} after {deaths} deaths"
def die():
    open(f"death-{deaths}", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if deaths == 1:
    time.sleep(float(sys.argv[1]))
    with open("out/state.zip", "wb") as file:
        file.write(b"PK\\3\\4 half a file")
    die()
while step < 40:
    step += 1
    print(f"step {step}/40", flush=True)
    if step % 10 == 0:
        with zipfile.ZipFile("out/state.zip", "w") as file:
            file.writestr("step", str(step))
        time.sleep(0.1)
    if step == 30 and deaths == 0:
        die()
"""


@contextmanager
def _submitted(stack: Stack, script: str, argument: str = "", **keys: Any) -> Iterator[str]:
    """Submit a job of one rank without a GPU; yield its id."""
    spec = {
        "version": 1,
        "name": "abuse",
        "entrypoint": f"python train.py {argument}".rstrip(),
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
        **keys,
    }
    with tempfile.TemporaryDirectory(prefix="orch-abuse-") as folder:
        yield stack.submit(json.dumps(spec), Path(folder), train=script)


def _succeeds(stack: Stack, script: str, argument: str = "", **keys: Any) -> str:
    with _submitted(stack, script, argument, **keys) as job_id:
        job = stack.wait(job_id)
        assert job.state == "SUCCEEDED", f"{job_id} is {job.state}: {job.reason}"
    return job_id


def deep_snapshots(stack: Stack, dice: random.Random) -> None:
    """A job leaves a deep tree among its snapshots; the daemon is killed, and starts again."""
    del dice
    _succeeds(stack, DEEP.format(levels=LEVELS))
    stack.kill_daemon()
    stack.up()


def deep_outputs(stack: Stack, dice: random.Random) -> None:
    """A job leaves a deep tree where its outputs are searched, and ends."""
    del dice
    _succeeds(stack, DEEP.format(levels=LEVELS), "out", outputs=["out/**"])


def abandoned_digests(stack: Stack, dice: random.Random) -> None:
    """Clients ask for the digest of a large file and leave; jobs with outputs end meanwhile."""
    del dice
    large = _succeeds(stack, LARGE.format(size=LARGE_BYTES), outputs=["out/**"])
    for _ in range(ABANDONED):
        with closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.connect(str(stack.settings.socket))
            path = f"/api/v1/jobs/{large}/files/digest?path=outputs/out/large"
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    _succeeds(stack, SMALL, outputs=["out/**"])


def overwritten_twice(stack: Stack, dice: random.Random) -> None:
    """A script that overwrites its only checkpoint dies after a save, and soon again in the middle of the next one."""
    retry = {"max_no_progress": 10, "backoff": {"initial": "100ms", "max": "200ms"}}
    gap = dice.choice([0.0, 0.1, 0.3])
    _succeeds(stack, OVERWRITES, str(gap), checkpoint={"watch": "out/state.zip"}, retry=retry)


def full_disk(stack: Stack, dice: random.Random) -> None:
    """The disk is full while jobs are submitted: each is accepted and runs, or is refused and leaves nothing."""
    del dice
    _succeeds(stack, SMALL)
    before = free_bytes(stack.home)
    ballast = fill(stack.home)
    try:
        accepted, refused = [], []
        for _ in range(3):
            with ExitStack() as later:
                try:
                    accepted.append(later.enter_context(_submitted(stack, SMALL)))
                except OrchError as error:
                    refused.append(str(error))
    finally:
        ballast.unlink()
    assert all("disk" in said for said in refused), f"refused on a full disk: {refused}"
    for job_id in accepted:
        assert stack.wait(job_id).state == "SUCCEEDED", f"{job_id} was accepted on a full disk"

    def accepts() -> bool:
        try:
            _succeeds(stack, SMALL)
        except OrchError:
            return False
        return True

    wait_until("jobs are accepted again", accepts)
    wait_until("the disk has its space again", lambda: free_bytes(stack.home) > before - SLACK_BYTES)
    known = {job.id for job in stack.client.jobs().jobs}
    left = {path.name for path in stack.settings.paths.jobs.iterdir() if path.is_dir()} - known
    assert not left, f"refused jobs have left directories: {left}"


def hung_connect(stack: Stack, dice: random.Random) -> None:
    """Ray's control store does not answer while a daemon connects: the daemon answers, and ends when it is told to."""
    del dice
    store = stack.head_pids()["gcs_server"]
    stack.kill_daemon()
    kill(store, signal.SIGSTOP)
    try:
        starting = stack.serve()
        try:
            wait_until("the daemon answers", lambda: _answers(stack))
            starting.send_signal(signal.SIGTERM)
            wait_until("the daemon has ended", lambda: starting.poll() is not None)
        finally:
            starting.kill()
            starting.wait()
    finally:
        if not process_gone(store):
            kill(store, signal.SIGCONT)
    stack.up()


def _answers(stack: Stack) -> bool:
    try:
        return bool(stack.client.health().pid)
    except OrchError:
        return False


ABUSES: Final[Mapping[str, Callable[[Stack, random.Random], None]]] = {
    "deep tree of snapshots and kill daemon": deep_snapshots,
    "deep tree of outputs": deep_outputs,
    "abandoned requests": abandoned_digests,
    "overwritten checkpoint, two deaths": overwritten_twice,
    "full disk": full_disk,
    "kill daemon, Ray does not answer": hung_connect,
}
"""By name, as reports have it."""
