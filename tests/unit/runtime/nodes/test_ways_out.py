"""Links that a rank has put into its job's directory lead nothing in or out of it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from orchestrator.runtime.gangs.job_files import LogMirror
from orchestrator.runtime.nodes.files import (
    LogLocation,
    LogPart,
    NodeFiles,
    Output,
    find_outputs,
    keep_output,
    lay_out,
    new_output,
)
from orchestrator.runtime.ranks.logs import LogLimits

JOB = "job-aaaaaa"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Make a directory of the system, with a precious file in it."""
    directory = tmp_path / "etc"
    directory.mkdir()
    (directory / "passwd").write_text("precious")
    return directory


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "job" / "work"
    directory.mkdir(parents=True)
    (directory / "passwd").write_text("of the rank")
    return directory


def untouched(directory: Path) -> bool:
    return {p.name: p.read_text() for p in directory.iterdir()} == {"passwd": "precious"}


def test_outputs_that_are_a_link_to_a_directory_of_the_system_are_not_written_to(elsewhere: Path, work: Path) -> None:
    target = work.parent / "outputs"
    target.symlink_to(elsewhere)
    (found,) = find_outputs(work, ["*"], 100).files
    with pytest.raises(ValueError, match="not a directory but a link"):
        keep_output(work, found, target)
    with pytest.raises(ValueError, match="not a directory but a link"), new_output(target, "new"):
        raise AssertionError("a place was given")
    assert untouched(elsewhere)


def test_a_link_in_place_of_a_draft_or_of_an_output_is_replaced_not_followed(elsewhere: Path, work: Path) -> None:
    target = work.parent / "outputs"
    target.mkdir()
    (target / ".passwd.bringing").symlink_to(elsewhere / "passwd")
    (target / "passwd").symlink_to(elsewhere / "passwd")
    with new_output(target, "passwd") as place:
        with place.create(0o640) as file:
            file.write(b"brought")
        place.finish()
    assert untouched(elsewhere)
    assert not (target / "passwd").is_symlink()
    assert (target / "passwd").read_text() == "brought"
    assert (target / "passwd").stat().st_mode & 0o777 == 0o640


def test_a_working_copy_that_is_a_link_is_not_read(elsewhere: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="not a directory but a link"):
        find_outputs(work, ["*"], 100)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_an_output_that_became_a_link_after_it_was_found_is_not_brought(elsewhere: Path, work: Path, what: str) -> None:
    found = Output(path="out/passwd", size_bytes=1, mode=0o600)
    if what == "file":
        (work / "out").mkdir()
        (work / "out" / "passwd").symlink_to(elsewhere / "passwd")
    else:
        (work / "out").symlink_to(elsewhere)
    target = work.parent / "outputs"
    with pytest.raises(ValueError, match=r"not a regular file|not a directory"):
        keep_output(work, found, target)
    assert not [path for path in target.rglob("*") if not path.is_dir()]
    files = NodeFiles(work.parent)
    files.paths.work(JOB).parent.mkdir(parents=True)
    work.rename(files.paths.work(JOB))
    with pytest.raises(OSError, match=r"not a directory|symbolic links"):
        files.read_output(JOB, "out/passwd", 0)


def test_a_fifo_in_place_of_an_output_holds_nothing_up(work: Path) -> None:
    files = NodeFiles(work.parent)
    files.paths.work(JOB).parent.mkdir(parents=True)
    work.rename(files.paths.work(JOB))
    os.mkfifo(files.paths.work(JOB) / "pipe")
    with pytest.raises(PermissionError, match="not a regular file"):
        files.read_output(JOB, "pipe", 0)


def test_the_copy_of_a_log_is_not_written_through_a_link(elsewhere: Path, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-00000.log"
    path.parent.mkdir()
    path.symlink_to(elsewhere / "passwd")
    part = LogPart(attempt=1, rank=0, place=LogLocation(inode=1, offset=5), data=b"1.0 o x\n")
    with pytest.raises(OSError, match="symbolic link"):
        LogMirror(path, LogLimits()).take(part)
    assert untouched(elsewhere)


# -- the archive of a working directory


def archive(blobs: Path, *entries: dict[str, object]) -> str:
    blobs.mkdir(exist_ok=True)
    (blobs / hashlib.sha256(b"x").hexdigest()).write_bytes(b"x")
    manifest = json.dumps({"version": 1, "entries": entries}).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    (blobs / digest).write_bytes(manifest)
    return digest


def file(path: str) -> dict[str, object]:
    return {"path": path, "type": "file", "mode": 0o600, "digest": hashlib.sha256(b"x").hexdigest()}


def link(path: str, target: str) -> dict[str, object]:
    return {"path": path, "type": "link", "target": target}


@pytest.mark.parametrize(
    "entries",
    [
        [file("../etc/new")],
        [file("/tmp/orch-never")],
        [file("a/../../etc/new")],
        [link("a", "../etc"), file("a/new")],
        [file("b/x"), link("a", "b"), file("a/new")],
        [link("a", "../etc/passwd")],
        [link("here", "."), link("a", "here/..")],
        [file("."), file("a")],
    ],
    ids=str,
)
def test_an_archive_that_leads_out_is_not_laid_out(
    elsewhere: Path, tmp_path: Path, entries: list[dict[str, object]]
) -> None:
    work = tmp_path / "work"
    digest = archive(tmp_path / "blobs", *entries)
    with pytest.raises(ValueError, match="out of the working copy"):
        lay_out(digest, (tmp_path / "blobs").joinpath, work)
    assert not work.exists()
    assert untouched(elsewhere)
    assert not Path("/tmp/orch-never").exists()


def test_links_within_the_working_directory_are_kept(tmp_path: Path) -> None:
    digest = archive(tmp_path / "blobs", file("data/x"), link("latest", "data/x"), link("data/up", "../latest"))
    lay_out(digest, (tmp_path / "blobs").joinpath, tmp_path / "work")
    assert (tmp_path / "work" / "data" / "up").read_text() == "x"


def test_a_link_in_place_of_the_working_copy_is_refused(elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "work").symlink_to(elsewhere)
    digest = archive(tmp_path / "blobs", file("a"))
    with pytest.raises(ValueError, match="is a link"):
        lay_out(digest, (tmp_path / "blobs").joinpath, tmp_path / "work")
