"""Addresses of exporters, from settings and the node that they run on."""

from __future__ import annotations

from orchestrator.gpu.exporter import HttpSettings
from orchestrator.runtime.exporters.actor import ExporterAccess


def test_loopback_and_any_port_unless_told_otherwise() -> None:
    assert ExporterAccess().http("10.0.0.7") == HttpSettings(host="127.0.0.1", port=0)


def test_a_node_listens_on_its_own_address_within_the_range_and_wants_the_token() -> None:
    access = ExporterAccess(address="node", ports=(9477, 9599), token="t")
    assert access.http("10.0.0.7") == HttpSettings(host="10.0.0.7", port=9477, last_port=9599, token="t")
    access.http("10.0.0.7").validate()
