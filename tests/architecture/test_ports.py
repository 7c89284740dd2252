"""The suite's ports for servers in other processes."""

from __future__ import annotations

import itertools
import socket

from tests.support import ports


def test_no_port_is_returned_twice_and_none_is_from_the_range_of_connections() -> None:
    found = [ports.free_port() for _ in range(50)]
    assert len(set(found)) == 50
    assert all(ports.FIRST <= port <= ports.LAST for port in found)


def test_a_port_that_is_bound_is_skipped() -> None:
    taken = ports.free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", taken))
        assert ports.free_port(itertools.count(taken - ports.FIRST)) != taken
