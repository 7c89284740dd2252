"""Random events, and random histories of one job without the events that the rules refuse."""

from __future__ import annotations

import types
from enum import Enum
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.errors import CoreError
from orchestrator.core.facts import findings
from orchestrator.core.facts.codec import FACTS as FACTS_BY_KIND
from orchestrator.core.facts.fact import Fact, FactRecord
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import EndOrder, FailureClass, JobState, StopPurpose, StopScope
from tests.unit.core.builders import ID, T0, make_spec, pending, submission

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.job.record import Job

# Text as in a rank's log, with halves of surrogate pairs and control characters.
text = st.text(max_size=20)
lines = st.lists(text, max_size=3).map(tuple)
times = st.floats(min_value=T0, max_value=T0 + 1e6, allow_nan=False)
numbers = st.integers(min_value=1, max_value=3)
ranks = st.integers(min_value=0, max_value=2)
codes = st.none() | st.integers(min_value=0, max_value=255)
signals = st.none() | st.integers(min_value=1, max_value=31)
steps = st.integers(min_value=0, max_value=50)
maybe_times = st.none() | times
paths = st.sampled_from(["", "/ckpt/1", "/ckpt/2"])

seats = st.builds(
    ev.RankPlacement,
    rank=ranks,
    node_id=text,
    node_name=text,
    gpu_ids=lines,
    gpu_uuids=lines,
    actor_pid=st.integers(1, 9999),
)


def _value_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value that a field of a fact may have."""
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*(st.none() if part is type(None) else _value_of(part) for part in get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(_value_of(get_args(hint)[0]), max_size=2).map(tuple)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if issubclass(hint, Fact):
        return known_facts if hint is Fact else fact_of(hint)
    known = {str: text, int: st.integers(0, 10**6), float: st.floats(0, 1e9, allow_nan=False), bool: st.booleans()}
    return known[hint]


def fact_of(cls: type[FactRecord]) -> st.SearchStrategy[Fact]:
    """Return a strategy for any fact of a class."""
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: _value_of(hints[name]) for name in cls.__struct_fields__})


known_facts: st.SearchStrategy[Fact] = st.deferred(
    lambda: st.sampled_from(sorted(FACTS_BY_KIND)).flatmap(lambda kind: fact_of(FACTS_BY_KIND[kind]))
)
failures = st.builds(
    ev.Failure,
    failure_class=st.sampled_from(FailureClass),
    cause=known_facts,
    rank=st.none() | ranks,
    exit_code=codes,
    signal=signals,
    log_tail=lines,
    policy_note=st.none() | known_facts,
    refusal=st.none() | known_facts,
)
exits = st.builds(
    ev.Exit,
    at=times,
    rank=ranks,
    exit_code=codes,
    signal=signals,
    error_type=text,
    error_message=text,
    error_at=maybe_times,
    log_tail=lines,
    evidence=st.lists(known_facts, max_size=2).map(tuple),
    policy=st.sampled_from(["", "fail", "restart"]),
    policy_note=st.none() | known_facts,
    stop_seen_at=maybe_times,
    stop_scope=st.sampled_from([None, *StopScope]),
    last_step=st.none() | st.integers(0, 10),
    total_steps=st.none() | st.integers(0, 10),
    ordered=st.sampled_from([None, *EndOrder]),
)
common = {"job_id": st.just(ID), "at": times, "cause": text}

found = st.builds(
    findings.RankSlow, rank=st.none() | ranks, factor=st.just(2.0), seconds=st.just(2.0), usual_seconds=st.just(1.0)
)

FACTS: dict[type[ev.Event], st.SearchStrategy[ev.Event]] = {
    ev.AttemptStarted: st.builds(ev.AttemptStarted, **common, attempt=numbers, gang=numbers, nodes=st.just(("a", "a"))),
    ev.GangPlaced: st.builds(ev.GangPlaced, **common, gang=numbers, seats=st.lists(seats, max_size=2).map(tuple)),
    ev.AttemptRunning: st.builds(
        ev.AttemptRunning, **common, attempt=numbers, pids=st.lists(st.integers(1, 9999), max_size=2).map(tuple)
    ),
    ev.RankExited: st.builds(
        lambda end, **fields: ev.RankExited(at=end.at, exit=end, **fields),
        job_id=st.just(ID),
        cause=text,
        attempt=numbers,
        end=exits,
    ),
    ev.RanksAsked: st.builds(ev.RanksAsked, **common, attempt=numbers, reason=known_facts, deadline=times),
    ev.FindingOpened: st.builds(ev.FindingOpened, **common, attempt=numbers, finding=found | known_facts),
    ev.FindingClosed: st.builds(ev.FindingClosed, **common, attempt=numbers, finding=found | known_facts),
    ev.GangLost: st.builds(
        ev.GangLost, **common, gang=numbers, rank=st.none() | ranks, reason=known_facts, not_before=times
    ),
    ev.AttemptFailed: st.builds(
        ev.AttemptFailed,
        **common,
        attempt=numbers,
        failure=failures,
        failed_at=times,
        retry=st.booleans(),
        keep_gang=st.booleans(),
        not_before=times,
    ),
    ev.AttemptSucceeded: st.builds(ev.AttemptSucceeded, **common, attempt=numbers),
    ev.AttemptGone: st.builds(ev.AttemptGone, **common, attempt=numbers),
    ev.GangReleased: st.builds(ev.GangReleased, **common, gang=numbers, files=st.booleans()),
    ev.FilesCollected: st.builds(ev.FilesCollected, **common, gang=numbers),
    ev.GangAbandoned: st.builds(ev.GangAbandoned, **common, gang=numbers, by=known_facts),
    ev.StopRequested: st.builds(
        ev.StopRequested, **common, purpose=st.sampled_from(StopPurpose), by=known_facts, deadline=times
    ),
    ev.JobRequeued: st.builds(ev.JobRequeued, **common, reason=known_facts, not_before=times),
    ev.JobSuspended: st.builds(ev.JobSuspended, **common, by=known_facts),
    ev.JobResumed: st.builds(ev.JobResumed, **common, by=text),
    ev.JobFinished: st.builds(
        ev.JobFinished, **common, state=st.sampled_from(JobState), reason=known_facts, exit_code=codes
    ),
    ev.CheckpointSaved: st.builds(ev.CheckpointSaved, **common, attempt=numbers, step=steps, path=paths),
    ev.FirstStep: st.builds(
        ev.FirstStep, **common, attempt=st.integers(0, 3), step=steps, step_at=times, steps_lost=steps
    ),
    ev.ClockStepped: st.builds(
        ev.ClockStepped, **common, seconds=st.floats(-90_000, 90_000), unmeasured=st.floats(0, 90_000)
    ),
    ev.LaterAttemptsFound: st.builds(ev.LaterAttemptsFound, **common, attempt=numbers, gang=numbers),
    ev.JobUpdated: st.builds(ev.JobUpdated, **common, by=text, priority=st.integers(0, 100)),
    ev.JobNoted: st.builds(ev.JobNoted, **common, note=known_facts, degraded=st.none() | st.booleans()),
}
submissions = st.builds(
    submission,
    st.builds(make_spec, workers=st.integers(1, 3), priority=st.integers(0, 100)),
    at=times,
    cause=text,
    resume_from=st.none() | text,
    rerun_of=st.none() | text,
)
facts = st.one_of(*FACTS.values())
all_events = st.one_of(submissions, facts)


def lived(events: Sequence[ev.Event]) -> Job:
    """Return the job after those of ``events`` that the rules allow."""
    job = pending()
    for event in events:
        try:
            job = fold(job, event)
        except CoreError:
            continue
    return job


# Random events alone rarely get past STARTING: a prefix of plausible events comes first.
_LIFE = [
    FACTS[ev.AttemptStarted].map(lambda e: ev.AttemptStarted(job_id=ID, at=e.at, attempt=1, gang=1, nodes=("a", "a"))),
    FACTS[ev.AttemptRunning].map(lambda e: ev.AttemptRunning(job_id=ID, at=e.at, attempt=1, pids=(1, 2))),
]
histories = st.integers(0, 2).flatmap(
    lambda n: st.tuples(st.tuples(*_LIFE[:n]), st.lists(facts, max_size=12)).map(lambda parts: [*parts[0], *parts[1]])
)
jobs = histories.map(lived)
