"""The persister in the rank actor: it stores whole snapshots in the background, whatever happens to either process."""

import errno
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.repository.persister import Pace, SnapshotPersister, StoreSettings
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, identity
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter, TopScores
from orchestrator.checkpoint.storage.storage import LocalStorage
from tests.support import warm
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.checkpoint.faulty import FaultyStorage

PACE = Pace()


class HookedStorage(LocalStorage):
    """Storage that calls ``before(path)`` before each write."""

    def __init__(self, root, before):
        super().__init__(root)
        self._before = before

    def write(self, path, chunks, *, durable=True):
        self._before(path)
        return super().write(path, chunks, durable=durable)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def write(folder):
    """Yield a function that takes a snapshot of one rank."""
    writers = {}

    def write(step, *, rank=0, world_size=1, attempt=1, gang=False, metrics=None):
        key = (rank, world_size, attempt)
        if key not in writers:
            writers[key] = SnapshotWriter(
                folder, rank=rank, world_size=world_size, attempt=attempt, job_id="j", token=f"run{attempt}"
            )
        parts = {"state": state(step)} if rank == 0 else {}
        if gang:
            parts[f"rank-{rank:05d}"] = {"rank": rank, "step": step}
        writers[key].save(parts, step=step, gang=gang, metrics=metrics or {})

    yield write
    for writer in writers.values():
        writer.close()


@pytest.fixture
def persist(folder, root):
    """Yield a function that makes persisters, which never wait between writes."""
    made = []

    def persist(rank=0, *, storage=None, **options):
        kept = {name: options.pop(name) for name in ("keep_best", "score_attribute", "score_order") if name in options}
        settings = StoreSettings(root=storage or str(root), keep=options.pop("keep", None), **kept)
        options["pace"] = Pace(**{"busy_share": 1e9, "retry_seconds": 0.0, **options.pop("pace", {})})
        one = SnapshotPersister(folder, rank=rank, settings=settings, **{"interval_seconds": 0.0, **options})
        made.append(one)
        return one

    yield persist
    for one in made:
        one.close()


def state(step):
    return {"step": step, "weight": torch.full((500,), float(step))}


def stored(root):
    return [
        info.step for info in CheckpointRepository(root, attempt=99).list() if info.status is CheckpointStatus.COMPLETE
    ]


def until(condition, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.005)


def test_a_snapshot_reaches_storage_as_if_it_had_been_saved_there(write, persist, root, tmp_path):
    told = []
    one = persist(on_persisted=told.append)
    assert not one.poll()
    write(7, metrics={"loss": 0.5})
    assert one.poll()
    assert not one.poll()
    loaded = CheckpointRepository(root, attempt=2).load_latest()
    assert (loaded.step, loaded.state["step"], loaded.metrics) == (7, 7, {"loss": 0.5})
    assert torch.equal(loaded.state["weight"], state(7)["weight"])
    direct = CheckpointRepository(tmp_path / "direct", attempt=1, job_id="j").save(state(7), step=7)
    for name in ("state.json", "state.safetensors"):
        with open(os.path.join(direct.path, name), "rb") as left, open(os.path.join(loaded.path, name), "rb") as right:
            assert left.read() == right.read()
    assert [info.step for info in told] == [7]
    assert (one.status.step, one.status.attempt, one.status.path, one.status.persisted) == (7, 1, loaded.path, 1)
    assert one.status.bytes > 2000
    assert one.status.seconds > 0


def test_when_behind_the_newest_is_next(write, persist, root):
    one = persist()
    for step in range(1, 6):
        write(step)
    one.poll()
    for step in range(6, 9):
        write(step)
    one.poll()
    one.poll()
    assert stored(root) == [8, 5]


def test_writes_keep_their_distance(write, persist, root):
    one = persist(interval_seconds=3600.0)
    write(1)
    assert one.poll()
    write(2)
    assert not one.poll()
    assert one.flush(300)
    assert stored(root) == [2, 1]


def test_a_slow_storage_stretches_the_distance(write, persist, root):
    one = persist(pace={"busy_share": 1e-9})
    write(1)
    assert one.poll()
    write(2)
    assert not one.poll()


def test_a_snapshot_that_is_overtaken_while_it_is_written_is_not_used(write, persist, root):
    class Overtaking(LocalStorage):
        def write(self, path, chunks, *, durable=True):
            record = super().write(path, chunks, durable=durable)
            if path.endswith("a1-run1/state.safetensors"):
                SnapshotDirectory(folder_of(write)).hold().set(0)
                for step in (2, 3, 4):
                    write(step)
            return record

    def folder_of(_write):
        return root.parent / "snapshots"

    write(1)
    one = persist(storage=Overtaking(root))
    assert not one.poll()
    assert stored(root) == []
    assert not [name for name in os.listdir(root) if name.startswith(".staging")]
    assert (one.status.failures, one.status.persisted) == (0, 0)


def test_the_snapshot_being_written_is_not_taken_for_a_newer_one(write, persist, root):
    """While storage is slow, the training loop keeps saving as fast as it can; every stored checkpoint is whole."""

    class Slow(LocalStorage):
        def write(self, path, chunks, *, durable=True):
            chunks = list(chunks)
            for step in range(50):
                write(self.step + step)
            self.step += 50
            return super().write(path, chunks, durable=durable)

    storage = Slow(root)
    storage.step = 2
    write(1)
    one = persist(storage=storage)
    for _ in range(6):
        one.poll()
    found = stored(root)
    assert len(found) >= 2
    for info in CheckpointRepository(root, attempt=2).list():
        loaded = CheckpointRepository(root, attempt=2).load_path(info.path)
        assert torch.equal(loaded.state["weight"], state(info.step)["weight"])
        assert loaded.state["step"] == info.step


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_storage_is_told_and_tried_again(write, persist, root, error):
    storage = FaultyStorage(root, fail_at=2, error=error)
    one = persist(storage=storage)
    write(1)
    assert not one.poll()
    assert one.status.failures == 1
    assert "snapshot of step 1 not stored" in one.status.failure
    assert (one.status.failures_in_a_row, one.status.failing_since is None) == (1, False)
    assert one.poll()
    assert (one.status.failure, stored(root)) == ("", [1])
    assert (one.status.failures, one.status.failures_in_a_row, one.status.failing_since) == (1, 0, None)
    assert one.gauge.free_bytes


def test_snapshots_of_a_superseded_attempt_are_dropped(write, persist, root):
    write(5)
    CheckpointRepository(root, attempt=2).load_latest()
    one = persist()
    assert not one.poll()
    assert (one.status.failures, stored(root)) == (0, [])
    write(6, attempt=2)
    until(one.poll)
    assert stored(root) == [6]


# Ranks with parts of their own


def test_a_gangs_checkpoint_is_of_one_step_on_all_ranks(write, persist, root):
    ranks = [persist(rank) for rank in (0, 1)]
    for step in range(1, 30):
        for rank in (0, 1):
            write(step, rank=rank, world_size=2, gang=True)
            ranks[(step + rank) % 2].poll()
    steps = stored(root)
    assert len(steps) > 2
    for info in CheckpointRepository(root, attempt=9).list():
        if info.status is CheckpointStatus.COMPLETE:
            loaded = CheckpointRepository(root, attempt=9, world_size=2).load_path(info.path)
            assert loaded.state["step"] == info.step
            assert [loaded.rank_states(rank) for rank in (0, 1)] == [
                {"rank": rank, "step": info.step} for rank in (0, 1)
            ]


def test_a_gangs_last_checkpoint_is_stored_although_no_further_one_comes(write, persist, root):
    ranks = [persist(rank) for rank in (0, 1)]
    for rank in (0, 1):
        write(10, rank=rank, world_size=2, gang=True)
    for one in ranks:
        one.poll()
    assert stored(root) == [10]


def test_ranks_that_hold_different_steps_begin_anew(write, persist, root):
    zero, one = persist(0), persist(1)
    for rank in (0, 1):
        write(10, rank=rank, world_size=2, gang=True)
    zero.poll()  # step 10 is held now; rank 1 loses it from memory, as if it had not seen the hold in time
    hold = SnapshotDirectory(zero._directory.path).hold()
    hold.set(0)
    for step in (11, 12, 13):
        write(step, rank=1, world_size=2, gang=True)
    hold.set(identity(Version(attempt=1, step=10)))
    one.poll()
    for step in (11, 12, 13):
        write(step, rank=0, world_size=2, gang=True)
    until(lambda: [zero.poll(), one.poll()] and 13 in stored(root))
    assert stored(root) == [13]
    hold.close()


def test_a_rank_that_never_delivers_is_given_up_for_a_newer_step(write, persist, folder):
    hold = SnapshotDirectory(folder).hold()
    now = 1000.0
    zero = persist(0, clock=lambda: now)
    for step in (10, 20):
        for rank in (0, 1):
            write(step, rank=rank, world_size=2, gang=True)
        zero.poll()
        assert hold.get() == identity(Version(attempt=1, step=10))
    now += PACE.patience_seconds
    zero.poll()
    assert hold.get() == identity(Version(attempt=1, step=20))
    hold.close()


def test_flush_stores_the_newest_common_step_of_all_ranks(write, persist, root):
    ranks = [persist(rank, interval_seconds=3600.0) for rank in (0, 1)]
    for rank in (0, 1):
        write(10, rank=rank, world_size=2, gang=True)
    write(11, rank=0, world_size=2, gang=True)  # rank 1 died before its save
    results = []
    threads = [threading.Thread(target=lambda one=one: results.append(one.flush(300))) for one in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]
    assert stored(root) == [10]


def test_flush_gives_up_in_time_and_has_nothing_to_do_without_snapshots(write, persist, root):
    one = persist(1)
    assert one.flush(0.0)
    for rank in (0, 1):
        write(10, rank=rank, world_size=2, gang=True)
    assert not one.flush(0.01)  # rank 0's persister does not run
    (root.parent / "blocked").write_text("")
    nowhere = persist(0, storage=LocalStorage(root.parent / "blocked" / "x"))
    assert not nowhere.flush(0.01)
    assert nowhere.status.failures > 0


# Real processes and the background thread

TRAINER = """
import sys
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter
folder, rank, attempt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer = SnapshotWriter(folder, rank=rank, world_size=2, attempt=attempt, job_id="j", token=f"run{attempt}")
for step in range(1, 10**9):
    own = {"rank": rank, "step": step, "fill": bytes([step % 256]) * 200_000}
    parts = {"state": {"step": step, "fill": bytes([step % 256]) * 300_000}} if rank == 0 else {}
    writer.save({**parts, f"rank-{rank:05d}": own}, step=step, gang=True)
    print(step, flush=True)
    sys.stdin.readline()  # the collective that keeps the ranks in step
"""


def test_real_ranks_persist_in_the_background_and_a_kill_costs_nothing_that_was_whole(folder, root, persist):
    """Two processes train in lockstep as fast as they can, each with a persister; then one rank is killed."""
    ranks = [
        warm.Warm(TRAINER, str(folder), str(rank), "1", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    background = [persist(rank, interval_seconds=0.05) for rank in (0, 1)]
    step = 0

    def one_step():
        assert {int(rank.stdout.readline()) for rank in ranks} == {step}
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()

    try:
        for one in background:
            one.start()
        deadline = time.monotonic() + 300
        while (not root.exists() or len(stored(root)) < 4) and time.monotonic() < deadline:
            step += 1
            one_step()
    finally:
        ranks[1].send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for one in background:
        one.close()
    flushing = [threading.Thread(target=one.flush, args=(20.0,)) for one in background]
    for thread in flushing:
        thread.start()
    for thread in flushing:
        thread.join()
    reader = CheckpointRepository(root, attempt=2, world_size=2)
    loaded = reader.load_latest()
    assert loaded.step in (step, step + 1)
    for info in reader.list():
        if info.status is CheckpointStatus.COMPLETE:
            whole = reader.load_path(info.path)
            assert whole.state == {"step": info.step, "fill": bytes([info.step % 256]) * 300_000}
            parts = [whole.rank_states(rank) for rank in (0, 1)]
            assert [(part["rank"], part["step"]) for part in parts] == [(0, info.step), (1, info.step)]
    assert len(stored(root)) >= 4


def wanted_writer(folder, **options):
    return SnapshotWriter(
        folder, **{"rank": 0, "world_size": 1, "attempt": 1, "job_id": "j", "token": "run1", **options}
    )


def test_every_wanted_snapshot_is_stored_in_order_while_the_others_may_be_passed_over(persist, folder, root):
    told = []
    one = persist(interval_seconds=3600.0, on_persisted=lambda info: told.append(info.step))
    one.start()
    writer = wanted_writer(folder)
    for step in range(1, 21):
        writer.save({"state": state(step)}, step=step, gang=False, wanted=True)
    assert one.flush(300)
    assert told == list(range(1, 21))
    assert writer.slots.left_out == []
    for step in range(21, 41):
        writer.save({"state": state(step)}, step=step, gang=False)
    assert one.flush(300)
    writer.close()
    assert told[:20] == list(range(1, 21))
    assert told[-1] == 40
    assert len(told) < 40


def test_a_save_waits_for_storage_and_says_so_when_every_slot_holds_a_wanted_snapshot(persist, folder, root):
    gate, told = threading.Event(), []
    storage = HookedStorage(root, lambda path: gate.wait(300) if path.endswith("state.json") else None)
    one = persist(storage=storage, on_persisted=lambda info: told.append(info.step))
    one.start()
    writer, waits = wanted_writer(folder), []

    def save_all():
        for step in range(1, 7):
            writer.save(
                {"state": state(step)}, step=step, gang=False, wanted=True, on_wait=lambda step=step: waits.append(step)
            )

    training = threading.Thread(target=save_all)
    training.start()
    until(lambda: waits == [4])
    gate.set()
    training.join(300)
    assert not training.is_alive()
    assert one.flush(300)
    writer.close()
    assert told == [1, 2, 3, 4, 5, 6]
    assert writer.slots.waited_seconds >= 0.0


def test_training_goes_on_while_storage_fails_and_tells_what_was_left_out(persist, folder, root):
    broken = threading.Event()
    broken.set()

    def fail(path):
        if broken.is_set():
            raise OSError(errno.ENOSPC, "no space left on device")

    one = persist(storage=HookedStorage(root, fail))
    one.start()
    writer = wanted_writer(folder)
    for step in range(1, 4):
        writer.save({"state": state(step)}, step=step, gang=False, wanted=True)
    until(lambda: "no space left" in one.status.failure)
    for step in range(4, 8):
        writer.save({"state": state(step)}, step=step, gang=False, wanted=True)
    assert writer.slots.left_out == [1, 2, 3, 4]
    assert not one.flush(0.2)
    assert "step 5, 6, 7 was not on storage after 0.2 s" in one.status.failure
    broken.clear()
    assert one.flush(300)
    writer.close()
    assert stored(root) == [7, 6, 5]


def test_the_best_scores_reach_storage_though_newer_saves_follow_at_once(persist, folder, root):
    one = persist(interval_seconds=3600.0, keep=1, keep_best=2, score_attribute="loss", score_order="min")
    one.start()
    losses = {1: 0.9, 2: 0.8, 3: 0.2, 4: 0.7, 5: 0.3, 6: 0.6, 7: 0.9, 8: 0.5, 9: 0.8, 10: float("nan")}
    writer = wanted_writer(folder, best=TopScores("loss", order="min", keep=2))
    for step, loss in losses.items():
        writer.save({"state": state(step)}, step=step, gang=False, metrics={"loss": loss})
    assert one.flush(300)
    writer.close()
    assert stored(root) == [10, 5, 3]


def test_every_rank_of_a_gang_stores_what_rank_0_calls_the_best(persist, folder, root):
    made = [persist(rank=rank, interval_seconds=3600.0) for rank in (0, 1)]
    for one in made:
        one.start()
    writers = [
        wanted_writer(folder, rank=rank, world_size=2, best=TopScores("loss", order="min", keep=1)) for rank in (0, 1)
    ]
    for step, loss in enumerate((0.9, 0.1, 0.5, 0.6, 0.7, 0.8), start=1):
        for rank, writer in enumerate(writers):
            parts = {"state": state(step)} if rank == 0 else {}
            parts[f"rank-{rank:05d}"] = {"rank": rank}
            # Each rank has a loss of its own; rank 0's counts.
            writer.save(parts, step=step, gang=True, metrics={"loss": loss if rank == 0 else 1 - loss})
    flushing = [threading.Thread(target=one.flush, args=(20.0,)) for one in made]
    for thread in flushing:
        thread.start()
    for thread in flushing:
        thread.join()
    for writer in writers:
        writer.close()
    assert 2 in stored(root)
    assert stored(root)[0] == 6


def test_what_a_dead_attempt_left_in_memory_is_stored_by_the_actor_that_runs_the_next(persist, folder, root):
    writer = wanted_writer(folder)
    writer.save({"state": state(13)}, step=13, gang=False, wanted=True)
    writer.close()
    new = CheckpointRepository(root, attempt=2, token="run2")
    assert new.load_latest() is None
    stranger = persist()
    stranger.hold_lease(1)
    assert not stranger.poll()
    assert stored(root) == [], "its ranks belong to an attempt that another gang has replaced"
    writer = wanted_writer(folder, attempt=1)
    writer.save({"state": state(14)}, step=14, gang=False, wanted=True)
    writer.close()
    heir = persist()
    heir.hold_lease(2)
    assert heir.poll()
    new.save(state(20), step=20)
    assert [(info.attempt, info.step) for info in new.list() if info.is_complete] == [(2, 20), (1, 14)]


def test_a_damaged_snapshot_neither_ends_the_persister_nor_holds_training_up(persist, folder, root):
    one = persist()
    one.start()
    writer = wanted_writer(folder)
    gone_bad = writer
    gone_bad.save({"state": state(1)}, step=1, gang=False)
    slot = SnapshotDirectory(folder).slots(0)[0]
    slot.memory[136:140] = b"\xff\xff\xff\xff"
    slot.want(slot.identity())
    until(lambda: "damaged" in one.status.failure)
    for step in range(2, 8):
        writer.save({"state": state(step)}, step=step, gang=False, wanted=True)
    assert one.flush(300)
    writer.close()
    assert stored(root)[0] == 7
