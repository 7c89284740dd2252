"""The storing of a rank's snapshots is reported, also where none has ever reached storage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core.diagnosis.observation import StorageSeen
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints

MASKER = Masker(["hunter22hunter22"])


def checkpoints(status: PersisterStatus) -> RankCheckpoints:
    found = RankCheckpoints(lambda: None)
    gauge = SimpleNamespace(busy_seconds=3.0, free_bytes=7)
    found._persister = cast("Any", SimpleNamespace(status=status, gauge=gauge))
    return found


def test_a_save_that_fails_before_any_has_succeeded_is_told() -> None:
    found = checkpoints(PersisterStatus(failures=1, failure="no room, hunter22hunter22"))
    found.look(MASKER)
    assert found.number == 1
    assert found.newest is not None
    assert found.newest.failure == "no room, ***"
    found.look(MASKER)
    assert found.number == 1, "once"
    silent = checkpoints(PersisterStatus())
    silent.look(MASKER)
    assert silent.number == 0


def test_what_the_storage_does_is_told_without_secrets() -> None:
    status = PersisterStatus(
        failures=8,
        failures_in_a_row=2,
        failing_since=5.0,
        failure="no room, hunter22hunter22",
        failure_kind="ENOSPC",
        persisted=4,
        bytes=9,
        seconds=1.5,
    )
    assert checkpoints(status).storage(MASKER) == StorageSeen(
        failures=2,
        failing_since=5.0,
        cause="ENOSPC",
        said="no room, ***",
        writes=4,
        written_bytes=9,
        seconds=1.5,
        busy_seconds=3.0,
        free_bytes=7,
    )
    assert RankCheckpoints(lambda: None).storage(MASKER) is None
