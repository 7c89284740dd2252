"""Snapshots in shared memory outlive the process that took them, and a torn one is never used."""

import errno
import os
import signal
import subprocess

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CorruptCheckpointError, ResumeMismatchError
from orchestrator.checkpoint.format.layout import Version, ticket_name
from orchestrator.checkpoint.snapshots.file import (
    MEMORY,
    SnapshotDirectory,
    SnapshotReader,
    SnapshotSlot,
    SnapshotUnavailableError,
    held,
    identity,
    version_of,
)
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter
from orchestrator.checkpoint.storage.storage import LocalStorage
from tests.support import warm


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def write(folder):
    """Yield a function that makes writers; they are closed at the end."""
    writers = []

    def write(**options):
        writer = SnapshotWriter(
            folder, **{"rank": 0, "world_size": 1, "attempt": 1, "job_id": "j", "token": "t", **options}
        )
        writers.append(writer)
        return writer

    yield write
    for writer in writers:
        writer.close()


def state(step):
    return {"step": step, "weight": torch.full((1000,), float(step)), "log": [step] * 70, "note": "x" * (step % 5)}


def check(loaded, step):
    assert loaded.step == loaded.state["step"] == step
    assert torch.equal(loaded.state["weight"], torch.full((1000,), float(step)))
    assert (loaded.state["log"], loaded.state["note"]) == ([step] * 70, "x" * (step % 5))


def files(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".snap"))


def test_the_newest_snapshot_is_loaded_as_it_was_saved(folder, write):
    writer = write()
    for step in range(1, 8):
        assert writer.save({"state": state(step)}, step=step, gang=False, metrics={"loss": 1 / step}) > 4000
        reader = SnapshotReader(folder, job_id="j")
        version = reader.newest()
        loaded = reader.load(version, 0, 1)
        check(loaded, step)
        assert (loaded.path, loaded.metrics, loaded.attempt, loaded.rank_state) == (MEMORY, {"loss": 1 / step}, 1, None)
    assert files(folder) == ["rank-00000.0.snap", "rank-00000.1.snap"]


def test_what_was_loaded_does_not_change_when_the_memory_is_used_again(folder, write):
    writer = write()
    writer.save({"state": state(1)}, step=1, gang=False)
    loaded = SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=1), 0, 1)
    for step in (2, 3, 4):
        writer.save({"state": state(step)}, step=step, gang=False)
    check(loaded, 1)
    loaded.state["weight"] += 1


def test_states_may_change_their_size_and_structure(folder, write):
    writer = write()
    states = [
        {"a": torch.zeros(10)},
        {"a": torch.zeros(5000)},
        {"a": torch.zeros(3), "b": b"y" * 9000},
        [],
        {"t": "z" * 9000},
    ]
    for step, value in enumerate(states * 2):
        writer.save({"state": value}, step=step, gang=False)
        loaded = SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=step), 0, 1)
        assert repr(loaded.state) == repr(value)


def test_a_step_that_is_there_is_not_taken_again(folder, write):
    writer = write()
    writer.save({"state": state(5)}, step=5, gang=False)
    assert writer.save({"state": state(6)}, step=5, gang=False) == 0
    check(SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=5), 0, 1), 5)


def test_an_unfinished_snapshot_does_not_count_and_the_one_before_does(folder, write):
    writer = write()
    for step in (1, 2):
        writer.save({"state": state(step)}, step=step, gang=False)
    newest = SnapshotDirectory(folder).snapshots(0)[0][1]
    newest.begin()
    reader = SnapshotReader(folder, job_id="j")
    assert reader.newest() == Version(attempt=1, step=1)
    check(reader.load(reader.newest(), 0, 1), 1)


@pytest.mark.parametrize("at", [64, 128, 132, 140, 200])
def test_a_damaged_description_does_not_count(folder, write, at):
    write().save({"state": state(1)}, step=1, gang=False)
    slot = SnapshotDirectory(folder).slots(0)[0]
    slot.memory[at] ^= 1
    assert SnapshotReader(folder, job_id="j").newest() is None


@pytest.mark.parametrize("content", [b"", b"short", bytes(40_000)])
def test_a_file_that_is_no_slot_is_passed_over_and_replaced(folder, write, content):
    folder.mkdir()
    (folder / "rank-00000.0.snap").write_bytes(content)
    assert SnapshotReader(folder, job_id="j").newest() is None
    writer = write()
    for step in (1, 2, 3):
        writer.save({"state": state(step)}, step=step, gang=False)
    check(SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=3), 0, 1), 3)


def test_one_that_is_overwritten_while_it_is_read_is_refused(folder, write, monkeypatch):
    writer = write()
    writer.save({"state": state(1)}, step=1, gang=False)
    reader = SnapshotReader(folder, job_id="j")

    read = SnapshotSlot.read

    def overtaken(slot, start, size):
        for step in (2, 3):
            writer.save({"state": state(step)}, step=step, gang=False)
        return read(slot, start, size)

    monkeypatch.setattr(SnapshotSlot, "read", overtaken)
    with pytest.raises(CorruptCheckpointError, match="overwritten while it was read"):
        reader.load(Version(attempt=1, step=1), 0, 1)


def test_a_missing_part_is_told(folder, write):
    write().save({"rank-00001": 1}, step=1, gang=False)
    with pytest.raises(CorruptCheckpointError, match="no part 'state'"):
        SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=1), 0, 1)


# The held snapshot


def test_the_held_snapshot_is_left_alone_until_it_is_released(folder, write):
    writer = write()
    hold = SnapshotDirectory(folder).hold()
    writer.save({"state": state(1)}, step=1, gang=False)
    hold.set(identity(Version(attempt=1, step=1)))
    for step in range(2, 9):
        writer.save({"state": state(step)}, step=step, gang=False)
        reader = SnapshotReader(folder, job_id="j")
        check(reader.load(Version(attempt=1, step=1), 0, 1), 1)
        check(reader.load(Version(attempt=1, step=step), 0, 1), step)
    assert len(files(folder)) == 3
    hold.set(0)
    for step in (10, 11):
        writer.save({"state": state(step)}, step=step, gang=False)
    versions = [meta.step for meta, _ in SnapshotDirectory(folder).snapshots(0)]
    assert 1 not in versions
    hold.close()


@pytest.mark.parametrize(
    ("steps", "word", "expected"),
    [
        ([3, 5, 7], (1, 4), 5),
        ([3, 5], (1, 3), 3),
        ([3, 5], (1, 6), None),
        ([3, 5], (2, 3), None),
        ([3, 5], (0, 3), None),
        ([], (1, 1), None),
    ],
)
def test_held_is_the_first_from_the_word_on_of_the_same_attempt(steps, word, expected):
    found = held(
        [identity(Version(attempt=1, step=step)) for step in steps], identity(Version(attempt=word[0], step=word[1]))
    )
    assert version_of(found) == (None if expected is None else Version(attempt=1, step=expected))
    assert held([0, identity(Version(attempt=1, step=1))], 0) == 0


# Failures of shared memory


def test_no_room_is_an_error_and_not_a_dead_process(folder, write, monkeypatch):
    import errno

    writer = write()
    writer.save({"state": state(1)}, step=1, gang=False)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SnapshotUnavailableError, match="no room for a snapshot"):
        writer.save({"state": {"big": torch.zeros(90_000)}}, step=2, gang=False)
    check(SnapshotReader(folder, job_id="j").load(Version(attempt=1, step=1), 0, 1), 1)
    assert not [name for name in os.listdir(folder) if name.endswith(".new")]


def test_memory_that_is_not_there_is_not_taken(folder, write, monkeypatch):
    from orchestrator.checkpoint.snapshots import file as snapshot_file

    writer = write()
    writer.save({"state": state(1)}, step=1, gang=False)
    assert writer.slots.memory_bytes == 3 * os.stat(folder / "rank-00000.0.snap").st_size
    monkeypatch.setattr(snapshot_file, "available_memory_bytes", lambda: 100_000)
    with pytest.raises(SnapshotUnavailableError, match=r"97\.7 KiB of memory are left"):
        writer.save({"state": {"big": torch.zeros(90_000)}}, step=2, gang=False)
    monkeypatch.setattr(snapshot_file, "available_memory_bytes", lambda: None)
    assert writer.save({"state": {"big": torch.zeros(90_000)}}, step=2, gang=False)


def test_memory_that_is_left_is_the_machines_or_the_control_groups(tmp_path):
    from orchestrator.checkpoint.snapshots.file import available_memory_bytes

    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "none") == 1_024_000
    with open("/proc/self/cgroup") as file:
        group = tmp_path / "groups" / file.read().strip().rpartition("::")[2].lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text("600000\n")
    (group / "memory.current").write_text("500000\n")
    (group / "memory.stat").write_text("anon 1\nactive_file 1000\ninactive_file 2000\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "groups") == 103_000
    (group / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "groups") == 1_024_000
    assert available_memory_bytes(tmp_path / "none", tmp_path / "groups") is None


WRITER = """
import sys
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter
writer = SnapshotWriter(sys.argv[1], rank=0, world_size=1, attempt=int(sys.argv[2]), job_id="j")
step = 0
while True:
    step += 1
    writer.save({"state": {"step": step, "fill": bytes([step % 256]) * 2_000_000}}, step=step, gang=False)
    print(step, flush=True)
"""


def spawn(folder, attempt):
    return warm.Warm(WRITER, str(folder), str(attempt), stdout=subprocess.PIPE)


def test_only_one_live_process_writes_and_a_dead_one_does_not_stand_in_the_way(folder):
    other = spawn(folder, 1)
    try:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(SnapshotUnavailableError, match="another live process"):
            SnapshotWriter(folder, rank=0, world_size=1, attempt=1)
    finally:
        other.kill()
        other.communicate()
    SnapshotWriter(folder, rank=0, world_size=1, attempt=2).close()


MOMENTS = [(method, when) for method in ("begin", "describe", "commit") for when in ("before", "after")]
DIES = """
import os, signal, sys
from orchestrator.checkpoint.snapshots.file import SnapshotSlot

method, when = sys.argv[3:]
real = getattr(SnapshotSlot, method)

def dying(slot, *args):
    if step == 4 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(slot, *args)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(SnapshotSlot, method, dying)
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_snapshot_of_the_last_step(folder):
    for attempt, (method, when) in enumerate(MOMENTS, start=1):
        writer = warm.run(DIES + WRITER, str(folder), str(attempt), method, when)
        assert (writer.returncode, writer.stdout.split()) == (-signal.SIGKILL, ["1", "2", "3"]), writer.stderr
        reader = SnapshotReader(folder, job_id="j")
        version = reader.newest()
        assert version == Version(attempt=attempt, step=4 if (method, when) == ("commit", "after") else 3)
        loaded = reader.load(version, 0, 1)
        assert loaded.state == {"step": version.step, "fill": bytes([version.step % 256]) * 2_000_000}


# Resuming from memory or storage


@pytest.fixture
def store(tmp_path, folder):
    def store(attempt, rank=0, world_size=1, **options):
        return CheckpointRepository(
            tmp_path / "checkpoints",
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            job_id="j",
            token=f"run{attempt}",
            snapshots=SnapshotReader(folder, job_id="j"),
            **options,
        )

    return store


@pytest.mark.parametrize(
    ("in_memory", "stored", "expected"),
    [
        ((1, 5), (1, 4), MEMORY),
        ((1, 5), (1, 5), MEMORY),
        ((1, 5), (1, 6), "disk"),
        ((1, 9), (2, 3), "disk"),
        ((2, 1), (1, 9), MEMORY),
    ],
)
def test_the_newer_of_memory_and_storage_is_resumed_from(store, write, in_memory, stored, expected):
    write(attempt=in_memory[0]).save({"state": "in memory"}, step=in_memory[1], gang=False)
    store(stored[0]).save("stored", step=stored[1])
    loaded = store(3).load_latest()
    assert (loaded.path == MEMORY) == (expected == MEMORY)
    assert loaded.state == ("in memory" if expected == MEMORY else "stored")


def test_a_broken_one_on_storage_leads_to_the_snapshot(store, write):
    write().save({"state": "in memory"}, step=5, gang=False)
    info = store(1).save("stored", step=6)
    os.unlink(os.path.join(info.path, "state.json"))
    assert store(2).load_latest().state == "in memory"


def test_a_snapshot_lost_on_the_way_leads_to_storage(store, write, monkeypatch):
    write().save({"state": "in memory"}, step=5, gang=False)
    store(1).save("stored", step=4)
    loading = store(2)

    def lost(*_):
        raise CorruptCheckpointError("overwritten")

    monkeypatch.setattr(SnapshotReader, "load", lost)
    assert loading.load_latest().state == "stored"
    assert loading.quarantined == ("snapshot of step 5: overwritten",)


def test_all_ranks_get_rank_0s_snapshot_of_what_they_share(store, write):
    write(world_size=2).save({"state": state(5)}, step=5, gang=False)
    for rank in (1, 0):
        loaded = store(2, rank=rank, world_size=2).load_latest()
        check(loaded, 5)
        assert loaded.rank_state is None


def gang(write, step, ranks=(0, 1), attempt=1):
    for rank in ranks:
        parts = {"state": state(step)} if rank == 0 else {}
        parts[f"rank-{rank:05d}"] = {"rank": rank, "step": step}
        write(rank=rank, world_size=2, attempt=attempt).save(parts, step=step, gang=True)


def test_parts_of_ranks_count_only_where_every_rank_has_the_same_step(store, write):
    store(1).save("stored", step=4)
    gang(write, 5, ranks=(0,))
    assert store(2).load_latest().state == "stored"
    gang(write, 5, ranks=(1,))
    gang(write, 6, ranks=(0,))
    for rank in (0, 1):
        loaded = store(3, rank=rank, world_size=2).load_latest()
        check(loaded, 5)
        assert loaded.rank_state == {"rank": rank, "step": 5}
        assert [loaded.rank_states(other) for other in (0, 1, 2)] == [
            {"rank": 0, "step": 5},
            {"rank": 1, "step": 5},
            None,
        ]


def test_another_number_of_ranks_gets_the_shared_state_from_memory(store, write):
    gang(write, 5)
    loaded = store(2, rank=2, world_size=3).load_latest()
    check(loaded, 5)
    assert (loaded.rank_state, loaded.rank_states(1)) == (None, {"rank": 1, "step": 5})


def test_ranks_agree_on_memory_even_when_storage_catches_up_in_between(store, write):
    write(world_size=2).save({"state": "in memory"}, step=5, gang=False)
    first, second = store(2, rank=0, world_size=2), store(2, rank=1, world_size=2)
    assert first.load_latest().path == MEMORY
    CheckpointRepository(first.storage, attempt=2, token="run2").save("newer", step=7)
    assert second.load_latest().state == "in memory"


def test_a_rank_that_comes_too_late_for_the_memory_stops(store, write):
    writer = write(world_size=2)
    writer.save({"state": 5}, step=5, gang=False)
    assert store(2, rank=0, world_size=2).load_latest().state == 5
    for step in (6, 7, 8):
        writer.save({"state": step}, step=step, gang=False)
    with pytest.raises(ResumeMismatchError, match="rank 1 cannot load memory:step-000000000005-a1"):
        store(2, rank=1, world_size=2).load_latest()


def test_a_rank_without_the_memory_of_the_others_stops(store, write, tmp_path):
    write(world_size=2).save({"state": 5}, step=5, gang=False)
    store(2, rank=0, world_size=2).load_latest()
    elsewhere = CheckpointRepository(tmp_path / "checkpoints", attempt=2, rank=1, world_size=2, token="run2")
    with pytest.raises(ResumeMismatchError, match="no access to the snapshots"):
        elsewhere.load_latest()


def test_on_a_full_disk_ranks_agree_in_memory_and_never_on_two_checkpoints(store, write, tmp_path, folder, monkeypatch):
    write(world_size=2).save({"state": 5}, step=5, gang=False)
    create = LocalStorage.create

    def full(storage, path, content):
        if storage.root == tmp_path / "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(storage, path, content)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", full)
        assert store(2, rank=0, world_size=2).load_latest().step == 5
    assert store(2, rank=1, world_size=2).load_latest().step == 5, (
        "the disk has space again, and the note in memory holds"
    )
    note = ticket_name(2, "run2", 0)
    (tmp_path / "checkpoints" / note).write_text('{"checkpoint": ""}')
    with pytest.raises(ResumeMismatchError, match="have chosen different checkpoints"):
        store(2, rank=1, world_size=2).load_latest()
