"""Files that ignore files exclude from a job's copy are counted, named, and found when a script misses one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core.events import Exit, JobSubmitted, LeftOut
from orchestrator.core.lifecycle.failure import ClassifiedFailure, classify
from orchestrator.core.states import FailureClass
from orchestrator.core.stored import event_body, event_from
from orchestrator.daemon.jobs.views import left_out_notes, left_out_view
from orchestrator.daemon.submitting import archives as snapshot
from orchestrator.runtime.gangs.relay import exited
from orchestrator.runtime.nodes.workdir_walk import left_out_by
from orchestrator.runtime.ranks.rank_events import RankEvent
from tests.support.deep_trees import MakeDeep
from tests.support.records import replace
from tests.unit.core.builders import make_spec, pending, running, submission


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Make a directory like nanoGPT's: data beside the script, and a .gitignore that excludes it."""
    folder = tmp_path / "work"
    (folder / "data" / "shakespeare_char").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / ".gitignore").write_text("# data\n\n*.bin\n*.pkl\nout/\n")
    data = folder / "data" / "shakespeare_char"
    (data / "train.bin").write_bytes(bytes(2_000_000))
    (data / "val.bin").write_bytes(bytes(200_000))
    (data / "meta.pkl").write_bytes(bytes(700))
    return folder


def blobs(tmp_path: Path) -> Callable[[str], Path]:
    return lambda digest: tmp_path / "blobs" / digest


def take(work: Path, **options: int) -> snapshot.Snapshot:
    return snapshot.take(work, blobs(work.parent), max_bytes=10_000_000, **options)


def test_what_is_left_out_is_told_by_number_size_and_name(work: Path) -> None:
    taken = take(work)
    assert taken.left_out == LeftOut(
        files=3,
        size_bytes=2_200_700,
        by=(".gitignore",),
        largest=(
            "data/shakespeare_char/train.bin",
            "data/shakespeare_char/val.bin",
            "data/shakespeare_char/meta.pkl",
        ),
    )
    (note,) = left_out_notes(left_out_view(taken.left_out))
    assert note.startswith("3 files, 2.1 MiB left out by .gitignore: data/shakespeare_char/train.bin")
    assert snapshot.measure(work)[2] == taken.left_out


def test_orchignore_brings_back_what_gitignore_leaves_out(work: Path) -> None:
    (work / ".orchignore").write_text("!*.bin\nnotes/\n")
    (work / "notes").mkdir()
    (work / "notes" / "todo.txt").write_text("buy milk")
    taken = take(work)
    assert taken.left_out is not None
    assert (taken.left_out.files, taken.left_out.by) == (2, (".gitignore", ".orchignore"))
    assert taken.left_out.largest == ("data/shakespeare_char/meta.pkl", "notes/todo.txt")
    assert taken.size_bytes > 2_200_000


def test_a_deeper_file_wins_and_nothing_comes_back_below_a_directory_that_is_left_out(work: Path) -> None:
    (work / "data" / ".gitignore").write_text("!val.bin\n")
    (work / "out").mkdir()
    (work / "out" / ".orchignore").write_text("!*\n")
    (work / "out" / "big").write_bytes(bytes(10))
    taken = take(work)
    assert taken.left_out is not None
    assert sorted(taken.left_out.largest) == [
        "data/shakespeare_char/meta.pkl",
        "data/shakespeare_char/train.bin",
        "out/big",
    ]


def test_a_directory_of_millions_is_not_counted_to_its_end(work: Path) -> None:
    left_out = take(work, max_counted=2).left_out
    assert left_out is not None
    assert (left_out.files, left_out.more) == (2, True)
    assert left_out_notes(left_out_view(left_out))[0].startswith("more than 2 files, ")


@pytest.mark.parametrize(
    ("path", "by"),
    [
        ("data/shakespeare_char/train.bin", ".gitignore"),
        ("{work}/data/shakespeare_char/meta.pkl", ".gitignore"),
        ("./data/../data/shakespeare_char/val.bin", ".gitignore"),
        ("out/deep/file", ".gitignore"),
        ("data/shakespeare_char/other.txt", ""),
        ("/etc/shadow.bin", ""),
        ("../elsewhere.bin", ""),
        (".", ""),
    ],
)
def test_a_missing_file_is_traced_to_the_file_that_left_it_out(work: Path, path: str, by: str) -> None:
    assert left_out_by(work, path.format(work=work)) == by


def test_a_script_that_misses_such_a_file_is_told_how_to_bring_it_along(work: Path) -> None:
    job = running(pending(make_spec()))
    missing = "data/shakespeare_char/train.bin"
    end = Exit(
        rank=0,
        at=5.0,
        exit_code=1,
        signal=None,
        error_type="FileNotFoundError",
        error_message="[Errno 2] in some other language",
        missing_file=missing,
    )
    event = RankEvent(number=1, kind="exited", at=5.0, exit=end)
    told = exited(job.id, 1, 0, event, str(work), at=5.0)
    assert (told.exit.missing_file, told.exit.left_out_by) == (missing, ".gitignore")
    other = replace(event, exit=replace(end, missing_file="other.txt"))
    assert exited(job.id, 1, 0, other, str(work), at=5.0).exit.left_out_by == ""
    from orchestrator.core.lifecycle.fold import fold

    verdict = classify(fold(job, told), 100.0)
    assert isinstance(verdict, ClassifiedFailure)
    assert (verdict.failure.failure_class, verdict.failure.code) == (FailureClass.USER, "file_left_out")
    assert missing in verdict.failure.sentence()
    assert "!train.bin" in verdict.failure.advice("job")
    assert ".orchignore" in verdict.failure.advice("job")


def test_the_first_event_keeps_it(work: Path) -> None:
    event = replace(submission(make_spec()), left_out=take(work).left_out)
    back = event_from(event.kind, event_body(event), job_id=event.job_id, at=event.at, cause="")
    assert isinstance(back, JobSubmitted)
    assert back.left_out == event.left_out


def laid_out(work: Path) -> Path:
    copy = work.parent / "copy"
    snapshot.lay_out(take(work).digest, blobs(work.parent), copy)
    return copy


def test_links_that_lead_nowhere_are_copied_as_they_are(work: Path) -> None:
    (work / "loop").symlink_to("loop")
    (work / "ring").symlink_to("data/ring")
    (work / "data" / "ring").symlink_to(work / "ring")
    (work / "nothing").symlink_to("not-here")
    (work / "itself").symlink_to(work / "itself")

    taken, copy = take(work), laid_out(work)

    assert taken.left_out is not None
    assert taken.left_out.links_out == 0
    found = {name: os.readlink(copy / name) for name in ("loop", "ring", "data/ring", "nothing", "itself")}
    assert found == {
        "loop": "loop",
        "ring": "data/ring",
        "data/ring": "../ring",
        "nothing": "not-here",
        "itself": "itself",
    }


def test_an_absolute_link_to_a_place_inside_is_relative_in_the_copy(work: Path) -> None:
    (work / "run-1").mkdir()
    (work / "run-1" / "x").write_text("hi")
    (work / "latest").symlink_to(work / "run-1")
    (work / "data" / "newest").symlink_to(work / "latest")
    (work / "data" / "top").symlink_to(work)
    (work.parent / "alias").symlink_to(work)
    (work / "by-alias").symlink_to(work.parent / "alias" / "run-1")

    left_out, copy = snapshot.measure(work)[2], laid_out(work)

    assert left_out is not None
    assert left_out.links_out == 0
    assert os.readlink(copy / "latest") == "run-1"
    assert os.readlink(copy / "data" / "newest") == "../latest"
    assert os.readlink(copy / "data" / "top") == ".."
    (work / "run-1" / "x").write_text("changed afterwards")
    assert [(copy / name / "x").read_text() for name in ("latest", "data/newest", "by-alias")] == ["hi"] * 3


def test_links_out_of_the_directory_are_copied_as_links_and_said_once(work: Path) -> None:
    big = work.parent / "big"
    big.mkdir()
    (big / "a.txt").write_text("42")
    (work / "data" / "absolute").symlink_to(big)
    (work / "relative").symlink_to("../big/a.txt")
    (work / "through").symlink_to("data/absolute/a.txt")
    (work / "more").symlink_to("/nowhere/at/all")

    taken = take(work)
    copy = laid_out(work)

    assert taken.left_out is not None
    assert (taken.left_out.links_out, len(taken.left_out.links)) == (4, 3)
    assert (copy / "data" / "absolute" / "a.txt").read_text() == "42"
    assert (copy / "relative").read_text() == (copy / "through").read_text() == "42"
    assert os.readlink(copy / "more") == "/nowhere/at/all"
    notes = left_out_notes(left_out_view(taken.left_out))
    assert len(notes) == 2
    assert notes[1].startswith("4 links lead out of working_dir and are copied as links: more -> /nowhere/at/all, ")
    assert notes[1].endswith(" and 1 more; each node of the job needs what is there")


def test_a_directory_of_great_depth_is_refused_by_name_and_may_be_left_out(work: Path, make_deep: MakeDeep) -> None:
    make_deep(work / "nested", 1_500)
    with pytest.raises(snapshot.WorkdirError, match="more than 64 levels deep, below nested; list it in"):
        take(work)
    (work / ".gitignore").write_text("nested/\n")
    assert take(work).files > 0
