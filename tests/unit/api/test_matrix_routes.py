"""Matrices over HTTP: every user can read them; only the owner of the jobs or of the daemon can act on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import BadRequestError, NotFoundError, NotPermittedError
from orchestrator.api.matrix_views import MatrixJobView, MatrixView
from orchestrator.api.protocol import Verb
from orchestrator.api.server.testing import FakeService, serve_fake

if TYPE_CHECKING:
    from pathlib import Path


def grid(uid: int, **fields: Any) -> MatrixView:
    rows = tuple(
        MatrixJobView(index=n, values={"lr": lr}, job_id=f"digits-aaaaa{n + 2}", name="digits", state="RUNNING")
        for n, lr in enumerate((0.1, 0.01))
    )
    known: dict[str, Any] = {
        "id": "digits-w2pqsy", "name": "digits", "user": "ada", "uid": uid, "state": "RUNNING", "submitted_at": 1.0,
        "count": 2, "counts": {"RUNNING": 2}, "parameters": ("lr",), "jobs": rows,
    }  # fmt: skip
    return MatrixView(**{**known, **fields})


def put(view: MatrixView) -> Any:
    def set_it(service: FakeService) -> None:
        service.matrices[view.id] = view

    return set_it


def test_a_matrix_is_read_and_acted_on_as_one(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        served.do(put(grid(os.getuid())))
        assert client.matrix("digits") == client.matrix("digits-w2pqsy") == grid(os.getuid())
        assert client.find_matrix("other") is None
        with pytest.raises(NotFoundError, match="there is no matrix 'other'"):
            client.matrix("other")
        reply = client.cancel("digits")
        assert (reply.job_id, reply.job_ids) == ("digits-w2pqsy", ("digits-aaaaa2", "digits-aaaaa3"))
        client.rerun("digits", failed=True)
        client.hold("digits")
        client.release("digits")
        calls = served.do(lambda service: [c for c in service.calls if c[0].endswith("matrix")])
        assert [(request.verb, request.failed) for _, (request, _) in calls] == [
            (Verb.CANCEL, False), (Verb.RERUN, True), (Verb.HOLD, False), (Verb.RELEASE, False),
        ]  # fmt: skip


def test_a_job_of_that_name_is_acted_on_where_there_is_no_matrix(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        job = served.do(lambda service: service.add("solo", uid=os.getuid()))
        assert client.hold("solo").state == "SUSPENDED"
        assert client.release(job.id).state == "PENDING"


def test_another_user_looks_and_does_not_act(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid() + 1) as served:
        client = Client(served.endpoint)
        served.do(put(grid(os.getuid() + 2)))
        assert client.matrix("digits").user == "ada"
        for act in (client.cancel, client.pause, client.resume, client.rerun, client.hold, client.release):
            with pytest.raises(NotPermittedError, match="digits-w2pqsy belongs to ada"):
                act("digits")
        served.do(put(grid(os.getuid())))
        assert client.pause("digits").job_id == "digits-w2pqsy"


def test_failed_belongs_to_rerun_alone(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        client = Client(served.endpoint)
        with pytest.raises(BadRequestError, match="cancel takes no failed"):
            client._act("digits", "cancel", {"failed": True})
