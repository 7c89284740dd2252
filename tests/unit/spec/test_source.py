"""Reading a job file from disk: one clear error for each way in which it can fail."""

import os
from pathlib import Path

import pytest

from orchestrator.spec.problems import Problem, SpecError
from orchestrator.spec.source import MAX_JOB_BYTES, decode_job, read_job_file


def refused(path: Path | str) -> Problem:
    with pytest.raises(SpecError) as caught:
        read_job_file(path)
    (problem,) = caught.value.problems
    return problem


def test_a_file_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: \xc3\xa9\n")
    assert read_job_file(path) == "name: é\n"


def test_a_missing_file_points_at_init(tmp_path: Path) -> None:
    problem = refused(tmp_path / "job.yaml")
    assert (problem.message, problem.hint) == ("no such file", "`orch init SCRIPT` writes one")
    assert str(problem) == f"{tmp_path}/job.yaml: no such file (`orch init SCRIPT` writes one)"


def test_a_directory_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refused(tmp_path / "pipe").message
    assert "is not a regular file" in refused(tmp_path).message or "cannot be read" in refused(tmp_path).message


def test_endless_files_are_not_read_to_their_end(tmp_path: Path) -> None:
    assert "is not a regular file" in refused("/dev/zero").message
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(10**9)  # sparse
    assert "larger than" in refused(large).message


def test_an_unreadable_path_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    problem = refused(tmp_path / "loop")
    assert "cannot be read: Too many levels" in problem.message
    assert "permissions" in problem.hint
    assert "cannot be read" in refused("a\0b").message


def test_other_encodings_are_refused_at_the_first_bad_byte() -> None:
    with pytest.raises(SpecError) as caught:
        decode_job(b"a: 1\nb: x\xff\n", source="j.yaml")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.hint) == (2, 5, "save the file as UTF-8")
    with pytest.raises(SpecError, match="not UTF-8"):
        decode_job("name: x\n".encode("utf-16"))


def test_bytes_over_the_limit_are_refused() -> None:
    assert decode_job(b"x" * MAX_JOB_BYTES) == "x" * MAX_JOB_BYTES
    with pytest.raises(SpecError, match="larger than 1048576 bytes"):
        decode_job(b"x" * (MAX_JOB_BYTES + 1))
