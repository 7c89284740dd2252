"""Each reader of foreign bytes: valid inputs, some inputs of a fixed seed, and each input that once was a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import fuzz
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
