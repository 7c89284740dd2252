"""A preemption waits for a checkpoint that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.outlook import outlook_of
from orchestrator.core.scheduler.preemption import IMMINENT_SECONDS, LATE_SECONDS, RECORDED
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.stored import job_from_dict, job_to_dict
from tests.unit.core.builders import T0, after, checkpoint, make_spec, node, nodes, pending, running

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NODES = nodes(node("a", gpus=8))
EVERY = 300.0
SAVED = T0 + 1000
URGENT = pending(make_spec(workers=4, priority=60), sequence=9, job_id="urgent")


def saving(*, every: float = EVERY) -> Job:
    """Return a job that has saved twice, the last time at SAVED."""
    job = running(pending(make_spec(workers=8), job_id="low"), nodes=("a",) * 8)
    first = after(job, checkpoint(job, 5, path="/c/5", at=SAVED - every))
    return after(first, checkpoint(first, 6, path="/c/6", at=SAVED))


def ask(*jobs: Job, now: float) -> Commands:
    return decide(State(jobs={job.id: job for job in jobs}, nodes=NODES), now)


def stopped(commands: Commands) -> list[str]:
    return [event.job_id for event in commands.events if isinstance(event, ev.StopRequested)]


def test_the_next_checkpoint_is_expected_as_long_after_the_last_as_that_came_after_the_one_before() -> None:
    job = saving()
    assert job.checkpoints.durable_every == EVERY
    assert RECORDED.next_at(job, SAVED) == SAVED + EVERY + LATE_SECONDS
    assert job_from_dict(job_to_dict(job)).checkpoints == job.checkpoints
    first = after(running(), checkpoint(running(), 5, path="/c/5", at=T0 + 90))
    assert first.checkpoints.durable_every is None
    began = first.attempts[-1].running_at
    assert began is not None
    every = T0 + 90 - began
    assert RECORDED.next_at(first, T0 + 100) == T0 + 90 + every + every / 10, "as long again as the first one took"
    assert RECORDED.next_at(running(), T0 + 100) is None


def test_a_stop_waits_for_a_checkpoint_that_is_due_within_a_minute() -> None:
    due = SAVED + EVERY + LATE_SECONDS
    near = due - IMMINENT_SECONDS + 1
    commands = ask(saving(), URGENT, now=near)
    assert (stopped(commands), commands.wake_at) == ([], due)
    victims = outlook_of(JobId("urgent"), State(jobs={j.id: j for j in (saving(), URGENT)}, nodes=NODES), near).stops
    assert [one.job.id for one in victims] == ["low"], "and who will stop is told"
    saved = after(saving(), checkpoint(saving(), 7, path="/c/7", at=near + 20))
    assert stopped(ask(saved, URGENT, now=near + 20)) == ["low"]


def test_a_stop_waits_for_no_longer_than_that() -> None:
    due = SAVED + EVERY + LATE_SECONDS
    assert stopped(ask(saving(), URGENT, now=due - IMMINENT_SECONDS - 1)) == ["low"], "it is too far away"
    assert stopped(ask(saving(), URGENT, now=due)) == ["low"], "it has not come"
    assert stopped(ask(saving(every=40.0), URGENT, now=SAVED + 10)) == ["low"], "the last one is nearer"
