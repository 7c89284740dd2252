"""A rank's log: the lines that the rank has written, the lines that orch adds, and reading them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.private_files import NotPrivateError
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks import logs
from orchestrator.runtime.ranks.logs import (
    LONGEST_LINE_BYTES,
    LONGEST_READ_BYTES,
    TAIL_CHARACTERS,
    LogEntry,
    LogLimits,
    LogReader,
    LogWriter,
    log_path,
)
from tests.support.disks import fill, small_disk


def every(reader: LogReader, since: float | None = None) -> list[LogEntry]:
    return [entry for batch in reader.batches(since) for entry in batch]


def texts(entries: list[LogEntry]) -> list[str]:
    return [entry.text for entry in entries]


def write(directory: Path, rank: int, lines: list[tuple[float, str]], attempt: int = 1, **limits: int) -> None:
    writer = LogWriter(log_path(directory, attempt, rank), limits=LogLimits(**limits))
    for at, text in lines:
        writer.feed("o", text.encode() + b"\n", at)
    writer.close(0.0)


def test_lines_of_orch_s_own_are_in_the_file_masked_and_are_no_output(tmp_path: Path) -> None:
    heard: list[str] = []
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2"]), listener=heard.append)
    writer.feed("o", b"hello hunter2\nhalf", 1.0)
    writer.note(["[orch] stacks", "[orch]   login (hunter2.py:1)"], 2.0)
    assert (writer.tail, writer.lines, heard) == (("hello ***",), 1, ["hello ***"])
    writer.feed("o", b" a line\n", 3.0)
    writer.close(4.0)
    entries = every(LogReader(tmp_path))
    assert [(e.at, e.text) for e in entries] == [
        (1.0, "hello ***"),
        (2.0, "[orch] stacks"),
        (2.0, "[orch]   login (***.py:1)"),
        (3.0, "half a line"),
    ]
    assert [e.stream for e in entries] == ["stdout", "stderr", "stderr", "stdout"]


def test_an_unfinished_last_line_is_written_at_the_rank_s_end(tmp_path: Path) -> None:
    """The actor may be ended before it closes the log."""
    writer = LogWriter(log_path(tmp_path, 1, 0))
    writer.feed("o", b"whole\nhalf", 1.0)
    writer.end_lines(2.0)
    assert [(e.at, e.text) for e in every(LogReader(tmp_path))] == [(1.0, "whole"), (2.0, "half")]
    writer.close(3.0)


def test_long_last_lines_are_cut_in_what_becomes_a_record(tmp_path: Path) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0))
    writer.feed("o", b"a" * 30_000 + b"b" * 30_000 + b"\n", 1.0)
    (line,) = writer.tail
    assert line.startswith("aaa")
    assert line.endswith("bbb")
    assert "58000 characters left out" in line
    assert len(line) < TAIL_CHARACTERS + 100
    writer.close(2.0)


def test_a_gigabyte_without_a_line_break_is_cut_into_lines(tmp_path: Path) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), limits=LogLimits(max_bytes=1024 * 1024, keep_files=1))
    piece = b"x" * (256 * 1024)
    for number in range(4096):
        writer.feed("o", piece, float(number))
        assert len(writer._streams["o"].line) <= LONGEST_READ_BYTES
    writer.close(5000.0)
    assert sum(file.stat().st_size for file in tmp_path.rglob("rank-*")) < 3 * 1024 * 1024


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
    assert [e.text for e in every(LogReader(tmp_path))] == ["the key:", *["***"] * 4, "and once more *** in a line"]
    assert "MIIEvQIBADAN" not in "".join(writer.tail)


TQDM = [f"\r{n:3}%|{'#' * (n // 10):10}| {n}/100 [00:0{n // 20}<00:04, 20.00it/s]" for n in range(0, 101, 5)]
NESTED = [f"\n\rinner {n}/100\x1b[A" for n in range(100)]
RICH = [f"\r\x1b[2K\x1b[1A\x1b[2Ktrain {n}/100\nvalid {n}/100" for n in range(1, 101)]


@pytest.mark.parametrize(
    ("drawings", "every_second", "end"),
    [
        (TQDM, "20/100 40/100 60/100 80/100 100/100", "\n"),
        (
            [f"\r\x1b[2K\x1b[32mstep\x1b[0m {n}/100   " for n in range(0, 101, 5)],
            "20/100 40/100 60/100 80/100 100/100",
            "",
        ),
        ([f"step {n}/100\r" for n in range(0, 101, 5)], "20/100 40/100 60/100 80/100 100/100", "\n"),
        ([f"{chr(8) * 9}{n}/100" for n in range(0, 101, 5)], "20/100 40/100 60/100 80/100 100/100", "\n"),
        ([f"\x1b[0Gstep {n}/100" for n in range(0, 101, 5)], "20/100 40/100 60/100 80/100 100/100", "\n"),
    ],
)
def test_a_bar_s_newest_version_is_in_the_log_every_few_seconds_and_its_last_one(
    tmp_path: Path, drawings: list[str], every_second: str, end: str
) -> None:
    """Twenty-one versions, one a second and a quarter; those that end with a return are whole at once."""
    heard: list[str] = []
    writer = LogWriter(log_path(tmp_path, 1, 0), listener=heard.append)
    writer.feed("e", b"begins\n", 0.0)
    for number, drawing in enumerate(drawings, 1):
        writer.feed("e", drawing.encode(), 1.25 * number)
        if number % 4 == 1 and number > 1:
            assert writer.is_unfinished
            writer.write_unfinished(1.25 * number + logs.QUIET_SECONDS)
            assert not writer.is_unfinished
            assert len(writer._streams["e"].line) < 200
    writer.feed("e", end.encode(), 30.0)
    writer.close(31.0)
    lines = texts(every(LogReader(tmp_path)))
    assert [re.findall(r"\d+/100", line) for line in lines[1:]] == [[step] for step in every_second.split()]
    assert not any("\r" in line or "\x08" in line or "\x1b[2K" in line for line in lines)
    assert len(heard) >= len(drawings), "every version is searched for a step"
    assert len(writer.tail) == 2, "versions of one line have one place among the last lines"
    assert writer.tail[1] == lines[-1]


@pytest.mark.parametrize("drawings", [NESTED, RICH])
def test_bars_that_are_drawn_together_do_not_flood_the_log(tmp_path: Path, drawings: list[str]) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0))
    writer.feed("e", b"begins\n", 0.0)
    for number, drawing in enumerate(drawings):
        writer.feed("e", drawing.encode(), number / 20)
    writer.write_unfinished(10.0)
    writer.feed("e", b"\nends\n", 10.0)
    writer.close(11.0)
    lines = texts(every(LogReader(tmp_path)))
    assert (lines[0], lines[-1]) == ("begins", "ends")
    assert len([line for line in lines if line]) <= 5
    assert any("99/100" in line or "100/100" in line for line in lines)


def test_a_version_that_is_being_drawn_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    heard: list[str] = []
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2"]), listener=heard.append)
    writer.feed("o", b"\rstep 9/100 hunter2\rstep 12", 1.0)
    writer.write_unfinished(1.5)
    assert heard == ["step 9/100 ***"]
    writer.feed("o", b"3/200 hun", 1.6)
    writer.write_unfinished(5.0)
    assert heard == ["step 9/100 ***", "step 123/200"]
    writer.feed("o", b"ter2\r\n\r\n", 9.0)
    writer.close(10.0)
    assert texts(every(LogReader(tmp_path))) == ["step 9/100 ***", "step 123/200", "step 123/200 ***", ""]


def test_a_line_that_stays_unfinished_is_written_in_parts(tmp_path: Path) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2"]))
    for second in range(12):
        writer.feed("o", b".", float(second))
        if second % 5 == 0:
            writer.write_unfinished(float(second))
    writer.feed("o", b"\nnext\nGo on? hun", 12.0)
    writer.write_unfinished(16.0)
    assert texts(every(LogReader(tmp_path))) == ["......", "......", "next"], "no line is cut that has just begun"
    writer.write_unfinished(17.0)
    writer.feed("o", b"ter2", 18.0)
    writer.close(19.0)
    assert texts(every(LogReader(tmp_path)))[3:] == ["Go on? ", "***"]


@pytest.mark.parametrize("before", range(LONGEST_LINE_BYTES - 9, LONGEST_LINE_BYTES + 3))
def test_a_secret_on_the_border_of_two_pieces_of_a_long_line_is_masked(tmp_path: Path, before: int) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), masker=Masker(["hunter2-secret"]))
    printed = b"x" * before + b"hunter2-secret" + b"y" * 20
    for start in range(0, len(printed), LONGEST_LINE_BYTES + 1):
        writer.feed("o", printed[start : start + LONGEST_LINE_BYTES + 1], 1.0)
    writer.feed("o", b" and on\n", 1.0)
    writer.close(2.0)
    whole = "".join(entry.text for entry in every(LogReader(tmp_path)))
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
        assert texts(every(LogReader(disk))) == ["heard"]


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
        assert texts(every(LogReader(disk))) == ["first", "last"]


def test_other_trouble_with_the_log_is_no_loss_but_an_error(tmp_path: Path) -> None:
    (tmp_path / "attempt-0001").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        LogWriter(log_path(tmp_path, 1, 0))


# -- reading


def test_lines_of_ranks_are_merged_by_time_and_read_once(tmp_path: Path) -> None:
    write(tmp_path, 0, [(1.0, "a"), (3.0, "c")])
    write(tmp_path, 1, [(2.0, "b"), (4.0, "d")])
    reader = LogReader(tmp_path)
    assert texts(every(reader)) == ["a", "b", "c", "d"]
    assert every(reader) == []
    write(tmp_path, 1, [(5.0, "e")])
    assert texts(every(reader)) == ["e"]
    assert texts(every(LogReader(tmp_path, rank=1))) == ["b", "d", "e"]


@pytest.mark.parametrize("count", [0, 1, 3, 5, 100])
def test_the_last_lines_are_those_that_a_whole_reading_ends_with(tmp_path: Path, count: int) -> None:
    for attempt in (1, 2):
        for rank in (0, 1):
            lines = [(float(10 * attempt + number), f"{attempt}.{rank}.{number}") for number in range(4)]
            write(tmp_path, rank, lines, attempt=attempt)
    whole = every(LogReader(tmp_path))
    reader = LogReader(tmp_path)
    assert reader.last(count) == (whole[-count:] if count else [])
    assert every(reader) == [], "what follows begins after them"
    write(tmp_path, 0, [(99.0, "new")], attempt=2)
    assert texts(every(reader)) == ["new"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    lines=st.lists(
        st.tuples(
            st.integers(0, 30), st.text(st.characters(codec="utf-8", exclude_characters="\n\r\b\x1b"), max_size=30)
        ),
        max_size=30,
    ),
    count=st.integers(0, 12),
    piece=st.integers(1, 80),
    since=st.none() | st.integers(0, 30),
)
def test_pieces_of_any_size_give_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[tuple[int, str]],
    count: int,
    piece: int,
    since: int | None,
) -> None:
    monkeypatch.setattr(logs, "_piece_bytes", lambda _: piece)
    directory = tmp_path_factory.mktemp("logs")
    ordered = sorted(lines, key=lambda line: line[0])
    for rank in (0, 1):
        write(directory, rank, [(float(at), text) for at, text in ordered[rank::2]], max_bytes=200, keep_files=50)
    expected = [text for at, text in ordered if since is None or at >= since]
    assert sorted(texts(every(LogReader(directory), since))) == sorted(expected)
    everything = every(LogReader(directory), since)
    assert LogReader(directory).last(count, since) == (everything[-count:] if count else [])


def test_a_reader_follows_a_file_that_is_rotated_away(tmp_path: Path) -> None:
    writer = LogWriter(log_path(tmp_path, 1, 0), limits=LogLimits(max_bytes=100, keep_files=9))
    reader, seen = LogReader(tmp_path), []
    for number in range(20):
        writer.feed("o", f"line {number:02d} {'x' * 20}\n".encode(), float(number))
        seen += texts(every(reader)) if number % 3 == 0 else []
    writer.close(30.0)
    seen += texts(every(reader))
    assert [int(text.split()[1]) for text in seen] == list(range(20))


def test_only_the_end_of_a_large_log_is_read_for_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are read are counted, and not the time."""
    path = log_path(tmp_path, 1, 0)
    path.parent.mkdir(parents=True)
    line = b"1700000000.000000 o " + b"x" * 100 + b"\n"
    with path.open("wb") as file:
        file.writelines([line * 10_000] * 64)
    read = 0
    pread = os.pread

    def counting(handle: int, count: int, at: int) -> bytes:
        nonlocal read
        read += count
        return pread(handle, count, at)

    monkeypatch.setattr(os, "pread", counting)
    assert len(LogReader(tmp_path).last(10)) == 10
    assert read <= 1024 * 1024
    first = next(LogReader(tmp_path).batches())
    assert len(first) == 1000
    assert read <= 3 * 1024 * 1024


def test_a_log_that_is_no_file_is_told_once_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, 0, [(1.0, "a")])
    os.mkfifo(log_path(tmp_path, 1, 1))
    (tmp_path / "secret").write_text("1.0 o root:x\n")
    log_path(tmp_path, 1, 2).symlink_to(tmp_path / "secret")
    reader = LogReader(tmp_path)
    assert sorted(texts(every(reader))) == [
        "[orch] rank-00001.log is left out: it is not a regular file",
        "[orch] rank-00002.log is left out: it is not a regular file",
        "a",
    ]
    assert every(reader) == []
    assert len(LogReader(tmp_path).last(10)) == 3


def test_an_attempt_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write(tmp_path / "elsewhere", 0, [(1.0, "theirs")])
    (tmp_path / "logs" / "attempt-0001").symlink_to(tmp_path / "elsewhere" / "attempt-0001")
    assert every(LogReader(tmp_path / "logs")) == []


def test_a_file_of_one_endless_line_is_skipped_in_pieces(tmp_path: Path) -> None:
    path = log_path(tmp_path, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1.0 o before\n" + b"x" * (3 * 1024 * 1024) + b"\n2.0 o after\n")
    assert texts(every(LogReader(tmp_path))) == ["before", "after"]
    assert texts(LogReader(tmp_path).last(5)) == ["before", "after"]
    path.write_bytes(b"1.0 o before\n")
    os.truncate(path, 2**40)  # a sparse file with a terabyte of zeros
    assert texts(LogReader(tmp_path).last(5)) == []
    assert texts(every(LogReader(tmp_path))) == ["before"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary(max_size=300) | st.sampled_from([b"nan o x\n", b"inf o x\n", b"1e999 o x\n", b"-5 o x\n", b"1 o\n"])
)
def test_any_bytes_are_read(tmp_path: Path, data: bytes) -> None:
    path = log_path(tmp_path, 1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    assert all(0 <= entry.at <= 1e11 for entry in every(LogReader(tmp_path)))
    assert all(0 <= entry.at <= 1e11 for entry in LogReader(tmp_path).last(10))
