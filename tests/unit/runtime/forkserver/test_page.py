"""The keeper reads from a page what the training process wrote there, and accepts nothing else."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import reports
from orchestrator.runtime.forkserver.reports import LastPage, read_last_page
from orchestrator.train.script import progress as layout
from orchestrator.train.script.progress import ProgressPage
from tests.support.pages import BothSides

NOW = 2_000_000_000.0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ProgressPage]:
    made = BothSides.create(tmp_path / "page")
    yield made
    made.close()


def test_its_layout_is_that_of_the_page() -> None:
    assert reports.PAGE_BYTES == layout.PAGE_BYTES
    assert reports.HEADER.format == layout.HEADER.format
    assert reports.EXPECTED_HEADER == (layout.MAGIC, layout.LAYOUT_VERSION, layout.PAGE_BYTES)
    assert (reports.STOP_SEEN_AT, reports.STOP_SEEN_TIME_AT) == (layout.STOP_SEEN_AT, layout.STOP_SEEN_TIME_AT)
    assert reports.STOP_SEEN_TIME.format == layout.STOP_SEEN_TIME.format
    hot = layout.HOT
    assert (hot.offset, hot.offset + hot.slot_bytes) == reports.HOT_OFFSETS
    assert hot.capacity == reports.HOT_CAPACITY


def test_a_blank_page_and_none_at_all_say_nothing(page: ProgressPage, tmp_path: Path) -> None:
    assert read_last_page(str(page.path), now=NOW) == LastPage()
    assert read_last_page(str(tmp_path / "missing"), now=NOW) == LastPage()
    assert read_last_page(None, now=NOW) == LastPage()


def test_it_tells_the_highest_step_the_total_and_when_the_loop_was_told_to_stop(page: ProgressPage) -> None:
    page.write(step=3, total_steps=60)
    page.write(step=11)
    page.write(step=2)
    before = time.time()
    page.mark_stop_seen()
    after = time.time()
    page.mark_stop_seen()
    last = read_last_page(str(page.path), now=NOW)
    assert (last.last_step, last.total_steps) == (11, 60)
    assert last.stop_seen_at is not None
    assert before <= last.stop_seen_at <= after, "the first time"


@pytest.mark.parametrize("told", [0.0, -1.0, float("nan"), float("inf"), NOW + 1])
def test_a_stop_at_no_possible_time_was_seen_by_now(page: ProgressPage, told: float) -> None:
    page.mark_stop_seen()
    with page.path.open("r+b") as file:
        file.seek(layout.STOP_SEEN_TIME_AT)
        file.write(struct.pack("<d", told))
    assert read_last_page(str(page.path), now=NOW).stop_seen_at == NOW


def test_a_torn_record_leaves_the_one_before(page: ProgressPage) -> None:
    page.write(step=4, total_steps=9)
    page.write(step=5)
    slot = layout.HOT.offset + (layout.HOT.last_counter(page._page) & 1) * layout.HOT.slot_bytes
    with page.path.open("r+b") as file:
        file.seek(slot + 40)
        file.write(b"\x01" * 8)
    last = read_last_page(str(page.path), now=NOW)
    assert (last.last_step, last.total_steps) == (4, 9)


def test_whatever_is_there_raises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page"
    noise = random.Random(7)
    for size in (0, 1, 15, layout.PAGE_BYTES - 1, layout.PAGE_BYTES, layout.PAGE_BYTES + 1):
        path.write_bytes(noise.randbytes(size))
        assert read_last_page(str(path), now=NOW) == LastPage()
    whole = bytearray(layout.HEADER.pack(layout.MAGIC, layout.LAYOUT_VERSION, layout.PAGE_BYTES))
    for _ in range(50):
        path.write_bytes(whole + noise.randbytes(layout.PAGE_BYTES - len(whole)))
        last = read_last_page(str(path), now=NOW)
        assert (last.last_step, last.total_steps) == (None, None)


def test_only_a_plain_file_of_that_name_is_read(page: ProgressPage, tmp_path: Path) -> None:
    page.write(step=4)
    (tmp_path / "link").symlink_to(page.path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        assert read_last_page(str(tmp_path / name), now=NOW) == LastPage()
