"""Files that recordings append to: valid at every moment, for readers and after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.gpu.recording.files import JsonArrayFile, LineFile
from tests.unit.gpu.support import wait_for


def numbers(path: Path) -> list[int]:
    values: list[int] = json.loads(path.read_bytes())
    return values


def test_an_array_is_whole_from_the_start_and_after_every_append(tmp_path: Path) -> None:
    file = JsonArrayFile(tmp_path / "a.json")
    assert numbers(file.path) == []
    for end in range(1, 40):
        file.append([str(end - 1)])
        assert numbers(file.path) == list(range(end))
    file.append([])
    file.append(["40", "41"])
    file.close()
    file.close()
    assert numbers(file.path) == [*range(39), 40, 41]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"], "only the file itself stays"


def test_a_file_that_someone_has_open_stays_as_it_is(tmp_path: Path) -> None:
    file = JsonArrayFile(tmp_path / "a.json")
    file.append(["1"])
    with file.path.open("rb") as reader:
        for number in range(2, 6):
            file.append([str(number)])
        assert json.loads(reader.read()) == [1]
        assert numbers(file.path) == [1, 2], "the other copy; the next elements wait for the reader"
    file.append(["6"])
    assert numbers(file.path) == [1, 2, 3, 4, 5, 6]
    file.close()


def test_a_reader_who_never_closes_is_waited_for_only_so_long(tmp_path: Path) -> None:
    now = [0.0]
    file = JsonArrayFile(tmp_path / "a.json", patience_seconds=10.0, close_seconds=0.05, clock=lambda: now[0])
    file.append(["1"])
    with file.path.open("rb"):
        file.append(["2"])
        file.append(["3"])
        assert numbers(file.path) == [1, 2]
        now[0] += 10.5
        file.append(["4"])
        assert numbers(file.path) == [1, 2, 3, 4]
        with file.path.open("rb"):
            file.append(["5"])
            file.append(["6"])
            file.close()
    assert numbers(file.path) == [1, 2, 3, 4, 5, 6], "at the end everything is written"


def test_a_reader_at_any_moment_gets_valid_json(tmp_path: Path) -> None:
    file = JsonArrayFile(tmp_path / "a.json")
    reads: list[int] = []
    done = threading.Event()
    broken: list[str] = []

    def hammer() -> None:
        while not done.is_set():
            try:
                reads.append(len(numbers(file.path)))
            except (ValueError, OSError) as error:
                broken.append(repr(error))

    reader = threading.Thread(target=hammer)
    reader.start()
    wait_for(lambda: reads, "the first read")
    for number in range(80):
        file.append([json.dumps({"number": number, "padding": "x" * 300})] * 5)
        wait_for(lambda: len(reads) + len(broken) > number, "a read of it")  # noqa: B023 - called at once
    done.set()
    reader.join()
    file.close()
    assert not broken
    assert len(numbers(file.path)) == 400
    assert len(reads) > 80
    assert reads == sorted(reads), "nothing that was there goes away again"


KILLED = """
import json, sys
from pathlib import Path
from orchestrator.gpu.recording.files import JsonArrayFile
file = JsonArrayFile(Path(sys.argv[1]))
number = 0
while True:
    file.append([json.dumps({"n": number + i, "pad": "y" * 700}) for i in range(20)])
    number += 20
    print(number, flush=True)
"""


@pytest.mark.parametrize("appends", [1, 4, 9])
def test_a_killed_recording_leaves_a_whole_file(tmp_path: Path, appends: int) -> None:
    path = tmp_path / "gpu_stats_x.json"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = 0
        for _ in range(appends):
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    entries = [entry["n"] for entry in json.loads(path.read_bytes())]
    assert entries == list(range(len(entries)))
    assert len(entries) >= said, "what was appended is there"
    assert len(list(tmp_path.iterdir())) > 1, "the hidden copy is left over"
    JsonArrayFile(tmp_path / "gpu_stats_y.json").close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["gpu_stats_x.json", "gpu_stats_y.json"]


def test_a_full_disk_loses_the_new_elements_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonArrayFile(tmp_path / "a.json")
    file.append(["1"])
    real = os.pwrite

    def short(descriptor: int, data: bytes, offset: int) -> int:
        return real(descriptor, data[: len(data) // 2] if len(data) > 3 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    with pytest.raises(OSError, match="No space left"):
        file.append(["2222222222"])
    assert numbers(file.path) == [1]
    monkeypatch.setattr(os, "pwrite", real)
    file.append(["3"])
    file.append(["4"])
    file.close()
    assert numbers(file.path) == [1, 3, 4]


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("precious")
    with pytest.raises(FileExistsError):
        JsonArrayFile(tmp_path / "a.json")
    with pytest.raises(FileExistsError):
        LineFile(tmp_path / "a.json", "header")
    assert (tmp_path / "a.json").read_text() == "precious"


def test_lines_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "a.csv", "a,b")
    file.append(["1,2", "3,4"])
    file.append([])
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:3], offset))
    with pytest.raises(OSError, match="No space left"):
        file.append(["5,6"])
    monkeypatch.setattr(os, "pwrite", real)
    file.append(["7,8"])
    file.close()
    file.close()
    assert file.path.read_text() == "a,b\n1,2\n3,4\n7,8\n"
