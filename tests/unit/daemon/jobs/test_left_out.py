"""Files that ignore files exclude from a job's copy are counted, named, and found when a script misses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.events import Exit, JobSubmitted, LeftOut
from orchestrator.core.lifecycle.failure import ClassifiedFailure, classify
from orchestrator.core.sentences import failure_advice, failure_sentence
from orchestrator.core.states import FailureClass
from orchestrator.core.stored.job_record import event_body, event_from
from orchestrator.daemon.jobs import workdir_archive as snapshot
from orchestrator.daemon.jobs.event_views import left_out_notes, left_out_view
from orchestrator.runtime.gangs.event_mapping import exited
from orchestrator.runtime.nodes.ignore_rules import left_out_by
from orchestrator.runtime.ranks.rank_events import RankEvent
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
    assert note.startswith("3 files, 2.2 MB left out by .gitignore: data/shakespeare_char/train.bin")
    assert snapshot.measure(work)[2] == taken.left_out


def test_nothing_left_out_is_nothing_to_tell(work: Path) -> None:
    (work / ".gitignore").unlink()
    (work / "__pycache__").mkdir()
    (work / "__pycache__" / "train.pyc").write_bytes(b"x")
    assert take(work).left_out is None
    assert left_out_notes(None) == ()


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
    told = exited(job.id, 1, 0, event, str(work))
    assert (told.exit.missing_file, told.exit.left_out_by) == (missing, ".gitignore")
    other = replace(event, exit=replace(end, missing_file="other.txt"))
    assert exited(job.id, 1, 0, other, str(work)).exit.left_out_by == ""
    from orchestrator.core.lifecycle.fold import fold

    verdict = classify(fold(job, told), 100.0)
    assert isinstance(verdict, ClassifiedFailure)
    assert (verdict.failure.failure_class, verdict.failure.code) == (FailureClass.USER, "file_left_out")
    assert missing in failure_sentence(verdict.failure)
    assert "!train.bin" in failure_advice(verdict.failure, "job")
    assert ".orchignore" in failure_advice(verdict.failure, "job")


def test_the_first_event_keeps_it(work: Path) -> None:
    event = replace(submission(make_spec()), left_out=take(work).left_out)
    back = event_from(event.kind, event_body(event), job_id=event.job_id, at=event.at, cause="")
    assert isinstance(back, JobSubmitted)
    assert back.left_out == event.left_out
