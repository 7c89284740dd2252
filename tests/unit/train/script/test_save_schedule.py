"""The times of saves: the same decision on every rank."""

import itertools
import time

import pytest

from orchestrator.train.script.agreement import ShmAgreement
from orchestrator.train.script.save_schedule import IntervalSetting, IntervalSettingError, SaveSchedule, parse_interval


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def boards(tmp_path):
    made = [ShmAgreement(tmp_path, "run") for _ in range(3)]
    yield made
    for board in made:
        board.close()


def schedule(setting, rank=0, board=None):
    return SaveSchedule(setting, rank=rank, board=board, recovery_seconds=0.5, failure_seconds=50.0)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("", IntervalSetting()),
        ("auto", IntervalSetting()),
        ("100", IntervalSetting(steps=100)),
        ("30s", IntervalSetting(seconds=30.0)),
        ("0.5s", IntervalSetting(seconds=0.5)),
    ],
)
def test_settings(text, setting):
    assert parse_interval(text) == setting


@pytest.mark.parametrize("text", ["0", "-1", "5m", "often", "1.5", "0s", "s"])
def test_settings_that_are_none(text):
    with pytest.raises(IntervalSettingError, match="use 'auto', a number of steps such as 100, or a time"):
        parse_interval(text)


def test_every_so_many_steps():
    alone = schedule(IntervalSetting(steps=3))
    assert [step for step in range(1, 12) if alone.is_due(step)] == [1, 4, 7, 10]


def test_steps_that_are_jumped_over_are_made_up_for():
    alone = schedule(IntervalSetting(steps=10))
    assert [step for step in (7, 14, 18, 21, 40) if alone.is_due(step)] == [7, 18, 40]


def run(schedule, clock, steps, step_seconds, save_seconds):
    """Drive a training loop of one rank on a separate clock; return the steps that were saved, and their times."""
    due = []
    for step in steps:
        clock[0] += step_seconds
        if schedule.is_due(step):
            due.append((step, round(clock[0], 6)))
            schedule.saved(stall_seconds=save_seconds, cost_seconds=save_seconds)
            clock[0] += save_seconds
    return due


def gaps(due):
    return [round(later - earlier, 6) for (_, earlier), (_, later) in itertools.pairwise(due)]


def test_so_often_in_time(clock):
    due = run(schedule(IntervalSetting(seconds=10.0)), clock, range(1, 60), 2.0, 1.0)
    assert due[0][0] == 1
    assert all(9.0 <= gap <= 11.0 for gap in gaps(due))


def test_a_time_is_kept_when_steps_become_slower(clock):
    alone = schedule(IntervalSetting(seconds=10.0))
    run(alone, clock, range(1, 500), 0.01, 0.0)
    due = run(alone, clock, range(500, 540), 3.0, 0.0)
    assert all(gap <= 12.0 for gap in gaps(due))
    assert len(due) >= 9


def test_automatic_follows_from_what_was_measured(clock):
    alone = schedule(IntervalSetting())
    due = run(alone, clock, range(1, 300), 0.1, 0.01)
    assert due[0][0] == 1
    assert gaps(due)
    assert all(0.99 <= gap <= 1.12 for gap in gaps(due))  # sqrt(2 * 50 * 0.01) = 1 s
    assert "every 10 steps" in alone.choice.reason


def test_automatic_saves_every_step_where_that_is_best(clock):
    due = run(schedule(IntervalSetting()), clock, range(1, 10), 5.0, 0.0001)
    assert [step for step, _ in due] == list(range(1, 10))


def in_step(schedules, steps, order, clock):
    """Drive ranks as collectives would: none asks about a step before all have asked about the one before."""
    answers = []
    for step in steps:
        clock[0] += 0.1
        found = {}
        for rank in order(step):
            found[rank] = schedules[rank].is_due(step)
            if found[rank]:
                schedules[rank].saved(stall_seconds=0.0, cost_seconds=0.01)
        answers.append([found[rank] for rank in sorted(found)])
    return answers


@pytest.mark.parametrize(
    "setting",
    [
        IntervalSetting(),
        IntervalSetting(steps=1),
        IntervalSetting(steps=4),
        IntervalSetting(seconds=0.1),
        IntervalSetting(seconds=0.5),
    ],
)
@pytest.mark.parametrize(
    "order", [lambda _: (0, 1, 2), lambda _: (2, 1, 0), lambda step: [(1, 0, 2), (2, 0, 1)][step % 2]]
)
def test_all_ranks_answer_alike_whoever_asks_first(boards, clock, setting, order):
    ranks = [schedule(setting, rank=rank, board=board) for rank, board in enumerate(boards)]
    answers = in_step(ranks, range(1, 100), order, clock)
    assert {len(set(answer)) for answer in answers} == {1}
    saved = [step for step, answer in enumerate(answers, start=1) if answer[0]]
    expected = {None: 10, 1: 1, 4: 4, 0.1: 1, 0.5: 5}[setting.steps or setting.seconds]
    assert saved[0] == 2  # announced one step ahead to all ranks
    assert {later - earlier for earlier, later in itertools.pairwise(saved[1:])} == {expected}


def test_a_new_run_starts_afresh(tmp_path):
    first, second = ShmAgreement(tmp_path, "run1"), ShmAgreement(tmp_path, "run2")
    first.publish_save(last=4, upcoming=4)
    first.propose_stop(1)
    assert not second.saves_at(4)
    assert second.stop_call is None
    assert [path.name for path in tmp_path.iterdir()] == ["board-run2"]
    first.close()
    second.close()
