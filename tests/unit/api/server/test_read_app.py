"""The read-only listener: its answers for Prometheus and probes, and its refusal of everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import BadRequestError
from orchestrator.api.server.read_app import read_policy
from orchestrator.api.transport.endpoint import Endpoint
from tests.support.plain_http import ask

if TYPE_CHECKING:
    from orchestrator.api.server.testing import ServedFake

PAGES = ("/metrics", "/healthz", "/readyz", "/api/v1/prometheus/targets")


@pytest.fixture
def reading(served: ServedFake) -> Endpoint:
    host, _, port = served.read_address.rpartition(":")
    return Endpoint(host=host, port=int(port))


def test_metrics_in_the_format_that_was_asked_for(reading: Endpoint) -> None:
    plain = ask(reading, "GET", "/metrics")
    assert (plain.status, plain.body) == (200, b"orch_up 1\n")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4"
    newer = ask(reading, "GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert newer.headers["content-type"].startswith("application/openmetrics-text")


def test_health_and_readiness_differ(served: ServedFake, reading: Endpoint) -> None:
    assert ask(reading, "GET", "/readyz").body == b"ready\n"
    served.do(lambda service: setattr(service, "ready", False))
    not_ready = ask(reading, "GET", "/readyz")
    assert (not_ready.status, not_ready.body) == (503, b"not ready\nRay is starting\n")
    assert ask(reading, "GET", "/healthz").status == 200


def test_targets_are_in_prometheus_s_form(reading: Endpoint) -> None:
    assert ask(reading, "GET", "/api/v1/prometheus/targets").json == [
        {"targets": ["127.0.0.1:9400"], "labels": {"node": "node-a"}}
    ]


def test_head_has_no_body(reading: Endpoint) -> None:
    for page in PAGES:
        answer = ask(reading, "HEAD", page)
        assert (answer.status, answer.body) == (200, b""), page


def test_nothing_can_be_changed(reading: Endpoint) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        for page in (*PAGES, "/api/v1/jobs", "/api/v1/shutdown"):
            assert ask(reading, method, page, body=b"{}").status == 405, (method, page)


def test_the_control_routes_are_not_here(reading: Endpoint) -> None:
    for page in ("/", "/api/v1/jobs", "/api/v1/openapi.json", "/metrics/../api/v1/jobs", "/docs"):
        answer = ask(reading, "GET", page)
        assert (answer.status, answer.json["code"]) == (404, "not_found"), page


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}], ids=str)
def test_pages_of_others_cannot_read(reading: Endpoint, headers: dict[str, str]) -> None:
    for page in PAGES:
        assert ask(reading, "GET", page, headers=headers).status == 403


def test_another_address_needs_a_token() -> None:
    with pytest.raises(BadRequestError, match="open to the network"):
        read_policy("0.0.0.0", "", 0)
    policy = read_policy("0.0.0.0", "secret", 0)
    assert not policy.open_to_all
    assert policy.hosts is None


def test_a_token_is_asked_for_where_one_is_set(served: ServedFake) -> None:
    reading = served.read_with_token("secret")
    for page in PAGES:
        assert ask(reading, "GET", page).status == 401
        assert ask(reading, "GET", page, headers={"Authorization": "Bearer wrong"}).status == 401
        good = {"Authorization": "Bearer secret", "Host": "host.docker.internal:9464"}
        assert ask(reading, "GET", page, headers=good).status == 200
    assert ask(reading, "GET", "/metrics").headers["www-authenticate"] == "Bearer"
