"""The process that holds a port which a rank could not bind: real sockets, and messages of libraries with a port."""

from __future__ import annotations

import os
import socket

import pytest

from orchestrator.core.diagnosis.signatures import taken_port
from orchestrator.core.events import Exit
from orchestrator.core.facts.faults import PortTaken
from orchestrator.runtime.ranks.exit_evidence import port_evidence


def ended(message: str, *lines: str) -> Exit:
    kind = "OSError" if message else ""
    return Exit(rank=1, exit_code=1, signal=None, at=1.0, error_type=kind, error_message=message, log_tail=lines)


@pytest.mark.parametrize(
    ("message", "port"),
    [
        ("[Errno 98] Address already in use (while attempting to bind on address ('::1', 8080, 0, 0))", 8080),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use", 8000),
        ("The server socket has failed to listen. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE", 29500),
        ("The server socket has failed to bind to [::]:29501 (errno: 98 - Address already in use).", 29501),
        ("Address already in use (addr='tcp://127.0.0.1:5555')", 5555),
        ("[socket.cpp:464] [Errno 98] Address already in use", None),
        ("Address already in use: port 99999", None),
        ("cannot reach ('127.0.0.1', 8000)", None),
        ("", None),
    ],
)
def test_the_port_is_read_from_what_libraries_say(message: str, port: int | None) -> None:
    assert taken_port(ended(message)) == port


def test_the_holder_is_named_while_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        end = ended("", f"OSError: [Errno 98] Address already in use: ('127.0.0.1', {port})")
        found = port_evidence(end, {"MASTER_PORT": str(port - 1)})
    assert isinstance(found, PortTaken)
    assert (found.port, found.rendezvous_port, found.listening, found.pid) == (port, port - 1, True, os.getpid())
    assert found.program
    assert found.chosen_by_orch
    gone = port_evidence(end, {"MASTER_PORT": "none"})
    assert gone == PortTaken(port=port)
    assert port_evidence(ended("boom"), {}) is None
