"""Queues over HTTP: every user can read them; only the daemon's owner can change them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import BadRequestError, NotFoundError, NotPermittedError
from orchestrator.api.queue_views import HolderView, OutlookView, ReservationView
from orchestrator.api.requests import QueueChange, ReservationRequest
from orchestrator.api.server.testing import serve_fake

if TYPE_CHECKING:
    from pathlib import Path


def test_the_owner_changes_a_queue_and_all_see_it(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        view = client.set_queue("research", guaranteed=2, maximum=8, weight=2.0)
        assert (view.guaranteed, view.maximum, view.weight) == (2, 8, 2.0)
        assert client.set_queue("research", unbounded=True, parent="lab").maximum is None
        ((_, (name, change, _)), *_) = served.do(lambda service: [c for c in service.calls if c[0] == "set_queue"])
        assert (name, change) == ("research", QueueChange(guaranteed=2, maximum=8, weight=2.0))
        assert [queue.parent for queue in client.queue_shares().queues] == ["lab"]
        with pytest.raises(BadRequestError):
            client.set_queue("Not A Name", weight=1.0)
        with pytest.raises(BadRequestError):
            client.set_queue("research", weight=-1.0)


def test_the_outlook_of_a_job_and_of_the_queue(tmp_path: Path) -> None:
    holder = HolderView(
        job_id="busy-aaaaaa", name="busy", user="bob", gpus=4.0, ends_at=9.0, basis="like jobs", like_jobs=3
    )
    told = OutlookView(starts_at=9.0, ahead=("first-aaaaaa",), rule="arrival", holders=(holder,), starts={"a": 9.0})
    with serve_fake(tmp_path / "run", owner_uid=os.getuid() + 1) as served:
        job = served.do(lambda service: service.add("late"))
        served.do(lambda service: setattr(service, "outlook_answer", told))
        client = Client(served.endpoint)
        assert client.outlook("late") == client.outlook() == told
        assert [c for c in served.do(lambda service: service.calls) if c[0] == "outlook"] == [
            ("outlook", job.id),
            ("outlook", None),
        ]
        with pytest.raises(NotFoundError):
            client.outlook("nothing")


def test_another_user_only_looks(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid() + 1) as served:
        client = Client(served.endpoint)
        assert client.queue_shares().order == ()
        with pytest.raises(NotPermittedError, match="only the daemon's owner may change a queue"):
            client.set_queue("research", weight=2.0)
        with pytest.raises(NotPermittedError, match="only the daemon's owner may change a node"):
            client.change_node("node-a", labels={"disk": "nvme"})


def test_the_owner_labels_a_node_and_all_see_it(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        client.change_node("node-a", labels={"disk": "nvme", "net": "ib"})
        client.change_node("node-a", labels={"net": None})
        assert [node.labels for node in client.nodes()] == [{"disk": "nvme"}]
        for labels in ({"no key": "x"}, {"disk": "x" * 256}, {"disk": "a\nb"}):
            with pytest.raises(BadRequestError):
                client.change_node("node-a", labels=labels)
        with pytest.raises(NotFoundError):
            client.change_node("node-z", labels={"disk": "nvme"})


def test_the_owner_reserves_a_node_and_all_see_it(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        asked = ReservationRequest(start=1000.0, seconds=60.0, reason="new driver")
        client.change_node("node-a", reserve=asked)
        ((known,),) = [node.reservations for node in client.nodes()]
        assert known == ReservationView(id="r1", start_at=1000.0, end_at=1060.0, reason="new driver", by=known.by)
        for wrong in (
            ReservationRequest(start=-1.0, seconds=60.0),
            ReservationRequest(start=1000.0, seconds=0.0),
            ReservationRequest(start=1000.0, seconds=1e9),
            ReservationRequest(start=1000.0, seconds=60.0, reason="a\nb"),
        ):
            with pytest.raises(BadRequestError):
                client.change_node("node-a", reserve=wrong)
        client.change_node("node-a", unreserve="r1")
        assert [node.reservations for node in client.nodes()] == [()]
