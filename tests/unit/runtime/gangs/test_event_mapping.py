"""Messages of actors and keepers, and the facts that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.errors import NOT_FAILING
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import ActorLost, RecordRestored
from orchestrator.core.facts.notes import SaveFailed
from orchestrator.core.ids import JobId
from orchestrator.core.states import StopScope
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.relay import (
    exited,
    in_memory,
    recorded_exits,
    saved,
    saves_fail_of,
    seats_of,
)
from orchestrator.runtime.ranks.rank_events import RankEvent, RankGreeting
from orchestrator.spec.paths import Paths
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.support.nodes import node_report
from tests.support.records import replace

JOB = JobId("train-aaaaaa")
LOST = GangLostError(ActorLost(rank=0))


def greeting(node_id: str, *gpu_ids: str) -> RankGreeting:
    return RankGreeting(
        node_id=node_id, pid=7, address="10.0.0.1", gpu_ids=gpu_ids, launched=0, port=None, highest_step=0
    )


def test_a_seat_has_the_uuids_of_its_gpus_and_the_name_of_its_node() -> None:
    (seat,) = seats_of([greeting("n1", "1")], {"n1": node_report("GPU-0", "GPU-1", hostname="box")})
    assert (seat.rank, seat.node_name, seat.gpu_ids, seat.gpu_uuids) == (0, "box", ("1",), ("GPU-1",))


def test_an_exit_is_told_as_it_was() -> None:
    end = ev.Exit(rank=7, at=5.0, exit_code=1, signal=None, error_type="ValueError", log_tail=("a",))
    fact = exited(JOB, 3, 1, RankEvent(number=2, kind="exited", at=5.0, exit=end), at=6.0)
    assert (fact.attempt, fact.at, fact.exit) == (3, 6.0, replace(end, rank=1)), "which rank it is, the daemon knows"


def record(paths: Paths, rank: int, **fields: Any) -> None:
    path = Path(paths.exit_record(JOB, 1, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    base = {"version": 1, "record": {}, "pid": 1, "keeper_pid": 2, "started_at": 1.0, "ended_at": 9.0}
    path.write_text(json.dumps({**base, "exit_code": None, "signal": None, "cause": None, "error": None, **fields}))


def test_last_words_are_the_exits_that_nobody_ordered(tmp_path: Path) -> None:
    paths = Paths(home=tmp_path, socket=tmp_path / "s")
    record(paths, 0, signal=11)
    record(paths, 1, signal=9, cause="lifeline")  # killed because its actor died
    error = {"type": "ValueError", "message": "boo", "traceback": "", "at": 8.5}
    record(paths, 3, exit_code=1, error=error)
    words = recorded_exits(paths, JOB, 1, 4, LOST)
    assert [(w.exit.rank, w.exit.signal, w.exit.exit_code) for w in words if isinstance(w, ev.RankExited)] == [
        (0, 11, None),
        (3, None, 1),
    ]
    assert isinstance(words[1], ev.RankExited)
    assert (words[1].exit.at, words[1].exit.error_type, words[1].exit.error_at) == (9.0, "ValueError", 8.5)


def test_ends_that_the_restored_record_has_yet_to_follow_are_no_news(tmp_path: Path) -> None:
    paths = Paths(home=tmp_path, socket=tmp_path / "s")
    record(paths, 0, signal=11)
    assert recorded_exits(paths, JOB, 1, 1, GangLostError(RecordRestored(attempt=3))) == []


def test_last_words_tell_that_a_rank_was_asked_to_stop(tmp_path: Path) -> None:
    paths = Paths(home=tmp_path, socket=tmp_path / "s")
    seen = {"stop_seen_at": 8.0, "keeper_terminated_at": 7.0, "last_step": 11, "total_steps": 60}
    record(paths, 0, exit_code=0, ending=seen)
    record(
        paths, 1, signal=9, cause="lifeline", ending={"keeper_terminated_at": 7.0}
    )  # killed with its actor, in the shutdown
    record(paths, 2, signal=9, cause="stop_deadline", ending={"stop_seen_at": 8.0})  # orch requested the stop
    record(paths, 3, exit_code=0)  # of a keeper that recorded none of this
    words = [w.exit for w in recorded_exits(paths, JOB, 1, 4, LOST) if isinstance(w, ev.RankExited)]
    assert [(w.rank, w.exit_code, w.signal) for w in words] == [(0, 0, None), (1, None, 9), (3, 0, None)]
    told = [(w.stop_seen_at, w.stop_scope, w.last_step, w.total_steps) for w in words]
    assert told == [(7.0, StopScope.MACHINE, 11, 60), (7.0, StopScope.MACHINE, None, None), (None, None, None, None)]


def test_a_checkpoint_is_told_by_the_rank_whose_part_completed_it() -> None:
    name = Version(attempt=2, step=30).name
    whole = PersisterStatus(step=30, attempt=2, path=f"/c/{name}", at=4.0)
    (fact,) = saved(JOB, whole)
    assert isinstance(fact, ev.CheckpointSaved)
    assert (fact.attempt, fact.step, fact.path, fact.at) == (2, 30, f"/c/{name}", 4.0)
    older = Version(attempt=2, step=20).name
    assert saved(JOB, PersisterStatus(step=30, attempt=2, path=f"/c/{older}")) == []
    (own,) = saved(JOB, PersisterStatus(step=30, attempt=2, path="/c/my-own-name", watched=True))
    assert isinstance(own, ev.CheckpointSaved)
    assert saved(JOB, None) == []


def test_a_failed_save_is_told() -> None:
    (note,) = saved(JOB, PersisterStatus(failures=1, failure="the disk is full"))
    assert isinstance(note, ev.JobNoted)
    assert note.note == SaveFailed(said="the disk is full")


def test_a_failure_is_told_when_it_begins_and_not_with_each_save() -> None:
    """On a full disk every save fails again, each with its own step and size in the message."""
    failing, told = NOT_FAILING, []
    for step, kind in ((1, "ENOSPC"), (2, "ENOSPC"), (None, ""), (3, "ENOSPC"), (4, "EACCES"), (5, "EACCES")):
        failure = f"snapshot of step {step} not stored" if kind else ""
        status = PersisterStatus(failures=step or 0, failure=failure, failure_kind=kind)
        told += saved(JOB, status, failing=failing)
        failing = saves_fail_of(status, failing)
        assert saves_fail_of(None, failing) == failing
    notes = [fact.note for fact in told if isinstance(fact, ev.JobNoted)]
    assert notes == [SaveFailed(said=f"snapshot of step {step} not stored") for step in (1, 3, 4)]


@pytest.mark.parametrize("newest", [None, ProgressSnapshot(step=7)])
def test_without_a_snapshot_nothing_is_left_in_memory(newest: ProgressSnapshot | None) -> None:
    assert in_memory(JOB, 1, newest) == []


def test_a_snapshot_in_memory_is_a_checkpoint_without_a_path() -> None:
    (fact,) = in_memory(JOB, 4, ProgressSnapshot(step=9, snapshot_step=8, snapshot_at=2.5))
    assert isinstance(fact, ev.CheckpointSaved)
    assert (fact.attempt, fact.step, fact.path, fact.at) == (4, 8, "", 2.5)
