"""Each reader of foreign bytes: valid inputs, some inputs of a fixed seed, and each input that once was a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz.campaign import fuzz, fuzz_for
from tests.fuzz.reader import CORPUS, Reader
from tests.fuzz.readers import READERS

SEED = 20_261_124
EXAMPLES = 30
KEPT = [(reader, path) for reader in READERS.values() for path in reader.found()]


@pytest.mark.parametrize("name", READERS)
def test_the_inputs_that_fuzzing_begins_with_are_accepted(name: str) -> None:
    reader = READERS[name]
    assert [seed for seed in reader.seeds() if not reader.read(seed)] == []


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_any_bytes(name: str) -> None:
    assert fuzz(READERS[name], number=SEED, examples=EXAMPLES) is None


@pytest.mark.parametrize(("reader", "path"), KEPT, ids=[f"{reader.name}/{path.name}" for reader, path in KEPT])
def test_an_input_that_was_a_defect_is_none_any_more(reader: Reader, path: Path) -> None:
    reader.read(path.read_bytes())


def test_each_input_of_the_corpus_belongs_to_a_reader() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= set(READERS)
    assert KEPT


def _planted(data: bytes) -> bool:
    if b"\0" in data:
        raise KeyError("a planted defect")
    return True


def test_a_defect_is_found_made_short_and_kept(tmp_path: Path) -> None:
    reader = Reader("planted", _planted, lambda: [b'{"a": "long text"}'], ())
    found = fuzz(reader, number=1, examples=200)
    assert found is not None
    assert found.data == b"\0"
    assert "planted defect" in found.error
    assert found.keep(tmp_path / "corpus").read_bytes() == b"\0"
    tried, again = fuzz_for(reader, 60, first=1)
    assert again is not None
    assert tried > 0


def test_the_command_tells_what_it_has_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["--reader", "amd-metrics", "--seconds", "0.01", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "seed 3" in out
    assert "amd-metrics" in out
    assert "0 defects" in out
