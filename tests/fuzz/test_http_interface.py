"""A short form of the fuzzing of the HTTP interface."""

from __future__ import annotations

import pytest

SEED = 20_261_124
EXAMPLES = 4


@pytest.mark.filterwarnings("ignore")  # of schemathesis and of its dependencies
def test_the_interface_answers_as_its_document_says() -> None:
    from tests.fuzz.http_interface import findings  # its imports take a second

    statuses, wrong = findings(number=SEED, examples=EXAMPLES)
    assert wrong == []
    assert len(statuses) > 20
    answered = sum((counts for counts in statuses.values()), start=type(next(iter(statuses.values())))())
    assert answered[200] > 20, "too few requests came so far as to be carried out"
    assert answered[400] > 20, "too few requests were wrong"
