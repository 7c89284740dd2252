"""A rank's log: what the rank has written and what orch adds to it."""

from __future__ import annotations

from pathlib import Path

from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.logs import LogReader, LogWriter, log_path


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
