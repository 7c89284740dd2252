"""Reading a progress page that a script has written: no content raises, and no unusable value passes."""

import json
import math
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.core.codec import misfits, to_plain
from orchestrator.train.script import progress as layout
from orchestrator.train.script import progress_reading as reading
from orchestrator.train.script.progress_reading import CheckpointFacts, PageReader, ProgressSnapshot
from tests.support.pages import BothSides

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(
    st.sampled_from(sorted(CheckpointFacts.__struct_fields__)) | st.text(max_size=8), JSON, max_size=8
)
ANY_TIMES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def page(tmp_path):
    """Yield the actor's end of the page."""
    page = PageReader.create(tmp_path / "page")
    yield page
    page.close()


@pytest.fixture
def rank(page):
    """Yield the script's end of the page."""
    rank = BothSides.open(page.path)
    yield rank
    rank.close()


def put(page, slots, payload):
    """Write ``payload`` to the page as a whole record."""
    content = bytearray(page.path.read_bytes())
    slots.publish(content, slots.last_counter(content) + 1, payload)
    with page.path.open("r+b") as file:
        file.write(content)


def usable(snapshot):
    assert misfits(structs.replace(snapshot, metrics={})) == ()
    json.dumps({k: v for k, v in to_plain(snapshot).items() if k != "metrics"}, allow_nan=False)
    return snapshot


@ANY_TIMES
@given(body=BODIES)
def test_facts_of_any_json_are_read(page, body):
    put(page, layout.FACTS, json.dumps(body).encode()[: layout.FACTS.capacity])
    usable(page.read())


@ANY_TIMES
@given(raw=st.binary(max_size=400))
def test_records_of_any_bytes_are_read(page, raw):
    put(page, layout.FACTS, raw)
    put(page, layout.HOT, raw)
    usable(page.read())


@ANY_TIMES
@given(
    counts=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=11, max_size=11),
    numbers=st.lists(st.floats(), min_size=11, max_size=11),
    lengths=st.tuples(st.integers(0, 65535), st.integers(0, 65535)),
    ring=st.binary(min_size=layout.RECENT.size, max_size=layout.RECENT.size),
    tail=st.binary(max_size=300),
)
def test_reports_of_any_numbers_are_read(page, counts, numbers, lengths, ring, tail):
    fixed = layout.HOT_FIXED.pack(*counts, *numbers, *lengths)
    put(page, layout.HOT, fixed + ring + tail)
    usable(page.read())


@ANY_TIMES
@given(content=st.binary(max_size=200), size=st.integers(0, 2 * layout.PAGE_BYTES))
def test_files_of_any_bytes_and_size_are_read(page, content, size):
    os.truncate(page.path, 0)
    page.path.write_bytes(content)
    os.truncate(page.path, size)
    usable(page.read())


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"saved_at": [1]}, "checkpoint.saved_at"),
        ({"saved_at": math.inf}, "checkpoint.saved_at"),
        ({"quarantined": [[1]]}, "checkpoint.quarantined"),
        ({"quarantined": 7}, "checkpoint.quarantined"),
        ({"saved_step": "12"}, "checkpoint.saved_step"),
        ({"saved_step": True}, "checkpoint.saved_step"),
        ({"saved_step": -1}, "checkpoint.saved_step"),
        ({"saved_path": "x" * 2000}, "checkpoint.saved_path"),
    ],
)
def test_a_fact_that_cannot_be_used_is_left_out_and_named(page, body, name):
    put(page, layout.FACTS, json.dumps({"failed_saves": 3, **body}).encode())
    seen = page.read()
    assert seen.unusable == (name,)
    assert seen.checkpoint == CheckpointFacts(failed_saves=3)


@pytest.mark.parametrize("raw", [b"[" * 3000, b"null", b"{", b"\xff", b'{"saved_step": ' + b"9" * 3000 + b"}"])
def test_facts_that_are_no_object_are_left_out(page, raw):
    put(page, layout.FACTS, raw)
    assert page.read().unusable
    assert page.read().checkpoint == CheckpointFacts()


def test_an_infinite_epoch_is_left_out_and_the_rest_is_kept(page, rank):
    rank.write(step=3, epoch=math.inf, metrics={"loss": math.nan})
    seen = page.read()
    assert (seen.step, seen.epoch, seen.unusable) == (3, None, ("epoch",))
    assert math.isnan(seen.metrics["loss"])


def test_names_that_would_steer_a_terminal_are_left_out(page, rank):
    rank.write(step=1, metrics={"loss": 1.0, "a\x1b[31m": 2.0, "b\u202e": 3.0, "c\nd": 4.0, "half\udcff": 5.0})
    seen = page.read()
    assert (sorted(seen.metrics), seen.unusable) == (["half?", "loss"], ("metrics",))


def test_a_page_that_is_truncated_does_not_end_its_reader(page, rank):
    """A mapping would: reading beyond the end of a mapped file raises SIGBUS."""
    rank.write(step=5)
    assert page.read().step == 5
    os.truncate(page.path, 0)
    seen = page.read()
    assert (seen.step, seen.unusable) == (5, ("page",))
    page.request_stop()
    assert page.read().unusable == ("page",)


def test_a_page_that_is_removed_or_replaced_is_read_as_it_was(page, rank):
    rank.write(step=5)
    page.path.unlink()
    os.mkfifo(page.path)
    assert page.read().step == 5


def test_a_page_that_is_damaged_keeps_what_was_read_before(page, rank):
    rank.write(step=1)
    assert page.read().step == 1
    content = bytearray(page.path.read_bytes())
    for slot in (0, 1):
        content[
            layout.HOT.offset + slot * layout.HOT.slot_bytes : layout.HOT.offset + slot * layout.HOT.slot_bytes + 60
        ] = b"\7" * 60
    with page.path.open("r+b") as file:
        file.write(content)
    seen = page.read()
    assert (seen.step, seen.unusable) == (1, ("page",))


def test_the_layout_names_every_field():
    named = {*reading._COUNTS, *reading._NUMBERS} - {"recorded"}
    others = {"writer_pid", "checkpoint", "stop_requested", "stop_seen", "unusable", "guessed"}
    assert named | others | {"recent_step_seconds", "phase", "metrics"} == set(ProgressSnapshot.__struct_fields__)


def test_what_a_well_behaved_script_writes_is_all_usable(page, rank):
    rank.claim()
    rank.write(
        step=2**62, total_steps=2**63 - 1, epoch=0.5, phase="train", samples=0, tokens=1, metrics={"a b/c": 1e300}
    )
    rank.write_facts(
        {
            "saved_step": 1,
            "saved_at": time.time(),
            "saved_path": "/" + "p" * 3000,
            "failure": "f" * 3000,
            "quarantined": ("q" * 3000,) * 9,
            "interval_reason": "r" * 900,
            "snapshots_off": "s" * 900,
        }
    )
    assert usable(page.read()).unusable == ()
