"""The table of queues: all errors are reported at once."""

from __future__ import annotations

import pytest

from orchestrator.spec.queues import QueueSpec, guarantee, parse_queues


def test_a_table_is_read() -> None:
    assert parse_queues("lab guaranteed=8 maximum=16; vision parent=lab weight=2.5 ;") == (
        QueueSpec(name="lab", guaranteed=8, maximum=16),
        QueueSpec(name="vision", parent="lab", weight=2.5),
    )
    assert parse_queues("") == ()


def test_every_error_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="queue") as caught:
        parse_queues("Lab; a guaranteed=x; b maximum=1 guaranteed=2; c parent=gone; d weight=0; e what=1; a")
    for part in (
        "queue 'Lab': a name has",
        "queue 'a': guaranteed=x is not a whole number of GPUs",
        "queue 'b': guaranteed=2 is more than maximum=1",
        "queue 'c': its parent 'gone' is not a queue",
        "queue 'd': weight=0 is not above 0",
        "queue 'e': 'what=1' is not parent=, guaranteed=, maximum= or weight=",
        "queue 'a' is there twice",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a parent=b; b parent=a", "a parent below itself"),
        ("a maximum=3; b parent=a guaranteed=2; c parent=a guaranteed=2", "guaranteed 4 GPUs, more than its maximum=3"),
        ("default; b parent=default", "no queue can be below it"),
        ("a guaranteed=9999999", "is not from 0 to 1000000"),
        ("a maximum=9999999", "is not from 0 to 1000000"),
        ("a weight=x", "weight=x is not a number"),
        ("; ".join(f"q{n} parent=q{n + 1}" for n in range(9)) + "; q9", "more than 8 levels"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_queues(text)


def test_a_parent_is_guaranteed_what_its_queues_are() -> None:
    table = parse_queues("a guaranteed=1; b parent=a guaranteed=2; c parent=a guaranteed=3")
    assert guarantee(table[0], table) == 5
