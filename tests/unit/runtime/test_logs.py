"""A rank's log: what the rank has written and what orch adds to it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from orchestrator.private_files import NotPrivateError
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.logs import LONGEST_LINE_BYTES, LogLimits, LogReader, LogWriter, log_path
from tests.support.disks import fill, small_disk


def test_lines_of_orch_s_own_are_in_the_file_masked_and_are_no_output(tmp_path: Path) -> None:
    heard: list[str] = []
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2"]), listener=heard.append)
    writer.feed("o", b"hello hunter2\nhalf", 1.0)
    writer.note(["[orch] stacks", "[orch]   login (hunter2.py:1)"], 2.0)
    assert (writer.tail, writer.lines, heard) == (("hello ***",), 1, ["hello ***"])
    writer.feed("o", b" a line\n", 3.0)
    writer.close(4.0)
    entries = LogReader(tmp_path).read()
    assert [(e.at, e.text) for e in entries] == [
        (1.0, "hello ***"),
        (2.0, "[orch] stacks"),
        (2.0, "[orch]   login (***.py:1)"),
        (3.0, "half a line"),
    ]
    assert [e.stream for e in entries] == ["stdout", "stderr", "stderr", "stdout"]


KEY = "-----BEGIN KEY-----\nMIIEvQIBADAN\nBgkqhkiG9w0B\n-----END KEY-----\n"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_secret_of_several_lines_is_masked_line_by_line_however_it_arrives(tmp_path: Path, size: int) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker([KEY]))
    printed = f"the key:\r\n{KEY}and once more MIIEvQIBADAN in a line".encode()
    for start in range(0, len(printed), size):
        writer.feed("o", printed[start : start + size], 1.0)
    writer.close(2.0)
    text = log_path(tmp_path, 1, 0).read_text()
    assert not any(line in text for line in KEY.splitlines())
    assert [e.text for e in LogReader(tmp_path).read()] == ["the key:", *["***"] * 4, "and once more *** in a line"]
    assert "MIIEvQIBADAN" not in "".join(writer.tail)


@pytest.mark.parametrize("before", range(LONGEST_LINE_BYTES - 9, LONGEST_LINE_BYTES + 3))
def test_a_secret_on_the_border_of_two_pieces_of_a_long_line_is_masked(tmp_path: Path, before: int) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2-secret"]))
    printed = b"x" * before + b"hunter2-secret" + b"y" * 20
    for start in range(0, len(printed), LONGEST_LINE_BYTES + 1):
        writer.feed("o", printed[start : start + LONGEST_LINE_BYTES + 1], 1.0)
    writer.feed("o", b" and on\n", 1.0)
    writer.close(2.0)
    whole = "".join(entry.text for entry in LogReader(tmp_path).read())
    assert whole == "x" * before + "***" + "y" * 20 + " and on"


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path = log_path(tmp_path, 1, 0)
    path.parent.mkdir()
    path.symlink_to(precious)
    with pytest.raises(NotPrivateError, match="symbolic link"):
        LogWriter(path)
    assert precious.read_text() == "kept"


def test_a_log_without_kept_files_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), limits=LogLimits(max_bytes=100, keep_files=0))
    for number in range(10):
        writer.feed("o", f"{number} {'x' * 40}\n".encode(), 1.0)
    writer.close(2.0)
    path = log_path(tmp_path, 1, 0)
    assert path.stat().st_size <= 100
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_short_lines_of_a_document_are_no_secrets() -> None:
    masker = Masker(['{\n  "key": "abcdefgh"\n}\n', "", "single"])
    assert masker.text('{} "key": "abcdefgh" single') == "{} *** ***"
    assert not Masker(["", ""])
    assert masker.beginning(b"a sing") == 4
    assert masker.beginning(b"a single") == 0


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_on_a_full_disk_a_rank_runs_without_a_log_until_there_is_room(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path, 8, kind=kind) as disk:
        ballast = fill(disk)
        writer = LogWriter(log_path(disk, 1, 0))
        writer.feed("o", b"unheard\n", 1.0)
        assert writer.lost is not None
        assert "No space left" in writer.lost
        assert writer.tail == ("unheard",)
        ballast.unlink()
        writer.feed("o", b"heard\n", 2.0)
        assert writer.lost is None
        writer.close(3.0)
        assert [entry.text for entry in LogReader(disk).read()] == ["heard"]


def test_of_what_does_not_fit_no_half_line_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path, 8) as disk:
        writer = LogWriter(log_path(disk, 1, 0))
        writer.feed("o", b"first\n", 1.0)
        ballast = fill(disk)
        writer.feed("o", b"x" * 20_000 + b"\n", 2.0)
        assert writer.lost is not None
        ballast.unlink()
        writer.feed("o", b"last\n", 3.0)
        writer.close(4.0)
        assert [entry.text for entry in LogReader(disk).read()] == ["first", "last"]


def test_other_trouble_with_the_log_is_no_loss_but_an_error(tmp_path: Path) -> None:
    (tmp_path / "attempt-0001").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        LogWriter(log_path(tmp_path, 1, 0))
