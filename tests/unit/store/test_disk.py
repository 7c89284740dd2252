"""A full disk, made of a real small file system: running jobs go on, new ones are refused, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.disk import Disk
from orchestrator.store.errors import DiskFullError
from orchestrator.store.store import Store
from tests.support import disks, warm
from tests.unit.core.builders import ID, T0, chain, submission
from tests.unit.store.lives import add, cancel, note, notes_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.core.job.record import Job

    Run = Callable[..., Any]

MIB = 1024 * 1024
OPTIONS: dict[str, Any] = {"reserve_bytes": MIB, "min_free_bytes": MIB}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 12 MiB; yield its directory."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file system of our own is not permitted: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.fixture
def small_store(small_disk: Path) -> Iterator[Store]:
    """Open a store on the small disk, with a reserve of 1 MiB."""
    store = Store.open(small_disk / "orch.db", reserve=small_disk / "reserve", **OPTIONS)
    yield store
    store.close()


def fill(directory: Path) -> Path:
    """Fill the disk to the last byte; return the filler."""
    filler = directory / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


def notes(store: Store, run: Run, job: Job, count: int) -> None:
    """Write ``count`` transitions, one commit each."""
    for n in range(count):
        run(write(store, [note(job, f"{n} {'x' * 500}")]))


def test_new_jobs_are_refused_before_the_disk_is_full(small_store: Store, small_disk: Path, run: Run) -> None:
    run(add(small_store, ID))
    (small_disk / "data").write_bytes(bytes(small_store.disk().free_bytes - MIB // 2))
    status = small_store.disk()
    assert 0 < status.free_bytes < MIB
    assert (status.reserve_present, status.trouble is None) == (True, False)
    with pytest.raises(DiskFullError, match=r"no new job is accepted: free space .*orch prune"):
        run(add(small_store, "b-2"))
    assert [j.id for j in run(small_store.load_live())] == [ID]
    (small_disk / "data").unlink()
    run(add(small_store, "b-2"))


def test_a_lost_reply_is_repeated_even_when_nothing_new_is_accepted(
    small_store: Store, small_disk: Path, run: Run
) -> None:
    job, _ = run(small_store.submit(submission()))
    fill(small_disk)
    assert run(small_store.submit(submission())) == (job, False)


def test_running_jobs_go_on_when_the_disk_is_full(small_store: Store, small_disk: Path, run: Run) -> None:
    job = run(add(small_store, ID))
    filler = fill(small_disk)
    assert small_store.disk().free_bytes == 0
    notes(small_store, run, job, 200)
    assert not (small_disk / "reserve").exists(), "the reserve was given up for them"
    assert run(small_store.job(ID)).version == 201
    with pytest.raises(DiskFullError):
        run(add(small_store, "b-2"))
    assert run(small_store.verify()) == []
    filler.unlink()
    assert small_store.disk().reserve_present, "it is made again when there is room"
    assert (small_disk / "reserve").stat().st_blocks * 512 >= MIB
    run(add(small_store, "b-2"))


_GREEDY = """
import contextlib, sys, time
with open(sys.argv[1], "ab", buffering=0) as log:
    print("writing", flush=True)
    while True:
        time.sleep(0.001)
        with contextlib.suppress(OSError):
            log.write(bytes(4096))
"""


def test_a_job_that_keeps_writing_does_not_take_the_reserve(small_store: Store, small_disk: Path, run: Run) -> None:
    job = run(add(small_store, ID))
    fill(small_disk)
    # A separate process, as a job is: a thread would get a turn at every one of the store's system calls.
    greedy = subprocess.Popen([sys.executable, "-c", _GREEDY, str(small_disk / "filler")], stdout=subprocess.PIPE)
    try:
        assert greedy.stdout is not None
        assert greedy.stdout.readline() == b"writing\n"
        notes(small_store, run, job, 200)
    finally:
        greedy.kill()
        greedy.communicate()
    assert not (small_disk / "reserve").exists()
    assert run(small_store.job(ID)).version == 201


def test_when_the_reserve_is_spent_the_refusal_says_so_and_keeps_what_was_told(
    small_store: Store, small_disk: Path, run: Run
) -> None:
    job = run(add(small_store, ID))
    filler = fill(small_disk)
    with pytest.raises(DiskFullError, match=r"not even the record of a running job.*orch prune"):
        notes(small_store, run, job, 20_000)
    told = run(small_store.job(ID)).version - 1
    assert 300 < told < 20_000
    assert notes_of(run(small_store.job(ID)))[-1].startswith(f"{told - 1} ")
    assert run(small_store.verify()) == []
    filler.unlink()
    run(write(small_store, [note(job, "after")]))
    assert run(small_store.job(ID)).version == 2 + told


def test_in_one_group_new_jobs_wait_and_running_ones_go_on(small_store: Store, small_disk: Path, run: Run) -> None:
    # The check of free space passes and the disk fills before the commit: the error of the full disk must be handled.
    import asyncio

    job = run(add(small_store, ID))
    small_store._admit = lambda: None  # type: ignore[method-assign]
    fill(small_disk)

    async def together() -> list[Any]:
        big = {"work_dir": "/" + "x" * 100_000}
        new = [small_store.submit(submission(job_id=f"job-{n}", **big)) for n in range(4)]
        old = [small_store.append([change]) for change in chain(job, *(note(job, f"{n}") for n in range(4)))]
        return await asyncio.gather(*new, *old, return_exceptions=True)

    found = run(together())
    assert [type(f) for f in found[:4]] == [DiskFullError] * 4
    assert found[4:] == [None] * 4
    assert run(small_store.job(ID)).version == 5
    assert [j.id for j in run(small_store.load_live())] == [ID]


def test_a_store_opens_on_a_full_disk_with_its_reserve(small_disk: Path, run: Run) -> None:
    def opened() -> Store:
        return Store.open(small_disk / "orch.db", reserve=small_disk / "reserve", **OPTIONS)

    store = opened()
    job = run(add(store, ID))
    store.close()
    filler = fill(small_disk)
    store = opened()
    try:
        assert run(store.load_live()) == [job]
        notes(store, run, job, 5)
    finally:
        store.close()
    filler.unlink()
    store = opened()
    assert run(store.job(ID)).version == 6
    assert store.disk().reserve_present
    store.close()


_GENERATION = """
import asyncio, os, pathlib, sys
from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.store.store import Store
from tests.support.disks import fill
from tests.unit.store.lives import write

disk, end, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

async def main() -> None:
    store = Store.open(disk / "orch.db", reserve=disk / "reserve", reserve_bytes=2**20, min_free_bytes=2**20)
    fill(disk)
    (job,) = await store.load_live()
    for n in range(10):
        message = f"{number}.{n} " + 400 * "x"
        await write(store, [ev.JobNoted(job_id=job.id, at=1.0, note=fact_from(message))])
        if n % 3 == 0:
            fill(disk)
    if end == "kill":
        os._exit(9)
    store.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(("end", "kind"), [("close", "tmpfs"), ("kill", "ext4")])
def test_one_daemon_after_another_goes_on_writing_on_a_full_disk(tmp_path: Path, run: Run, end: str, kind: str) -> None:
    with disks.small_disk(tmp_path, 16, kind=kind) as disk:
        store = Store.open(disk / "orch.db", reserve=disk / "reserve", **OPTIONS)
        run(add(store, ID))
        store.close()
        for number in range(3):
            disks.fill(disk)  # takes everything that the process before has released
            done = warm.run(_GENERATION, str(disk), end, str(number), modules=warm.STORE)
            assert done.returncode == (9 if end == "kill" else 0), (number, done.stderr)
        (disk / "ballast").unlink()
        store = Store.open(disk / "orch.db", reserve=disk / "reserve", **OPTIONS)
        assert run(store.job(ID)).version == 1 + 3 * 10
        assert run(store.verify()) == []
        assert store.disk().trouble is None
        assert (disk / "reserve").stat().st_nlink == 1
        store.close()


def test_what_is_held_on_a_disk_that_is_nearly_full_has_a_bound(small_store: Store, small_disk: Path, run: Run) -> None:
    job = run(add(small_store, ID))
    filler = fill(small_disk)
    notes(small_store, run, job, 3)
    os.truncate(filler, filler.stat().st_size - 3 * MIB // 2)  # too little for the reserve and ``min_free_bytes``
    notes(small_store, run, job, 40)
    assert small_store.disk().free_bytes > 0, "each commit took as much again"


def test_without_reserve_or_room_it_does_not_open(small_disk: Path) -> None:
    fill(small_disk)
    before = sorted(p.name for p in small_disk.iterdir())
    with pytest.raises(DiskFullError, match="the store cannot be opened"):
        Store.open(small_disk / "orch.db", reserve=small_disk / "reserve", **OPTIONS)
    assert sorted(p.name for p in small_disk.iterdir() if p.suffix == ".db") == []
    assert set(before) <= {p.name for p in small_disk.iterdir()}


def test_pruning_makes_room_on_a_full_disk(small_store: Store, small_disk: Path, run: Run) -> None:
    for n in range(60):
        job = run(add(small_store, f"job-{n}", work_dir="/" + "x" * 10_000))
        run(cancel(small_store, job))
    fill(small_disk)
    assert len(run(small_store.prune(T0 + 1000))) == 60
    status = small_store.disk()
    assert status.free_bytes > MIB
    assert status.reserve_present
    assert status.trouble is None


def test_a_backup_that_does_not_fit_leaves_nothing_behind(small_store: Store, small_disk: Path, run: Run) -> None:
    run(add(small_store, ID))
    fill(small_disk)
    with pytest.raises(DiskFullError, match="so there is no backup"):
        run(small_store.backup(small_disk / "copy.db"))
    assert not list(small_disk.glob("copy.db*"))


def test_the_reserve_is_made_of_blocks_not_of_promises(tmp_path: Path) -> None:
    Disk(tmp_path / "orch.db", reserve=tmp_path / "reserve", reserve_bytes=MIB, min_free_bytes=0)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= MIB
    assert not (tmp_path / "reserve.new").exists()


def test_without_a_reserve_only_the_threshold_counts(tmp_path: Path) -> None:
    generous = Disk(tmp_path / "orch.db", reserve=None, reserve_bytes=MIB, min_free_bytes=0)
    strict = Disk(tmp_path / "orch.db", reserve=None, reserve_bytes=MIB, min_free_bytes=2**62)
    assert generous.status().trouble is None
    assert strict.status().trouble is not None
    assert not generous.give_up_piece()


_LIMITED = """
import asyncio, pathlib, resource, sys
from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.store.errors import DiskFullError
from orchestrator.store.store import Store
from tests.unit.store.lives import write

path = pathlib.Path(sys.argv[1])

async def main() -> None:
    store = Store.open(path, reserve=path.with_name("reserve"), reserve_bytes=65536, min_free_bytes=0)
    (job,) = await store.load_live()
    log = path.with_name(path.name + "-wal")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    told = 0
    try:
        for n in range(1000):
            await write(store, [ev.JobNoted(job_id=job.id, at=1.0, note=fact_from(f"{n}" + 2000 * "x"))])
            told += 1
    except DiskFullError as error:
        assert "orch prune" in str(error), error
    else:
        raise SystemExit("the limit was never met")
    assert (await store.job(job.id)).version == 1 + told
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await write(store, [ev.JobNoted(job_id=job.id, at=1.0, note=fact_from("after"))])
    assert await store.verify() == []
    store.close()
    print(told)

asyncio.run(main())
"""


def test_a_limit_on_file_sizes_is_met_like_a_full_disk(open_store: Callable[..., Store], path: Path, run: Run) -> None:
    store = open_store()
    run(add(store, ID))
    store.close()
    ended = warm.run(_LIMITED, str(path), modules=warm.STORE)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 3
    again = open_store()
    assert run(again.job(ID)).version == int(ended.stdout) + 2
    assert os.path.exists(path)
