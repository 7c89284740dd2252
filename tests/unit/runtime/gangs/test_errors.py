"""The meaning of each of Ray's errors for a gang."""

from __future__ import annotations

import pytest
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from orchestrator.core.facts.faults import ActorLost, ActorNotPlaced, EnvironmentFailed, NodeLost, RecordRestored
from orchestrator.runtime.gangs.errors import as_lost, is_away
from orchestrator.runtime.ranks.rank_events import StaleAttemptError


def died(why: str) -> exceptions.ActorDiedError:
    return exceptions.ActorDiedError(ActorDiedErrorContext(error_message=why, actor_id=bytes(16)))


def test_an_actor_that_died_loses_the_gang_and_its_node_is_told() -> None:
    alone = as_lost(3, died("The worker process has exited."))
    assert alone is not None
    assert (alone.cause, alone.node_lost) == (ActorLost(rank=3), False)
    with_node = as_lost(0, died("The actor died because its node has died."))
    assert with_node is not None
    assert (with_node.cause, with_node.node_lost) == (NodeLost(rank=0), True)


def test_what_cannot_be_made_loses_the_gang() -> None:
    environment = as_lost(1, exceptions.RuntimeEnvSetupError("pip:\n   no such\n package"))
    assert environment is not None
    assert isinstance(environment.cause, EnvironmentFailed)
    assert environment.cause.rank == 1
    assert environment.cause.said.endswith("pip: no such package")
    nowhere = as_lost(2, exceptions.ActorUnschedulableError("no node"))
    assert nowhere is not None
    assert isinstance(nowhere.cause, ActorNotPlaced)
    assert nowhere.cause.rank == 2


def test_an_actor_that_is_ahead_of_the_record_loses_the_gang() -> None:
    ahead = as_lost(1, StaleAttemptError("attempt 1 was replaced by 3"))
    assert ahead is not None
    assert (ahead.cause, ahead.node_lost) == (RecordRestored(rank=1), False)
    through_ray = exceptions.RayTaskError("serve", "", StaleAttemptError("attempt 1 was replaced by 3"))
    assert as_lost(1, through_ray.as_instanceof_cause()) is not None


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError("reset"), RuntimeError("?")])
def test_anything_else_may_pass(error: Exception) -> None:
    assert as_lost(0, error) is None


def test_what_is_away_may_be_back_and_a_fault_of_ours_is_none_of_that() -> None:
    assert is_away(TimeoutError())
    assert is_away(exceptions.ActorUnschedulableError("the node doesn't exist any more"))
    assert is_away(died("its node has died"))
    assert not is_away(exceptions.RayTaskError("ranks_gone", "Traceback ...", KeyError("rank")))
    assert not is_away(KeyError("rank"))
