"""Two hosts with networks, disks, process tables and users of their own: one gang over both, one of them cut off.

The short form of ``tests/hosts``, which ``make hosts`` runs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.cluster import HostCluster
from tests.support.hosts.hosts import Hosts, Plan, why_not
from tests.support.hosts.ledger import SharedLedger
from tests.support.stack import wait_until

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]

SPREAD = {"resources": {"num_workers": 2, "resources_per_worker": {"gpu": 0, "cpu": 1}, "placement_strategy": "SPREAD"}}


def processes_in(namespaces: set[str]) -> list[int]:
    """Return the processes of this machine that are in one of the PID namespaces."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") in namespaces:
                found.append(pid)
    return found


def goes_on_with_one_host(cluster: HostCluster) -> None:
    ledger, lost = SharedLedger(cluster), cluster.hosts[2]
    job_id = ledger.submit("two", ranks=2, spec=SPREAD, seconds=0.05)
    wait_until("both save", lambda: ledger.last_step(job_id) >= 6)
    assert sorted(cluster.seats(job_id)) == ["host1", "host2"]
    cluster.hosts.part(lost)
    wait_until("one host goes on", lambda: ledger.steps(job_id, attempt=2, ranks=2))
    assert cluster.seats(job_id) == ["host1", "host1"]
    assert ledger.resumed(job_id, 2) >= 5, "from its checkpoint"
    assert cluster.nodes()["host2"]["state"] == "UNREACHABLE"
    ledger.done("two")
    job = cluster.wait_ended(job_id)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 2), cluster.evidence(job_id)
    ledger.check(job_id)
    cluster.hosts.everywhere()
    cluster.rejoin(lost)
    assert [(node["name"], node["state"]) for node in cluster.ask("nodes")["nodes"]] == [
        ("host1", "READY"),
        ("host2", "READY"),
    ], "under its new id, and once"


def test_a_gang_over_two_hosts_goes_on_with_the_one_that_is_left() -> None:
    hosts = Hosts([Plan(), Plan()])
    namespaces = {os.readlink(f"/proc/{host.pid}/ns/pid") for host in hosts.hosts}
    cluster = HostCluster(hosts)
    try:
        goes_on_with_one_host(cluster)
        assert len(processes_in(namespaces)) > len(hosts.hosts)
    finally:
        cluster.close()
    assert processes_in(namespaces) == []
    assert not hosts.directory.exists()
    assert str(hosts.directory) not in Path("/proc/self/mountinfo").read_text()
