"""Sampling threads: deadlines that do not drift, and GPUs that hang or get lost without harming others."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from orchestrator.gpu.sample import Detail, GpuLostError, GpuReadError
from orchestrator.gpu.sampler import Details, Health, Pace, Reading, Sampler, SamplerGroup, Ticker
from tests.unit.gpu.support import ScriptedReader, wait_for

MakeReader = Callable[[str], ScriptedReader]
QUICK = Pace(retry_seconds=(0.01,))


def test_ticks_are_multiples_of_the_period_however_long_the_work_takes() -> None:
    ticker = Ticker(0.01, start=5.0)
    assert ticker.next(5.0) == (0, 5.0)
    assert ticker.next(5.004) == (1, pytest.approx(5.01))
    assert ticker.next(5.0199) == (2, pytest.approx(5.02)), "late by less than a period is done at once"
    assert ticker.missed == 0


def test_ticks_that_are_a_period_late_are_skipped_and_counted() -> None:
    ticker = Ticker(0.01, start=0.0)
    ticker.next(0.0)
    assert ticker.next(0.055) == (5, pytest.approx(0.05))
    assert ticker.missed == 4
    assert ticker.next(0.0551) == (6, pytest.approx(0.06))


def test_a_healthy_gpu_is_read_and_its_reader_closed_in_the_end(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    sampler = Sampler(reader, rate=100.0)
    with SamplerGroup([sampler]):
        assert sampler.health() in {Health.STARTING, Health.OK}
        wait_for(sampler.fresh, "the first sample")
        assert sampler.health() is Health.OK
    assert reader.closed.is_set()


def test_each_level_of_detail_has_its_own_pace() -> None:
    details, period = Details(Pace()), 0.005
    asked = [details.at(7.0 + tick * period, period) for tick in range(601)]
    full = [tick for tick, detail in enumerate(asked) if detail is Detail.FULL]
    assert full == [0, 200, 400, 600]
    assert [tick for tick, detail in enumerate(asked) if detail is not Detail.POWER] == list(range(0, 601, 20))


def test_a_failed_gpu_is_tried_again_after_growing_pauses() -> None:
    pace = Pace(retry_seconds=(1.0, 2.0))
    assert [pace.retry(failures) for failures in range(4)] == [1.0, 2.0, 2.0, 2.0]


def test_each_reading_asks_for_what_is_due(make_reader: MakeReader) -> None:
    readings: list[Reading] = []
    with SamplerGroup([Sampler(make_reader("GPU-a"), rate=200.0, on_reading=readings.append)]):
        wait_for(lambda: set(Detail) <= {one.detail for one in readings}, "a reading of each level")
    assert readings[0].detail is Detail.FULL


def test_a_hanging_gpu_goes_stale_and_harms_no_other(make_reader: MakeReader) -> None:
    hanging, fine = make_reader("GPU-a"), make_reader("GPU-b")
    samplers = [Sampler(reader, rate=100.0, stale_after=5.0) for reader in (hanging, fine)]
    group = SamplerGroup(samplers)
    with group:
        wait_for(lambda: all(one.fresh() for one in samplers), "both first samples")
        hanging.hang()
        before = fine.reads
        wait_for(lambda: fine.reads > before + 20, "the other GPU going on")
        later = time.monotonic() + 6.0
        assert samplers[0].health(later) is Health.STALE
        assert "has not answered for" in (samplers[0].trouble(later) or "")
        assert samplers[1].trouble() is None
        assert samplers[0].fresh(later) is None
        wait_for(lambda: fine.reads > before + 40, "the other GPU going on")
        hanging_uuids = group.stop(timeout=3.0)
    assert hanging_uuids == ("GPU-a",)
    assert not hanging.closed.is_set(), "its thread still uses it"
    hanging.release()
    assert hanging.closed.wait(300), "and closes it when the driver lets go"


def test_a_gpu_that_never_answers_is_stale_from_the_start(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    reader.hang()
    sampler = Sampler(reader, rate=10.0, stale_after=2.0)
    with SamplerGroup([sampler]):
        wait_for(lambda: reader.reads, "the first question")
        assert sampler.health() is Health.STARTING
        assert sampler.health(time.monotonic() + 3.0) is Health.STALE
        reader.release()


def test_a_lost_gpu_is_opened_again_until_it_is_back(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    sampler = Sampler(reader, rate=100.0, pace=QUICK)
    with SamplerGroup([sampler]):
        wait_for(sampler.fresh, "the first sample")
        reader.error = GpuLostError("gone")
        wait_for(lambda: sampler.health() is Health.LOST, "the loss")
        assert sampler.fresh() is None
        assert sampler.error == "gone"
        before = reader.reopened
        wait_for(lambda: reader.reopened > before + 2, "several tries")
        reader.error = None
        wait_for(lambda: sampler.health() is Health.OK, "its return")
        assert (sampler.error, sampler.failures) == (None, 0)


def test_a_failing_driver_and_a_bug_in_a_reader_are_both_survived(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    sampler = Sampler(reader, rate=100.0, pace=QUICK)
    with SamplerGroup([sampler]):
        reader.error = GpuReadError("no answer")
        wait_for(lambda: sampler.health() is Health.FAILING, "the failure")
        reader.error = ZeroDivisionError("bug")
        wait_for(lambda: sampler.error == "ZeroDivisionError in the GPU reader: bug", "the bug's name")
        reader.error = None
        wait_for(lambda: sampler.health() is Health.OK, "recovery")


def test_failed_readings_are_counted_since_the_start_and_since_the_last_sample(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    sampler = Sampler(reader, rate=100.0, pace=QUICK)
    with SamplerGroup([sampler]):
        reader.error = GpuReadError("no answer")
        wait_for(lambda: sampler.failures > 1, "failures")
        reader.error = None
        wait_for(lambda: not sampler.failures, "a sample")
        assert sampler.errors > 1


def test_stop_does_not_wait_for_the_next_tick(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    group = SamplerGroup([Sampler(reader, rate=0.001)])
    group.start()
    wait_for(lambda: reader.reads, "the first reading")
    assert group.stop(timeout=300) == (), "the next tick is in a quarter of an hour"
    assert reader.closed.is_set()
