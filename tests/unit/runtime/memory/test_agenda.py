"""The clock of the in-memory runtime moves when a test moves it, and runs due actions in order."""

from __future__ import annotations

from orchestrator.runtime.memory.cluster import Agenda


def test_actions_run_in_the_order_of_their_times_and_of_their_entry() -> None:
    agenda, ran = Agenda(10.0), list[str]()
    agenda.after(2.0, lambda: ran.append("late"))
    agenda.after(1.0, lambda: ran.append("first"))
    agenda.after(1.0, lambda: ran.append("second"))
    agenda.at(3.0, lambda: ran.append("overdue"))
    assert agenda.run_until(11.0) == 3
    assert (ran, agenda.now, agenda.next_at) == (["overdue", "first", "second"], 11.0, 12.0)


def test_an_action_sees_the_time_that_it_was_entered_for() -> None:
    agenda, seen = Agenda(0.0), list[float]()
    agenda.at(5.0, lambda: seen.append(agenda.now))
    assert agenda.step(until=100.0)
    assert seen == [5.0]
    assert not agenda.step(until=100.0)
    assert agenda.now == 5.0, "only what happens moves it"


def test_an_action_that_was_cancelled_is_not_run() -> None:
    agenda, ran = Agenda(0.0), list[str]()
    entry = agenda.after(1.0, lambda: ran.append("cancelled"))
    agenda.after(2.0, lambda: ran.append("kept"))
    entry.cancel()
    assert agenda.next_at == 2.0
    agenda.run_until(3.0)
    assert ran == ["kept"]
