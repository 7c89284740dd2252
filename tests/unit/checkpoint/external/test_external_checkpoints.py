"""Checkpoints that scripts write by themselves: completeness, damage, retention, and copies."""

from __future__ import annotations

import errno
import glob
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.checkpoint.external import external_checkpoints, script_files
from orchestrator.checkpoint.external.external_checkpoints import (
    SETTLE_SECONDS,
    ExternalCheckpoints,
    FileWatcher,
    ReportedStep,
    WatchedGlob,
    WatchSettings,
)
from orchestrator.checkpoint.storage.directory import CheckpointStatus
from tests.support import warm
from tests.support.deep_trees import MakeDeep

NOW = time.time()
"""The time from which the ages of files are counted."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    return work


def watch(job: Path, pattern: str = "out/ckpt-*", keep: int | None = 3) -> ExternalCheckpoints:
    """Return ExternalCheckpoints for which a second passes between two scans."""
    return ExternalCheckpoints(settings_of(job, pattern, keep), clock=seconds())


def settings_of(job: Path, pattern: str = "out/ckpt-*", keep: int | None = 3) -> WatchSettings:
    return WatchSettings(pattern=pattern, directory=str(job), registry=str(job.parent / "registry"), keep=keep)


def at_step(step: int) -> ReportedStep:
    return ReportedStep(step=step, least=step, most=step)


def seconds() -> Callable[[], float]:
    """Return a clock that is a second later at each reading."""
    count = itertools.count()
    return lambda: float(next(count))


def write(job: Path, step: int, *, age: float = 100.0, names: tuple[str, ...] = ("a.pt", "state.json")) -> Path:
    """Write a checkpoint that was last modified ``age`` seconds ago."""
    folder = job / "out" / f"ckpt-{step}"
    folder.mkdir(exist_ok=True)
    for name in names:
        if name.endswith("json"):
            (folder / name).write_text(json.dumps({"step": step}))
        elif name.endswith("safetensors"):
            save_file({"w": torch.full((4,), step)}, folder / name)
        else:
            torch.save({"w": torch.full((4,), step)}, folder / name)
    touch(folder, age)
    return folder


def touch(folder: Path, age: float) -> None:
    then = NOW - age
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def registered(files: ExternalCheckpoints, *, attempt: int = 1) -> list[int]:
    """Scan for as long as a checkpoint takes to settle; return the steps that the last scan registered."""
    found = [files.scan(attempt=attempt) for _ in range(1 + round(SETTLE_SECONDS))]
    assert not any(found[:-1])
    return [info.step for info in found[-1]]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.pt",
        "**/*.pt",
        "out/**",
        "out/**/*.pt",
        "runs/*/ckpt/*.pt",
        "**/ckpt/**/*.pt",
        "r*/**/s*",
        "{job}/out/**/*.pt",
        "none/**/x",
    ],
)
def test_a_watched_glob_matches_what_python_matches(job: Path, pattern: str) -> None:
    for name in ("a.pt", "out/b/c/d.pt", "out/.hidden/x.pt", ".h/y.pt", "runs/1/ckpt/s.pt", "runs/2/ckpt/s.pt"):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).touch()
    pattern = pattern.format(job=job)
    every = {os.path.normpath(job / match) for match in glob.glob(pattern, root_dir=job, recursive=True)}
    outermost = sorted(path for path in every if not any(path.startswith(f"{other}/") for other in every))

    assert WatchedGlob(WatchSettings(pattern=pattern, directory=str(job), registry="")).matches() == outermost


def test_a_watched_glob_is_searched_in_a_tree_of_any_depth(job: Path, make_deep: MakeDeep) -> None:
    make_deep(job / "out", 1_500)
    (job / "out" / "a.pt").touch()
    settings = WatchSettings(pattern="**/*.pt", directory=str(job), registry="")

    assert WatchedGlob(settings).matches() == [str(job / "out" / "a.pt")]


def test_what_a_killed_writer_left_is_not_taken_up_by_the_next_attempt(job: Path) -> None:
    write(job, 2, age=0.5)
    assert watch(job).scan(attempt=1, writer_ended=True) == []
    assert registered(watch(job)) == [], "though it has been quiet since"
    write(job, 2, age=10, names=("b.pt",))  # written again: a different checkpoint
    assert registered(watch(job)) == [2]


def test_a_writer_that_ended_well_has_finished_what_it_wrote(job: Path) -> None:
    write(job, 3, age=0)
    assert [i.step for i in watch(job).scan(attempt=1, writer_ended=True, ended_well=True)] == [3]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed_and_the_one_before_taken(job: Path, damage: str) -> None:
    write(job, 1, age=200)
    folder = write(job, 2, age=100)
    files = watch(job)
    assert registered(files) == [1, 2]
    victim, before = folder / "a.pt", (folder / "a.pt").stat()
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif damage == "truncate":
        victim.write_bytes(content[:-1])
    else:
        victim.unlink()
    assert files.verify(files.infos()[0]).status is CheckpointStatus.BROKEN
    assert files.newest_good(attempt=2) == str(job / "out" / "ckpt-1")
    assert [str(folder) in problem for problem in files.problems] == [True]
    assert [info.status for info in files.infos()] == [CheckpointStatus.BROKEN, CheckpointStatus.COMPLETE]


def test_the_choice_of_an_attempt_stays(job: Path) -> None:
    write(job, 1, age=200)
    files = watch(job)
    registered(files)
    assert files.newest_good(attempt=2) == str(job / "out" / "ckpt-1")
    write(job, 2)
    assert registered(files) == [2]
    assert watch(job).newest_good(attempt=2) == str(job / "out" / "ckpt-1")
    assert watch(job).newest_good(attempt=3) == str(job / "out" / "ckpt-2")


def test_what_a_newer_attempt_wrote_is_newer_by_whatever_clock(job: Path) -> None:
    files = watch(job, keep=1)
    write(job, 100, age=-300)  # according to the clock of a node that is ahead
    registered(files)
    write(job, 110, age=100)
    registered(files, attempt=2)
    assert [info.step for info in files.infos()] == [110, 100]
    assert files.newest_good(attempt=3) == str(job / "out" / "ckpt-110")
    assert files.retain() == [str(job / "out" / "ckpt-100")]


def test_the_newest_are_kept_and_the_last_good_one_always(job: Path) -> None:
    for step in range(1, 6):
        write(job, step, age=100 - step)
    files = watch(job, keep=2)
    assert registered(files) == [1, 2, 3, 4, 5]
    (job / "out" / "ckpt-5" / "a.pt").write_bytes(b"PK torn")
    assert files.retain() == []  # the newest is damaged: nothing is deleted
    write(job, 6, age=50)
    assert registered(files) == [6]
    files.retain()
    assert sorted(path.name for path in (job / "out").iterdir()) == ["ckpt-4", "ckpt-5", "ckpt-6"]
    assert watch(job, keep=None).retain() == []


def test_links_are_neither_followed_nor_deleted(job: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep me")
    (job / "out" / "ckpt-0").symlink_to(precious)
    (job / "elsewhere").symlink_to(tmp_path)
    for step in (1, 2, 3):
        folder = write(job, step, age=100 - step)
        (folder / "link").symlink_to(precious)
        touch(folder, 100 - step)
    files = watch(job, keep=1)
    assert registered(files) == [1, 2, 3]
    files.retain()
    assert sorted(path.name for path in (job / "out").iterdir()) == ["ckpt-0", "ckpt-3"]
    outside = watch(job, pattern="elsewhere/*", keep=1)
    assert registered(outside) == []
    assert (precious / "data").read_text() == "keep me"


def test_a_watched_link_stands_for_the_file_it_leads_to(job: Path) -> None:
    """Lightning's `last.ckpt` is a link that is replaced at each save."""
    link = job / "out" / "last.ckpt"
    files = watch(job, "out/last.ckpt", keep=1)
    for step, target in ((1, "epoch=0-step=1.ckpt"), (2, str(job / "out" / "epoch=0-step=2.ckpt"))):
        overwrite(job / "out" / f"epoch=0-step={step}.ckpt", step)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        (info,) = files.scan(attempt=1)
        assert (info.step, info.path) == (step, str(job / "out" / f"epoch=0-step={step}.ckpt"))
        assert files.scan(attempt=1) == []
        files.retain()
    assert files.newest_good(attempt=2) == info.path
    assert sorted(path.name for path in (job / "out").iterdir()) == [
        "epoch=0-step=1.ckpt",
        "epoch=0-step=2.ckpt",
        "last.ckpt",
    ]


@pytest.mark.parametrize("pattern", ["out/latest", "out/l*"])
def test_a_watched_link_to_a_directory_stands_for_it(job: Path, pattern: str) -> None:
    write(job, 7)
    (job / "out" / "latest").symlink_to("ckpt-7")
    assert registered(watch(job, pattern)) == [7]


def test_a_file_that_is_matched_itself_is_no_link_s_alone(job: Path) -> None:
    for step in (1, 2, 3):
        write(job, step, age=100 - step)
    (job / "out" / "ckpt-best").symlink_to("ckpt-1")
    files = watch(job, keep=1)
    assert registered(files) == [1, 2, 3]
    assert [Path(path).name for path in files.retain()] == ["ckpt-2", "ckpt-1"]


def test_a_watched_link_that_leads_elsewhere_is_not_followed_and_that_is_told(job: Path, tmp_path: Path) -> None:
    overwrite(tmp_path / "precious.ckpt", 1)
    (job / "out" / "last.ckpt").symlink_to(tmp_path / "precious.ckpt")
    watcher = FileWatcher(settings_of(job, "out/last.ckpt"))
    watcher.look()
    watcher.look()
    assert watcher.status.failures == 1
    assert str(tmp_path / "precious.ckpt") in watcher.status.failure
    assert watcher.status.path == ""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ckpt-120", 120),
        ("checkpoint-500", 500),  # Hugging Face
        ("epoch=3-step=1200.ckpt", 1200),  # Lightning
        ("epoch=02-val_loss=0.32.ckpt", None),
        ("step=40-val_loss=0.31.ckpt", 40),
        ("iter_0000500", 500),  # Megatron
        ("checkpoint_2_1500.pt", 1500),  # fairseq
        ("global_step1000", 1000),  # DeepSpeed
        ("model-00001-of-00005.safetensors", None),
        ("model_2026-11-24.pt", None),
        ("model_120.pt", 120),
        ("000120.pt", 120),
        ("epoch_3.pth", None),
        ("last-v2.ckpt", None),
        ("resnet50.pt", None),
    ],
)
def test_a_step_is_taken_from_a_name_by_a_rule(name: str, step: int | None) -> None:
    assert external_checkpoints.step_in(name) == step


@pytest.mark.parametrize(
    ("reported", "step"),
    [
        ((NOW - 20, 120, False), 120),
        ((NOW - 20, 119, False), 120),
        ((NOW - 20, 7, False), 7),
        ((NOW - 20, 7, True), 120),
        (None, 120),
    ],
)
def test_what_the_script_reports_comes_before_the_number_in_a_name(
    job: Path, reported: tuple[float, int, bool] | None, step: int
) -> None:
    watcher = FileWatcher(settings_of(job), reported=lambda: reported, clock=seconds())
    write(job, 120, age=15)
    for _ in range(4):
        watcher.look()
    assert watcher.status.step == step


def test_what_was_there_before_the_job_is_not_its_own(job: Path) -> None:
    write(job, 1)
    files = watch(job)
    files.adopt_none()
    assert registered(files) == []
    assert files.newest_good(attempt=2) is None
    assert (job / "out" / "ckpt-1").exists()


def test_the_watcher_registers_retains_and_tells(job: Path) -> None:
    watcher = FileWatcher(settings_of(job, keep=1), clock=seconds())
    for step in (1, 2):
        write(job, step, age=100 - step)
    for _ in range(3):
        watcher.look()
    assert (watcher.status.step, watcher.status.persisted, watcher.status.watched) == (2, 2, True)
    assert watcher.status.path == str(job / "out" / "ckpt-2")
    assert [path.name for path in (job / "out").iterdir()] == ["ckpt-2"]
    write(job, 3, age=0)
    watcher.ended(well=False)
    watcher.look()
    assert watcher.status.step == 2
    write(job, 4, age=0)
    watcher.ended(well=True)
    watcher.look()
    assert watcher.status.step == 4
    watcher.close()


def test_a_registry_that_cannot_be_written_is_told_and_deletes_nothing(job: Path) -> None:
    (job.parent / "registry").write_text("a file, where a directory should be")
    for step in (1, 2):
        write(job, step, age=100 - step)
    watcher = FileWatcher(settings_of(job, keep=1))
    watcher.look()
    watcher.look()
    assert watcher.status.failures
    assert "could not be processed" in watcher.status.failure
    assert len(list((job / "out").iterdir())) == 2


def overwrite(path: Path, step: int, *, age: float = 1.0) -> None:
    """Save as torch.save and nanoGPT do: into the same file."""
    torch.save({"step": step, "w": torch.full((5000,), float(step))}, path)
    then = NOW - age + step / 1000
    os.utime(path, (then, then))


def tear(path: Path) -> None:
    """Leave the file as it is after its writer was killed while it overwrote it."""
    with path.open("wb") as file:
        file.write(b"PK\x03\x04" + bytes(500))


def replace(path: Path, step: int) -> None:
    draft = path.with_suffix(".tmp")
    torch.save({"step": step, "w": torch.full((5000,), float(step))}, draft)
    then = NOW - 100 + step
    os.utime(draft, (then, then))
    draft.replace(path)


def step_in(path: str | Path | None) -> int:
    assert path is not None
    return int(torch.load(path)["step"])


@pytest.mark.parametrize("name", ["ckpt.pt", "last.ckpt", "snapshot.pt", "gpt2.pt"])
def test_a_whole_file_of_a_dead_writer_counts_at_once(job: Path, name: str) -> None:
    overwrite(job / "out" / name, 7, age=0.5)
    files = watch(job, pattern=f"out/{name}")
    (info,) = files.scan(attempt=1, writer_ended=True, step_at=lambda at: at_step(7))
    assert (info.step, files.newest_good(attempt=2), files.notes) == (7, str(job / "out" / name), [])


def test_a_torn_file_of_a_dead_writer_gives_way_to_the_copy_of_the_one_before(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    files = watch(job, pattern="out/ckpt.pt")
    for step in (1, 2):
        overwrite(path, step, age=10 - step)
        (info,) = files.scan(attempt=1, step_at=lambda at, step=step: at_step(step * 100))
        assert info.step == step * 100
    tear(path)
    assert files.scan(attempt=1) == []
    assert files.is_waiting
    later = watch(job, pattern="out/ckpt.pt")
    assert later.scan(attempt=1, writer_ended=True) == []
    assert later.newest_good(attempt=2) == str(path)
    assert step_in(path) == 2
    assert [note.code for note in later.notes] == ["checkpoint_restored"]
    assert [(info.step, info.status) for info in later.infos()] == [(200, CheckpointStatus.COMPLETE)]
    assert later.scan(attempt=2) == [], "it is the one that is known"


def test_nothing_overwritten_in_place_changes_the_copy(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    files = watch(job, pattern="out/ckpt.pt")
    overwrite(path, 1)
    files.scan(attempt=1)
    with path.open("r+b") as file:
        file.write(b"x" * 200)
    (copy,) = (job.parent / "registry" / "copies").rglob("ckpt.pt")
    assert step_in(copy) == 1
    assert copy.stat().st_ino != path.stat().st_ino


def test_a_script_that_always_puts_a_new_file_in_place_costs_no_copies(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    files = watch(job, pattern="out/ckpt.pt")
    links = []
    for step in range(1, 6):
        replace(path, step)
        assert len(files.scan(attempt=1)) == 1
        (copy,) = (job.parent / "registry" / "copies").rglob("ckpt.pt")
        links.append(copy.stat().st_ino == path.stat().st_ino)
    assert links == [False, False, True, True, True]
    replace(path, 6)
    assert step_in(copy) == 5, "the link holds what the script has replaced"
    files.scan(attempt=1)
    overwrite(path, 7)  # the script changes its method and overwrites in place
    files.scan(attempt=1)
    (copy,) = (job.parent / "registry" / "copies").rglob("ckpt.pt")
    assert copy.stat().st_ino != path.stat().st_ino


def test_the_old_copy_stays_until_the_next_is_whole(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job / "out" / "ckpt.pt"
    files = watch(job, pattern="out/ckpt.pt")
    overwrite(path, 1)
    files.scan(attempt=1)
    overwrite(path, 2)
    real = script_files.take

    def take(source: str, target: Path, **how: Any) -> None:
        real(source, target, **how)
        tear(path)  # the script saves again while the copy is made

    monkeypatch.setattr(script_files, "take", take)
    assert files.scan(attempt=1) == []
    assert files.newest_good(attempt=2) == str(path)
    assert step_in(path) == 1


def killed_twice(job: Path, *, before: Sequence[int]) -> ExternalCheckpoints:
    """Have a script save ``before`` and 9, be killed at once, and be killed in the first save of its next attempt."""
    path = job / "out" / "ckpt.pt"
    files = watch(job, pattern="out/ckpt.pt")
    for step in before:
        overwrite(path, step)
        assert files.scan(attempt=1)
    overwrite(path, 9)
    assert files.scan(attempt=1, writer_ended=True)
    daemon = watch(job, pattern="out/ckpt.pt")
    daemon.scan(attempt=1, writer_ended=True)
    assert daemon.newest_good(attempt=2) == str(path)
    assert step_in(path) == 9
    tear(path)
    assert watch(job, pattern="out/ckpt.pt").scan(attempt=2, writer_ended=True) == []
    return watch(job, pattern="out/ckpt.pt")


@pytest.mark.parametrize("before", [(), (1,), (1, 2, 3)])
def test_a_file_registered_after_its_writers_end_has_a_copy_before_the_next_attempt(
    job: Path, before: tuple[int, ...]
) -> None:
    files = killed_twice(job, before=before)
    assert files.newest_good(attempt=3) == str(job / "out" / "ckpt.pt")
    assert step_in(job / "out" / "ckpt.pt") == 9
    assert len(list((job.parent / "registry" / "copies").iterdir())) == 1


def test_a_large_one_is_copied_later_and_the_older_copy_stays_until_then(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = script_files.take

    def take(source: str, target: Path, *, link: bool, most_bytes: int | None = None) -> None:
        real(source, target, link=link, most_bytes=most_bytes and 100)

    monkeypatch.setattr(script_files, "take", take)
    monkeypatch.setattr(script_files, "_clone", lambda _source, _target: False)
    files = killed_twice(job, before=(1, 2))
    assert files.newest_good(attempt=3) == str(job / "out" / "ckpt.pt")
    assert step_in(job / "out" / "ckpt.pt") == 2
    assert [note.code for note in files.notes] == ["checkpoint_restored"]


def test_the_watcher_of_the_next_attempt_copies_a_large_one_and_the_older_copy_goes(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copies = job / "out" / "ckpt.pt", job.parent / "registry" / "copies"
    files = watch(job, pattern="out/ckpt.pt")
    overwrite(path, 1)
    files.scan(attempt=1)
    overwrite(path, 2)
    files.scan(attempt=1, writer_ended=True)
    with monkeypatch.context() as patch:
        patch.setattr(script_files, "take", lambda *_, **how: os.stat("/no/room"))
        files.newest_good(attempt=2)
    assert [step_in(copy) for copy in copies.rglob("ckpt.pt")] == [1]
    files.scan(attempt=2)
    assert [step_in(copy) for copy in copies.rglob("ckpt.pt")] == [2]


def test_a_file_that_cannot_tell_is_not_replaced_by_its_copy(job: Path) -> None:
    path = job / "out" / "state.dat"
    path.write_bytes(b"one")
    os.utime(path, (1e9, 1e9))
    files = watch(job, pattern="out/state.dat")
    assert registered(files) == [0]
    path.write_bytes(b"two, perhaps whole")
    files.scan(attempt=1, writer_ended=True)
    found = files.newest_good(attempt=2)
    assert found is not None
    assert found != str(path)
    assert Path(found).read_bytes() == b"one"
    assert path.read_bytes() == b"two, perhaps whole"
    assert [note.code for note in files.notes] == ["checkpoint_copy_used"]


def test_that_no_own_file_is_used_is_told(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    overwrite(path, 1)
    files = watch(job, pattern="out/*.pt")
    files.adopt_none()
    assert files.newest_good(attempt=2) is None
    assert files.notes == [], "it was there before the job"
    tear(path)
    files.scan(attempt=2, writer_ended=True)
    assert files.newest_good(attempt=3) is None
    (note,) = files.notes
    assert note.code == "checkpoint_unused"
    assert str(path) in note.message


def test_a_full_disk_leaves_the_file_itself_and_says_that_it_has_no_copy(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path, **how: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(script_files, "take", full)
    overwrite(job / "out" / "ckpt.pt", 1)
    watcher = FileWatcher(settings_of(job, "out/ckpt.pt"))
    watcher.look()
    assert "No space left" in watcher.status.failure
    assert watcher.status.digest
    assert watch(job, pattern="out/ckpt.pt").newest_good(attempt=2) == str(job / "out" / "ckpt.pt")


def test_the_step_of_a_file_is_the_one_that_was_reported_when_it_was_saved(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    reported = iter([(NOW - 20, 100, False), (NOW - 10, 200, False), (NOW - 1, 290, False)])
    watcher = FileWatcher(settings_of(job, "out/ckpt.pt"), reported=lambda: next(reported))
    watcher.look()
    watcher.look()
    overwrite(path, 1, age=15)
    watcher.look()
    assert watcher.status.step in (149, 150)
    watcher.close()


def test_a_file_that_is_overwritten_many_times_a_second_always_has_a_good_one(job: Path) -> None:
    path = job / "out" / "ckpt.pt"
    watcher = FileWatcher(settings_of(job, "out/ckpt.pt"))
    watcher.start(1)
    script = f"""
import itertools, os, time, torch
for step in itertools.count(1):
    torch.save({{"step": step, "w": torch.zeros(200_000)}}, {str(path)!r})
    time.sleep(0.05)
"""
    writer = warm.Warm(script)
    try:
        deadline = time.monotonic() + 300
        while watcher.status.persisted < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.wait()
    assert watcher.status.persisted >= 3
    tear(path)
    watcher.ended(well=False)
    watcher.look()
    watcher.close()
    files = watch(job, pattern="out/ckpt.pt")
    assert step_in(files.newest_good(attempt=2)) >= 3


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_what_is_no_regular_file_never_holds_anything_up(job: Path, kind: str) -> None:
    path = job / "out" / "ckpt.pt"
    overwrite(path, 1)
    files = watch(job, pattern="out/ckpt.pt")
    files.scan(attempt=1)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(job.parent / "elsewhere")
    files.scan(attempt=1)
    assert files.scan(attempt=1, writer_ended=True) == []
    assert step_in(files.newest_good(attempt=2)) == 1


@pytest.mark.parametrize("pattern", ["out/ckpt-*", "out/ckpt.pt"], ids=["one each time", "overwritten"])
def test_the_registry_is_this_user_s_alone_whatever_the_umask(job: Path, pattern: str) -> None:
    write(job, 1, age=10)
    overwrite(job / "out" / "ckpt.pt", 1, age=10)
    before = os.umask(0o022)
    try:
        files = watch(job, pattern)
        files.scan(attempt=1)
        files.scan(attempt=1)
    finally:
        os.umask(before)
    registry = job.parent / "registry"
    made = [registry, *registry.rglob("*")]
    assert len(made) > 1
    assert [path for path in made if path.stat().st_mode & 0o077] == []
