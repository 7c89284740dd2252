"""Why a job is out of balance: what the numbers tell, and nothing more."""

from __future__ import annotations

import pytest

from orchestrator.gpu.balance.balance import GpuLoad, balance
from orchestrator.gpu.balance.diagnosis import Cause, Finding, RankView, diagnose
from orchestrator.gpu.sample import Throttle


def view(rank: int, utilization: float | None = 1.0, power: float = 500.0, **more: object) -> RankView:
    load = None if utilization is None else GpuLoad(utilization=utilization, memory=10e9, power=power)
    return RankView(rank=rank, gpu_uuid=f"g{rank}", **{"load": load, **more})  # type: ignore[arg-type]  # test's shorthand


def find(*views: RankView) -> tuple[Finding, ...]:
    return diagnose(views, balance({one.gpu_uuid: one.load for one in views}))


def test_a_balanced_job_has_no_findings() -> None:
    assert find(*(view(rank, step_seconds=0.1) for rank in range(4))) == ()


def test_a_straggler_is_named_with_its_factor() -> None:
    views = [view(rank, power=300.0, step_seconds=0.2, own_seconds=0.1) for rank in range(3)]
    findings = find(*views, view(3, power=600.0, step_seconds=0.2, own_seconds=0.18))
    assert [(one.cause, one.rank) for one in findings] == [(Cause.STRAGGLER, 3)]
    assert findings[0].factor == pytest.approx(1.8)
    assert "1.8 times" in findings[0].text


def test_ranks_out_of_step_are_told_apart_by_their_steps() -> None:
    findings = find(view(0, step_seconds=0.1), view(1, step_seconds=0.2))
    assert [(one.cause, one.rank, one.factor) for one in findings] == [(Cause.STRAGGLER, 1, 2.0)]


def test_a_rank_with_two_gpus_counts_once() -> None:
    two = [view(0, step_seconds=0.1), view(0, step_seconds=0.1), view(1, step_seconds=0.2)]
    assert [(one.cause, one.rank) for one in find(*two)] == [(Cause.STRAGGLER, 1)]


def test_throttling_says_which_reason_and_what_to_do() -> None:
    findings = find(view(0), view(1, throttle=(Throttle.CLOCK_SETTING, Throttle.HARDWARE_THERMAL)))
    assert [(one.cause, one.rank) for one in findings] == [(Cause.THROTTLED, 1)]
    assert "hardware thermal" in findings[0].text
    assert "cooler" in findings[0].advice


def test_clock_settings_are_no_reason_to_worry() -> None:
    assert find(view(0, throttle=(Throttle.CLOCK_SETTING,)), view(1)) == ()


@pytest.mark.parametrize(
    "reason", [one for one in Throttle if one not in {Throttle.CLOCK_SETTING, Throttle.SYNC_BOOST}]
)
def test_every_harmful_reason_has_advice(reason: Throttle) -> None:
    assert find(view(0), view(1, throttle=(reason,)))[0].advice


def test_a_foreign_process_is_named() -> None:
    findings = find(view(0), view(1, foreign_pids=(4711,)))
    assert findings[0].cause is Cause.FOREIGN_PROCESS
    assert "4711" in findings[0].text


def test_starved_input_needs_the_scripts_own_times() -> None:
    findings = find(view(0, step_seconds=0.1, data_seconds=0.05), view(1, step_seconds=0.1, data_seconds=0.01))
    assert [(one.cause, one.rank, one.factor) for one in findings] == [(Cause.STARVED_INPUT, 0, 0.5)]


def test_a_silent_gpu_comes_first() -> None:
    findings = find(view(0, None), view(1), view(2, throttle=(Throttle.THERMAL,)))
    assert [one.cause for one in findings] == [Cause.SILENT_GPU, Cause.THROTTLED]


def test_without_step_times_power_tells_whom_the_others_wait_for() -> None:
    findings = find(view(0, power=300.0), view(1, power=650.0), view(2, power=310.0))
    assert [(one.cause, one.rank) for one in findings] == [(Cause.WAITING, 1)]


def test_idle_gpus_are_not_called_waiting() -> None:
    findings = find(view(0, 0.2, power=150.0), view(1, 0.9, power=650.0))
    assert [one.cause for one in findings] == [Cause.UNKNOWN]


def test_uneven_memory() -> None:
    ranks = [
        RankView(rank=rank, gpu_uuid=f"g{rank}", load=GpuLoad(utilization=1.0, memory=memory, power=500.0))
        for rank, memory in enumerate((10e9, 30e9))
    ]
    assert [one.cause for one in find(*ranks)] == [Cause.UNEVEN_MEMORY]


def test_an_unexplained_imbalance_gets_the_bands_advice() -> None:
    (finding,) = find(view(0, 0.9, power=500.0), view(1, 0.3, power=500.0))
    assert finding.cause is Cause.UNKNOWN
    assert "split over the ranks" in finding.advice
