"""Fuzzes one reader with Hypothesis, for a time or for a number of inputs of a seed. An input that is a defect is kept."""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.inputs import inputs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fuzz.reader import Reader

BATCH = 400


@dataclass(frozen=True, slots=True)
class Defect:
    """An input on which a reader raised, shortened by Hypothesis."""

    reader: str
    data: bytes
    error: str

    def keep(self, corpus: Path) -> Path:
        """Write the input into the corpus, which the tests try."""
        corpus.mkdir(parents=True, exist_ok=True)
        path = corpus / hashlib.sha256(self.data).hexdigest()[:12]
        path.write_bytes(self.data)
        return path


def fuzz(reader: Reader, *, number: int, examples: int) -> Defect | None:
    """Try a number of inputs of the seed ``number``; return the defect that they found."""
    last: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(reader.seeds()))
    def read(data: bytes) -> None:
        last[:] = [data]
        reader.read(data)

    try:
        read()
    except Exception as error:  # the defect that fuzzing searches for
        return Defect(reader.name, last[0], f"{type(error).__name__}: {error}"[:500])
    return None


def fuzz_for(reader: Reader, seconds: float, *, first: int) -> tuple[int, Defect | None]:
    """Try batches of inputs until the time is over or a defect is found; return the number of inputs, and the defect."""
    deadline = time.monotonic() + seconds
    for number in itertools.count(first):
        found = fuzz(reader, number=number, examples=BATCH)
        tried = (number - first + 1) * BATCH
        if found or time.monotonic() >= deadline:
            return tried, found
    raise AssertionError("the count ends")
