"""The progress page: written values are read back, and a half-written record is never seen."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from orchestrator.train.script import progress as layout
from orchestrator.train.script.progress import ProgressPageError
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.support.pages import BothSides

HAMMER = """
import sys
from orchestrator.train.script.progress import ProgressPage
page = ProgressPage.open(sys.argv[1])
page.claim()
print("ready", flush=True)
step = 0
while True:
    step += 1
    name = "x" * (step % 40 + 1)
    page.write(step=step, samples=step, tokens=step, epoch=step, metrics={"a": step, "b": step}, phase=name)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank-0.page"


@pytest.fixture
def page(path):
    page = BothSides.create(path)
    yield page
    page.close()


@pytest.fixture
def rank(path, page):
    """Yield the rank's mapping of the page that the actor made."""
    rank = BothSides.open(path)
    yield rank
    rank.close()


def test_a_full_report_comes_through(page, rank):
    before = time.time()
    rank.claim()
    rank.write(
        step=7,
        total_steps=100,
        epoch=1.5,
        phase="train",
        samples=640,
        tokens=9000,
        metrics={"loss": 0.25, "größe": 3.0},
    )
    seen = page.read()
    assert (seen.step, seen.max_step, seen.total_steps, seen.epoch, seen.phase) == (7, 7, 100, 1.5, "train")
    assert (seen.samples, seen.tokens, seen.metrics) == (640, 9000, {"loss": 0.25, "größe": 3.0})
    assert (seen.writer_pid, seen.steps_reported, seen.new_step) == (os.getpid(), 1, 7)
    assert before <= seen.first_step_at == seen.new_step_at == seen.last_step_at == seen.last_report_at <= time.time()


def test_what_a_report_leaves_out_keeps_its_last_value(page, rank):
    rank.write(
        step=1, total_steps=9, epoch=2, samples=5, tokens=6, phase="train", metrics={"loss": 1.0, "accuracy": 0.5}
    )
    rank.write(step=2, metrics={"loss": math.inf})
    seen = page.read()
    assert (seen.step, seen.total_steps, seen.epoch, seen.samples, seen.tokens, seen.phase) == (2, 9, 2, 5, 6, "train")
    assert seen.metrics == {"loss": math.inf, "accuracy": 0.5}


def test_the_first_new_step_is_the_first_above_the_previous_one(path, page):
    rank = BothSides.open(path, previous_step=10)
    for step in (9, 10):
        rank.write(step=step)
    assert (page.read().new_step, page.read().new_step_at) == (None, None)
    rank.write(step=12)
    rank.write(step=13)
    seen = page.read()
    assert seen.new_step == 12
    assert seen.first_step_at < seen.new_step_at < seen.last_step_at
    rank.close()


def test_a_step_that_goes_back_is_shown_but_is_no_progress(page, rank):
    for step in (5, 6):
        rank.write(step=step)
    before = page.read()
    rank.write(step=1)
    after = page.read()
    assert (after.step, after.max_step, after.steps_reported) == (1, 6, 2)
    assert after.last_step_at == before.last_step_at
    assert after.last_report_at > before.last_report_at
    assert after.recent_step_seconds == before.recent_step_seconds


def test_step_durations_are_measured_per_step_and_kept_in_order(page, rank, monkeypatch):
    clock = iter([0.0, 2.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for step in (1, 2, 4):
        rank.write(step=step)
    assert page.read().recent_step_seconds == (2.0, 3.0)
    assert page.read().step_seconds == pytest.approx(2.0 + 0.1 * (3.0 - 2.0))


def test_processor_time_of_a_step_is_that_of_the_thread_that_reports_without_what_a_save_used(page, rank, monkeypatch):
    used = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    for step, seconds in enumerate((0.0, 2.0, 5.0), start=1):
        used[0] = seconds
        rank.write(step=step)
    assert page.read().busy_seconds == pytest.approx(2.0 + 0.1 * (3.0 - 2.0))
    used[0] = 6.0
    rank.write_saved(1.0, snapshot_step=3)
    used[0] = 8.1
    rank.write(step=4)
    other = threading.Thread(target=rank.write, kwargs={"step": 5})
    other.start()
    other.join()
    assert page.read().busy_seconds == pytest.approx(2.1)


def test_neither_a_change_of_phase_nor_a_save_counts_as_step_time(page, rank, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rank.write(step=1, phase="train")
    now[0] = 100.0
    rank.write(step=2, phase="evaluate")  # the time since step 1 may include other work
    now[0] = 101.0
    rank.write_saving()
    assert page.read().saving_since > 0
    now[0] = 150.0
    rank.write_saved(49.0)
    now[0] = 152.0
    rank.write(step=3)
    assert page.read().saving_since is None
    assert page.read().recent_step_seconds == (3.0,)


def test_metrics_beyond_the_caps_are_dropped_and_counted(page, rank):
    many = {f"m{n}": float(n) for n in range(layout.MAX_METRICS + 3)}
    rank.write(step=1, metrics={**many, "n" * 65: 1.0})
    seen = page.read()
    assert seen.metrics == {f"m{n}": float(n) for n in range(layout.MAX_METRICS)}
    assert seen.metrics_dropped == 4


def test_the_longest_names_and_phase_still_fit(page, rank):
    names = {f"{n:03d}" + "é" * 30: float(n) for n in range(layout.MAX_METRICS)}
    rank.write(step=1, phase="é" * 100, metrics=names)
    seen = page.read()
    kept = len(seen.metrics)
    assert seen.metrics == dict(list(names.items())[:kept])
    assert kept + seen.metrics_dropped == layout.MAX_METRICS
    assert kept >= 40
    assert seen.phase == "é" * 16


def test_checkpoint_facts_come_through_and_long_texts_are_cut(page, rank):
    facts = {
        "saved_step": 3,
        "saved_at": 1.5,
        "saved_path": "/p/step",
        "saved_bytes": 9,
        "failed_saves": 2,
        "failure": "x",
        "failed_at": 2.0,
        "resumed_step": 1,
        "resumed_path": "/p/old",
        "resumed_seconds": 0.25,
        "quarantined": ("a: torn",),
    }
    rank.write_facts(facts)
    assert page.read().checkpoint == CheckpointFacts(**facts)
    rank.write_facts({"saved_path": "\0" * 5000, "failure": "\0" * 5000, "quarantined": ("\0" * 5000,) * 9})
    cut = page.read().checkpoint
    assert 0 < len(cut.saved_path) < 5000
    assert 0 < len(cut.failure) < 5000


def test_the_request_to_stop_travels_both_ways(page, rank):
    assert not rank.stop_requested
    page.request_stop()
    assert rank.stop_requested
    assert (page.read().stop_requested, page.read().stop_seen) == (True, False)
    rank.mark_stop_seen()
    assert page.read().stop_seen


def test_a_damaged_newest_record_leaves_the_one_before(path, page, rank):
    rank.write(step=1)
    rank.write(step=2)
    content = bytearray(path.read_bytes())
    content[layout.HOT.offset + 40] ^= 1  # record 2 lies in slot 0
    path.write_bytes(content)
    assert page.read().step == 1


def test_a_torn_first_record_counts_as_nothing(path, page, rank):
    rank.write(step=1)
    content = bytearray(path.read_bytes())
    content[layout.HOT.offset + layout.HOT.slot_bytes + 40] ^= 1
    path.write_bytes(content)
    assert page.read().step is None


def test_damage_to_both_records_is_an_error_that_says_what_to_do(path, page, rank):
    rank.write(step=1)
    rank.write(step=2)
    content = bytearray(path.read_bytes())
    for slot in (0, 1):
        content[layout.HOT.offset + slot * layout.HOT.slot_bytes + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ProgressPageError, match="create the page anew"):
        page.read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the rank actor creates this file first"),
        (b"short", "is not a progress page"),
        (bytes(layout.PAGE_BYTES), "is not a progress page of version"),
    ],
)
def test_a_file_that_is_no_page_is_refused(path, content, message):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProgressPageError, match=message):
        BothSides.open(path)


def test_creating_replaces_what_an_earlier_process_left(path, page, rank):
    rank.write(step=5)
    fresh = BothSides.create(path)
    assert fresh.read() == ProgressSnapshot()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    fresh.close()


def test_a_live_writer_keeps_the_page_and_a_dead_one_loses_it(path, page, rank):
    other = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        assert not rank.claim()
        assert page.read().writer_pid == other.pid
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert rank.claim()
    assert page.read().writer_pid == os.getpid()


def test_no_torn_record_is_ever_seen_and_a_kill_leaves_the_last_one(path, page):
    """A real process writes without a pause, is killed at a random moment, and is followed by the next one."""
    for round_number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout.readline() == "ready\n"
            deadline = time.monotonic() + random.Random(round_number).uniform(0.05, 0.2)
            last, reads = 0, 0
            while time.monotonic() < deadline or reads < 50:
                seen = page.read()
                if seen.step is None or seen.writer_pid != writer.pid:
                    continue
                check_consistent(seen)
                last, reads = seen.step, reads + 1
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        final = page.read()
        check_consistent(final)
        assert final.step >= last


def check_consistent(seen):
    step = seen.step
    assert (seen.samples, seen.tokens, seen.epoch, seen.max_step) == (step, step, step, step)
    assert seen.metrics == {"a": step, "b": step}
    assert seen.phase == "x" * min(step % 40 + 1, layout.MAX_PHASE_BYTES)


def test_threads_may_report_at_once(page, rank):
    def report(name):
        for step in range(200):
            rank.write(step=step, metrics={name: step})

    threads = [threading.Thread(target=report, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.read().metrics == {f"t{n}": 199.0 for n in range(4)}
