"""`orch queue` and `orch queue set`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.queue_views import QueueView, UserShareView

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService, ServedFake
    from tests.unit.cli.conftest import Orch


def shared(service: FakeService) -> None:
    service._queues = (
        QueueView(name="lab", gpus=2.0, fair_share=5.3333, guaranteed=4, maximum=8, share=0.25, running=1),
        QueueView(name="vision", parent="lab", weight=2.0, waiting=1),
    )
    service._users = (
        UserShareView(queue="vision", user="ada", gpus=2.0, share=0.5, running=1),
        UserShareView(queue="vision", user="bob", waiting=1),
    )


def test_shares_of_queues_and_users_are_shown(orch: Orch, served: ServedFake) -> None:
    served.do(shared)
    served.do(lambda service: service.add("waits", queue="vision", user="bob"))
    lines = [line.split() for line in orch("queue").out.splitlines()]
    assert lines[0][:3] == ["JOB", "QUEUE", "USER"]
    assert ["lab", "2", "5.33", "4", "8", "1", "25%", "1", "0"] in lines
    assert ["vision", "0", "0", "0", "-", "2", "0%", "0", "1"] in lines
    assert ["ada", "vision", "2", "50%", "1", "0"] in lines
    answer = orch("queue", "--json").json
    assert [queue["name"] for queue in answer["queues"]] == ["lab", "vision"]
    assert [user["user"] for user in answer["users"]] == ["ada", "bob"]


def test_a_queue_is_set(orch: Orch, served: ServedFake) -> None:
    done = orch("queue", "set", "research", "--guaranteed", "2", "--maximum", "8", "--weight", "1.5")
    assert done.out == "queue research has 2 guaranteed GPUs, a maximum of 8 and weight 1.5\n"
    done = orch("queue", "set", "research", "--maximum", "none", "--parent", "lab", "--json")
    assert (done.json["maximum"], done.json["parent"], done.json["guaranteed"]) == (None, "lab", 2)
    assert orch("queue", "set", "research", "--parent", "none").out.startswith(
        "queue research has 2 guaranteed GPUs, no max"
    )


def test_what_cannot_be_meant_is_refused(orch: Orch, served: ServedFake) -> None:
    done = orch("queue", "set", "research")
    assert done.code == 2
    assert "nothing to change was given" in done.err
    assert "--maximum 'many' is not a whole number of GPUs" in orch("queue", "set", "research", "--maximum", "many").err
    assert orch("queue", "set", "Not-a-name", "--weight", "2").code == 2
