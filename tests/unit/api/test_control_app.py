"""The routes: their answers, and their description in the OpenAPI document."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from orchestrator.api import files, matrix_views, queue_views, spec_views, usage_views, views
from orchestrator.api.errors import (
    AmbiguousReferenceError,
    BadRequestError,
    DaemonStoppingError,
    NoSuchJobError,
    NoSuchNodeError,
    RefusedError,
)
from orchestrator.api.protocol import PAGE
from orchestrator.api.views import CheckpointView, View
from orchestrator.daemon.requests.files import LeftFiles
from orchestrator.runtime.pools import Pool
from orchestrator.store.errors import StoreClosedError
from tests.support.plain_http import JSON, ask
from tests.unit.api.test_matrix_routes import grid

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.api.server.testing import ServedFake

JOB = "name: digits\nentrypoint: python train.py\n"


def test_a_request_that_finds_the_store_closed_is_told_that_the_daemon_stops(
    served: ServedFake, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed() -> Any:
        raise StoreClosedError("closed")

    monkeypatch.setattr(served.service, "health", closed)
    with pytest.raises(DaemonStoppingError, match="shutting down"):
        client.health()


def test_a_job_from_submission_to_its_end(served: ServedFake, client: Client) -> None:
    reply = client.submit_text(JOB)
    assert reply.created
    assert reply.job_id is not None
    job = client.job(reply.job_id)
    assert (job.name, job.state) == ("digits", "PENDING")
    served.do(lambda service: service.set(job.id, state="RUNNING", reason="every rank is up"))
    assert client.job("digits").reason == "every rank is up"
    assert client.cancel(job.id).state == "CANCELLED"
    assert [event.kind for event in client.events(job.id)] == ["job_submitted", "job_changed", "job_changed"]
    assert [event.sequence for event in client.events(job.id, after=2)] == [3]


def test_references(served: ServedFake, client: Client) -> None:
    old = served.do(lambda service: service.add("digits"))
    new = served.do(lambda service: service.add("digits"))
    other = served.do(lambda service: service.add("resnet"))
    assert client.job(old.id).id == old.id
    assert client.job("digits").id == new.id, "a name is its newest job"
    assert client.job("resnet-").id == other.id
    theirs = served.do(lambda service: service.add("digits", user="x.y@lab"))
    assert client.job("x.y@lab/digits").id == theirs.id
    assert client.job("digits").id == new.id, "a name is the caller's own newest job"
    with pytest.raises(AmbiguousReferenceError) as caught:
        client.job("digit")
    assert {problem.path for problem in caught.value.problems} == {old.id, new.id, theirs.id}
    with pytest.raises(NoSuchJobError):
        client.job("bert")


def test_filters(served: ServedFake, client: Client) -> None:
    served.do(lambda service: service.add("a", user="ada", state="RUNNING"))
    late = served.do(lambda service: service.add("b", user="ada"))
    served.do(lambda service: service.add("c", user="bob"))
    assert [job.name for job in client.jobs().jobs] == ["c", "b", "a"]
    assert [job.name for job in client.jobs(user="ada").jobs] == ["b", "a"]
    assert [job.name for job in client.jobs(states=["running", "FAILED"]).jobs] == ["a"]
    assert [job.name for job in client.jobs(since=late.submitted_at).jobs] == ["c", "b"]
    assert [job.name for job in client.jobs(limit=1).jobs] == ["c"]
    with pytest.raises(BadRequestError, match="unknown job state 'flying'") as caught:
        client.jobs(states=["flying"])
    assert "RUNNING" in caught.value.hint


def test_a_long_history_comes_whole_or_its_end_alone(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    for _ in range(2 * PAGE + 4):
        served.do(lambda service: service.set(job.id, reason="again"))
    count = 2 * PAGE + 5
    assert [event.sequence for event in client.events(job.id)] == list(range(1, count + 1))
    assert [len(page) for page in client.event_pages(job.id)] == [PAGE, PAGE, 5]
    assert [event.sequence for event in client.events(job.id, after=PAGE + 1)] == list(range(PAGE + 2, count + 1))
    assert [event.sequence for event in client.events(job.id, tail=3)] == [count - 2, count - 1, count]
    assert len(client.events(job.id, tail=PAGE + 7)) == PAGE + 7
    assert len(client.events(job.id, tail=10 * PAGE)) == count
    assert client.events(job.id, tail=0) == []
    assert client.events(job.id, after=count - 1, tail=5)[0].sequence == count


def test_actions(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    assert client.pause(job.id).state == "SUSPENDED"
    assert client.resume(job.id).state == "PENDING"
    client.update(job.id, priority=90)
    assert client.job(job.id).priority == 90
    again = client.rerun(job.id, from_checkpoint=True)
    assert again.job_id != job.id
    client.cancel(job.id)
    assert client.cancel(job.id).state == "CANCELLED", "what is reached already is answered, not refused"
    with pytest.raises(RefusedError, match="cancelled already"):
        client.resume(job.id)


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("update", {}, "update needs priority"),
        ("update", {"priority": 101}, "body.priority: Expected `int` <= 100"),
        ("update", {"priority": "high"}, "body.priority: Expected `int | null`, got `str`"),
        ("cancel", {"priority": 3}, "cancel takes no priority"),
        ("pause", {"from_checkpoint": True}, "pause takes no from_checkpoint"),
        ("cancel", {"violent": True}, "unknown field `violent`"),
        ("explode", {}, "verb"),
    ],
)
def test_wrong_actions_are_refused_with_their_place(
    served: ServedFake, verb: str, body: dict[str, Any], message: str
) -> None:
    job = served.do(lambda service: service.add())
    answer = ask(served.endpoint, "POST", f"/api/v1/jobs/{job.id}/{verb}", headers=JSON, body=json.dumps(body).encode())
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert message in answer.json["message"]
    assert served.do(lambda service: service.calls) == []


def test_errors_never_repeat_a_secret(served: ServedFake) -> None:
    body = {"yaml": JOB, "idempotency_key": "k" * 8, "cwd": "/", "secrets": {"HF_TOKEN": 12345, "bad-name": "hush"}}
    answer = ask(served.endpoint, "POST", "/api/v1/jobs", headers=JSON, body=json.dumps(body).encode())
    assert answer.status == 400
    assert b"hush" not in answer.body
    assert b"12345" not in answer.body


@pytest.mark.parametrize(
    "change",
    [
        {"cwd": "relative"},
        {"cwd": "/a\0b"},
        {"python": "python"},
        {"source": "a\0b"},
        {"idempotency_key": "../../etc"},
        {"idempotency_key": "short"},
        {"overrides": ["x"] * 201},
        {"yaml": 3},
        {"unknown": 1},
        {"secrets": {f"S{i}": "v" for i in range(101)}},
    ],
    ids=str,
)
def test_a_submission_that_is_out_of_bounds(served: ServedFake, change: dict[str, Any]) -> None:
    body = {"yaml": JOB, "idempotency_key": "k" * 8, "cwd": "/", **change}
    answer = ask(served.endpoint, "POST", "/api/v1/jobs", headers=JSON, body=json.dumps(body).encode())
    assert answer.status == 400
    assert served.do(lambda service: service.requests) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"yaml": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_json(served: ServedFake, body: bytes) -> None:
    answer = ask(served.endpoint, "POST", "/api/v1/jobs", headers=JSON, body=body)
    assert answer.status == 400
    assert answer.json["code"] == "bad_request"


def test_a_dry_run_stores_nothing(client: Client) -> None:
    plan = client.plan(JOB, cwd="/srv")
    assert (plan.starts, plan.seats[0].node, plan.working_dir) == ("now", "node-a", "/srv")
    assert client.jobs().jobs == ()


def test_checkpoints(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    assert client.checkpoints(job.id) == ()
    served.do(lambda service: service.save(job.id, CheckpointView(step=10, at=1.0, path="/c/10")))
    served.do(lambda service: service.save(job.id, CheckpointView(step=20, at=2.0, path="/c/20", problem="torn")))
    assert [item.valid for item in client.checkpoints(job.id)] == [None, None]
    assert [(item.step, item.valid) for item in client.checkpoints(job.id, verify=True)] == [(20, False), (10, True)]


def test_nodes(client: Client) -> None:
    assert client.nodes()[0].name == "node-a"
    assert client.node_action("node-a", "drain").state == "DRAINING"
    with pytest.raises(NoSuchNodeError):
        client.node_action("node-z", "cordon")


def test_health_prune_and_shutdown(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="FAILED"))
    running = served.do(lambda service: service.add())
    assert client.health().counts == {"FAILED": 1, "PENDING": 1}
    assert client.prune(older_than_seconds=0, dry_run=True).removed == (job.id,)
    assert client.prune(older_than_seconds=0).removed == (job.id,)
    assert [item.id for item in client.jobs().jobs] == [running.id]
    assert client.shutdown().running == (running.id,)
    assert client.shutdown(stop_jobs=True).stopped == (running.id,)


@pytest.mark.parametrize("seconds", [-1, "NaN", "Infinity"])
def test_a_wrong_age_prunes_nothing(served: ServedFake, seconds: object) -> None:
    body = f'{{"older_than_seconds": {seconds}}}'.encode()
    assert ask(served.endpoint, "POST", "/api/v1/prune", headers=JSON, body=body).status == 400
    assert served.do(lambda service: service.calls) == []


def test_logs(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    served.do(lambda service: service.write(job.id, "one", "zwei ü\x1b[0m", "drei"))
    served.do(lambda service: service.write(job.id, "from rank 1", rank=1, stream="stderr"))
    texts = [line.text for line in client.logs(job.id)]
    assert texts == ["one", "zwei ü\x1b[0m", "drei", "from rank 1"]
    assert [line.text for line in client.logs(job.id, tail=1)] == ["from rank 1"]
    assert [line.text for line in client.logs(job.id, tail=0)] == []
    assert [line.text for line in client.logs(job.id, rank=0)] == ["one", "zwei ü\x1b[0m", "drei"]
    with pytest.raises(NoSuchJobError):
        list(client.logs("nothing"))


def test_another_protocol_is_refused_with_the_way_out(served: ServedFake) -> None:
    answer = ask(served.endpoint, "GET", "/api/v1/jobs", headers={"X-Orch-Protocol": "99"})
    assert answer.status == 426
    assert "orch down && orch up" in answer.json["hint"]
    assert answer.headers["x-orch-protocol"] == "1"


def test_a_failure_inside_is_one_sentence(served: ServedFake, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("the store fell over")

    served.do(lambda service: setattr(service, "nodes", broken))
    answer = ask(served.endpoint, "GET", "/api/v1/nodes")
    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert b"fell over" not in answer.body


def test_a_long_poll_returns_at_the_change(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    other = served.do(lambda service: service.add())
    version = client.wait_change(None)
    assert client.wait_change(version - 1) == version, "what changed before is told at once"
    assert client.wait_change(version, timeout_seconds=0.05) == version
    assert client.wait_change(version + 1000) == version, "a counter of another life is not waited for"
    served.do(lambda service: service.set(other.id, state="RUNNING"))
    assert client.wait_change(version, job_ids=[job.id], timeout_seconds=0.05) == version + 1
    assert client.wait_change(version, job_ids=[other.id]) == version + 1


# -- the OpenAPI document


@pytest.fixture
def document(served: ServedFake) -> dict[str, Any]:
    document: dict[str, Any] = ask(served.endpoint, "GET", "/api/v1/openapi.json").json
    return document


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [ref for item in value.values() for ref in references(item)]
    return [ref for item in value for ref in references(item)] if isinstance(value, list) else []


def test_the_document_is_whole(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.")
    for reference in references(document):
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert len({op["operationId"] for op in operations}) == len(operations) >= 14
    for operation in operations:
        assert operation.get("description"), operation["operationId"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert "422" not in operation["responses"], "what cannot be understood is a problem document"


def known_to(service: Any, ref: str) -> None:
    """Give the service a matrix with this id, and a report of usage."""
    service.matrices[ref] = replace(grid(0), id=ref)
    nothing = usage_views.UsageRow(keys={}, jobs=0, gpu_hours=0.0, waiting_gpu_hours=0.0)
    service.used = usage_views.UsageReport(since=0.0, until=1.0, by=("user",), rows=(), total=nothing)


def test_the_document_names_what_routes_answer(served: ServedFake, client: Client, document: dict[str, Any]) -> None:
    job = served.do(lambda service: service.add())
    served.do(lambda service: service.save(job.id, CheckpointView(step=1, at=1.0, path="/c")))
    pool = Pool("outputs", 1)
    served.do(lambda service: service.files_of.update({job.id: LeftFiles(job.id, {}, pool)}))
    served.do(lambda service: known_to(service, job.id))
    checked = 0
    for path, methods in document["paths"].items():
        if "get" not in methods or path.endswith(
            ("/logs", "/digest", "/content")
        ):  # not JSON, or further parameters are required
            continue
        schema = methods["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        name = schema.rpartition("/")[2]
        cls: type[View] = next(
            getattr(known, name)
            for known in (views, spec_views, queue_views, files, matrix_views, usage_views)
            if hasattr(known, name)
        )
        answer = ask(served.endpoint, "GET", path.replace("{ref}", job.id).replace("{other}", job.id))
        assert answer.status == 200
        TypeAdapter(cls).validate_json(answer.body)  # lists stand for tuples; nothing else is converted
        checked += 1
    pool.close()
    assert checked >= 8
