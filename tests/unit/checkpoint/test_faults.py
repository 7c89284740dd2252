"""A full disk, a failing one, and a kill, at each operation of a save in turn: a good checkpoint is always left."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys

import pytest

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.checkpoint.faulty import FaultyStorage, PowerCutError


def state(step):
    return {"step": step, "weight": bytes([step % 256]) * 5000, "more": [step] * 100}


def check(loaded, *steps):
    assert loaded.step in steps
    assert loaded.state == state(loaded.step)


def operations_of_a_save(root):
    storage = FaultyStorage(root)
    store = CheckpointRepository(storage, attempt=1, keep=2)
    for step in (1, 2):
        store.save(state(step), step=step)
    before = storage.operations
    store.save(state(3), step=3)
    return range(before + 1, storage.operations + 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_an_error_at_any_operation_leaves_a_good_one_and_the_next_save_works(tmp_path, error):
    for fail_at in operations_of_a_save(tmp_path / "count"):
        root = tmp_path / str(fail_at)
        storage = FaultyStorage(root, fail_at=fail_at, error=error)
        store = CheckpointRepository(storage, attempt=1, keep=2)
        for step in (1, 2):
            store.save(state(step), step=step)
        raised = None
        try:
            store.save(state(3), step=3)
        except OSError as problem:  # a failure after the commit is not an error of the save
            raised = problem
        assert raised is None or raised.errno == error
        check(CheckpointRepository(root, attempt=1).load_latest(), 2, 3)
        store.save(state(4), step=4)
        check(CheckpointRepository(root, attempt=2).load_latest(), 4)
        assert all(info.status is CheckpointStatus.COMPLETE for info in store.list())


def test_a_kill_at_any_operation_leaves_a_good_one(tmp_path):
    for fail_at in operations_of_a_save(tmp_path / "count"):
        root = tmp_path / str(fail_at)
        store = CheckpointRepository(FaultyStorage(root, fail_at=fail_at), attempt=1, keep=2)
        for step in (1, 2):
            store.save(state(step), step=step)
        with pytest.raises(PowerCutError):
            store.save(state(3), step=3)
        after = CheckpointRepository(root, attempt=2, keep=2)
        check(after.load_latest(), 2, 3)
        assert after.quarantined == ()
        after.save(state(4), step=4)
        check(CheckpointRepository(root, attempt=3).load_latest(), 4)
        assert not [name for name in os.listdir(root) if name.startswith((".staging", ".removing"))]


WRITER = """
import sys
from orchestrator.checkpoint import CheckpointRepository
root, attempt = sys.argv[1], int(sys.argv[2])
store = CheckpointRepository(root, attempt=attempt, keep=2)
found = store.load_latest()
step = 0 if found is None else found.step
print(step, flush=True)
while True:
    step += 1
    store.save({"step": step, "weight": bytes([step % 256]) * 5000, "more": [step] * 100}, step=step)
    print(step, flush=True)
"""


def test_kill_9_of_a_real_writer_at_random_moments_always_leaves_the_last_acknowledged_one(tmp_path):
    chance = random.Random(7)
    acknowledged = 0
    for attempt in range(1, 13):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(attempt)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert int(writer.stdout.readline()) >= acknowledged
            for _ in range(chance.randrange(1, 20)):
                acknowledged = int(writer.stdout.readline())
            spin = chance.randrange(0, 20_000)  # somewhere within the next save
            while spin:
                spin -= 1
        finally:
            writer.send_signal(signal.SIGKILL)
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
            writer.wait()
            writer.stdout.close()
        reader = CheckpointRepository(tmp_path, attempt=attempt)
        loaded = reader.load_latest()
        assert reader.quarantined == ()
        check(loaded, acknowledged, acknowledged + 1)


LIMITED = """
import resource, signal, sys
from orchestrator.checkpoint import CheckpointRepository
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = CheckpointRepository(sys.argv[1], attempt=1)
store.save({"n": 1, "weight": b'x' * 2000}, step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    store.save({"n": 2, "weight": b'x' * 400_000}, step=2)
except OSError as error:
    print(error.errno, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(store.save({"n": 3, "weight": b'x' * 400_000}, step=3).step)
"""


def test_a_kernel_that_refuses_to_write_on_leaves_no_rubbish_behind(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == [str(errno.EFBIG), "3"], done.stderr
    visible = sorted(name for name in os.listdir(tmp_path) if name != ".lock")
    assert visible == ["fence.json", "step-000000000001-a1", "step-000000000003-a1"]


def test_two_attempts_at_once_leave_only_whole_checkpoints_and_the_older_one_ends(tmp_path):
    """Both write as fast as they can; the newer one starts second and must win."""
    script = WRITER.replace("while True:", "while step < 60:").replace("keep=2", "keep=None")
    old = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(5):
            assert old.stdout.readline()
        new = subprocess.run(
            [sys.executable, "-c", script.replace("step < 60", "step < 90"), str(tmp_path), "2"],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    finally:
        _, complaint = old.communicate(timeout=PATIENCE_SECONDS)
    reader = CheckpointRepository(tmp_path, attempt=3)
    infos = reader.list()
    assert {info.status for info in infos} == {CheckpointStatus.COMPLETE}
    check(reader.load_latest(), 90)
    resumed_from = int(new.stdout.split()[0])
    of_the_old = [info.step for info in infos if info.attempt == 1]
    if old.returncode:  # otherwise the old attempt ended before the new one began
        assert "StaleAttemptError: attempt 2 has taken over" in complaint
        assert max(of_the_old) <= max(resumed_from, 60)
    assert resumed_from in (0, *of_the_old)
