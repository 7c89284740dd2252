"""Three hosts with networks, disks, clocks and process tables of their own: files, exporters, fencing, lost hosts, full disks.

``make hosts`` runs them, and a campaign (``benchmarks/hosts.py``) after them. ``make test`` has a short form of them
(``tests/integration/test_two_hosts.py``).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.hosts.cluster import READ_PORT, SHARED, HostCluster
from tests.support.hosts.hosts import Hosts, Plan, why_not
from tests.support.hosts.ledger import SharedLedger
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")

AHEAD = 300.0
"""Seconds that the third host's clock is ahead; the second was booted long before the others."""
FETCH = """
import sys, urllib.error, urllib.request
url, token = sys.argv[1:]
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print("refused", error.code)
"""
MEET = """
import json, os, socket
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
Path("out").mkdir()
Path(f"out/{socket.gethostname()}.txt").write_text(Path("data.py").read_text() * int(total))
print("MET " + json.dumps([socket.gethostname(), os.environ["MASTER_ADDR"], os.getcwd()]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[HostCluster]:
    made = HostCluster(Hosts([Plan(), Plan(uptime=5000, home_mebibytes=96), Plan(clock=AHEAD)]))
    yield made
    made.close()


@pytest.fixture
def whole(cluster: HostCluster) -> HostCluster:
    """Return the cluster with perfect links and all nodes ready."""
    cluster.hosts.everywhere()
    cluster.wait_ready("host1", "host2", "host3")
    return cluster


def on(ranks: int, strategy: str = "STRICT_SPREAD", **more: Any) -> dict[str, Any]:
    each = {"gpu": 0, "cpu": 1}
    return {
        "resources": {"num_workers": ranks, "resources_per_worker": each, "placement_strategy": strategy, **more},
        "checkpoint": {"storage_path": f"{SHARED}/checkpoints"},
    }


def test_ranks_of_three_hosts_meet_and_their_files_come_home(whole: HostCluster) -> None:
    spec = {"name": "meet", "entrypoint": "python train.py", "outputs": ["out/**"], **on(3)}
    job_id = whole.submit(spec, train=MEET, data="# 7\n")
    job = whole.wait_ended(job_id)
    assert job["state"] == "SUCCEEDED", whole.evidence(job_id)
    said = [line.partition("MET ")[2] for line in whole.orch("logs", job_id).stdout.splitlines() if "MET " in line]
    met = {name: (address, directory) for name, address, directory in map(json.loads, said)}
    assert set(met) == {"host1", "host2", "host3"}
    first = whole.seats(job_id)[0]
    assert {address for address, _ in met.values()} == {f"10.77.0.{first[-1]}"}
    assert all(met[name][1].startswith("/home/trainer/.orch-node") for name in ("host2", "host3"))
    brought = {path.name: path.read_text() for path in whole.head.outside(job["outputs_dir"]).rglob("*.txt")}
    assert brought == {f"host{number}.txt": "# 7\n" * 3 for number in (1, 2, 3)}


def test_times_of_a_host_with_another_clock_are_the_daemons(whole: HostCluster) -> None:
    spec = {"name": "late", "entrypoint": "python train.py", **on(1, nodes=["host3"])}
    job_id = whole.submit(spec, train="import time\ntime.sleep(0.1)\nraise ValueError('of the script')\n")
    job = whole.wait_ended(job_id)
    assert (job["state"], job["failure"]["failure_class"]) == ("FAILED", "user")
    ahead = float(whole.hosts[3].python("import time; print(time.time())")) - time.time()
    assert ahead > AHEAD / 2, "the third host has another clock"
    now = time.time()
    events = whole.events(job_id)
    times = [event["at"] for event in events]
    assert max(times) <= now, [(event["kind"], event["at"] - now) for event in events]
    assert times == sorted(times)
    assert job["submitted_at"] <= job["started_at"] <= job["ended_at"] <= now


def test_exporters_are_read_by_address_and_token(whole: HostCluster) -> None:
    targets = f"http://{whole.head.address}:{READ_PORT}/api/v1/prometheus/targets"
    fetch = whole.hosts[2].python
    assert fetch(FETCH, targets, "").strip() == "refused 401"

    def listed() -> list[str] | None:
        found = [target for group in json.loads(fetch(FETCH, targets, whole.token)) for target in group["targets"]]
        return sorted(found) if len(found) >= 6 else None

    found = wait_until("six exporters are listed", listed)
    assert [target.partition(":")[0] for target in found] == ["10.77.0.1"] * 2 + ["10.77.0.2"] * 2 + ["10.77.0.3"] * 2
    for target in found[::2]:
        url = f"http://{target}/metrics"
        assert fetch(FETCH, url, "").strip() == "refused 401"
        assert "orch_gpu_info{" in fetch(FETCH, url, whole.token)


def test_a_host_that_is_cut_off_runs_no_rank_beside_its_replacement(whole: HostCluster) -> None:
    ledger = SharedLedger(whole)
    job_id = ledger.submit("cut", ranks=1, spec=on(1, nodes=["host2", "host3"]), seconds=0.05)
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    (place,) = whole.seats(job_id)
    cut = whole.host(place)
    before = {process.pid for process in cut.processes()}
    whole.hosts.part(cut)
    wait_until("another host goes on", lambda: ledger.steps(job_id, attempt=2, ranks=1))
    assert whole.seats(job_id) != [place]
    assert before, "the host itself lives"
    ledger.done("cut")
    job = whole.wait_ended(job_id)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 2), whole.evidence(job_id)
    ledger.check(job_id)
    whole.hosts.everywhere()
    whole.rejoin(cut)


def test_a_host_without_power_loses_its_ranks_and_comes_back(whole: HostCluster) -> None:
    ledger = SharedLedger(whole)
    job_id = ledger.submit(
        "power", ranks=2, spec=on(2, nodes=["host2", "host3"], placement_strategy="SPREAD"), seconds=0.05
    )
    wait_until("both save", lambda: ledger.last_step(job_id) >= 6)
    lost = whole.host("host3")
    lost.kill()
    wait_until("the other goes on", lambda: ledger.steps(job_id, attempt=2, ranks=2))
    assert whole.seats(job_id) == ["host2", "host2"]
    lost.boot()
    whole.rejoin(lost)
    ledger.done("power")
    job = whole.wait_ended(job_id)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 2), whole.evidence(job_id)
    ledger.check(job_id)


def test_a_full_disk_on_one_host_is_told_and_the_others_go_on(whole: HostCluster) -> None:
    full = whole.host("host2")
    full.run("sh", "-c", "cat /dev/zero > ballast", check=False)
    spec = {"name": "full", "entrypoint": "python train.py", "outputs": ["out/**"]}
    retry = {"retry": {"max_restarts": {"infra": 0}}}
    here = whole.submit({**spec, **retry, **on(1, nodes=["host2"])}, train=MEET, data="# 7\n" * 100_000)
    there = whole.submit({**spec, **on(2, nodes=["host1", "host3"])}, train=MEET, data="# 7\n")
    assert whole.wait_ended(there)["state"] == "SUCCEEDED", whole.evidence(there)
    job = whole.wait_ended(here)
    assert (job["state"], job["failure"]["failure_class"]) == ("FAILED", "infra"), "of the machine, not of the job"
    assert "the working copy could not be written to node host2" in job["failure"]["sentence"], job["failure"]
    assert "No space left on device" in job["failure"]["sentence"], job["failure"]
    full.run("rm", "ballast")
    again = whole.submit({**spec, **on(1, nodes=["host2"])}, train=MEET, data="# 7\n")
    assert whole.wait_ended(again)["state"] == "SUCCEEDED", whole.evidence(again)


@pytest.mark.parametrize(
    "link",
    [{"delay": 0.1, "jitter": 0.1, "loss": 0.02, "duplicate": 0.02}],
    ids=["delay, loss, reordering and duplicates"],
)
def test_a_bad_network_loses_nothing(whole: HostCluster, link: dict[str, float]) -> None:
    ledger = SharedLedger(whole)
    whole.hosts.everywhere(**link)
    job_id = ledger.submit("slow", ranks=3, spec=on(3), seconds=0.02, steps=30)
    job = whole.wait_ended(job_id)
    whole.hosts.everywhere()
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1), whole.evidence(job_id)
    ledger.check(job_id)


def test_a_one_way_cut_ends_as_a_lost_host_or_as_nothing(whole: HostCluster) -> None:
    """The host receives the head's frames, but not the reverse: Ray declares it dead, and the host must detect that."""
    ledger = SharedLedger(whole)
    job_id = ledger.submit("deaf", ranks=1, spec=on(1, nodes=["host2", "host3"]), seconds=0.05)
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    mute = whole.host(whole.seats(job_id)[0])
    whole.hosts.link(mute, whole.head, cut=True)
    wait_until("another host goes on", lambda: ledger.steps(job_id, attempt=2, ranks=1))
    whole.hosts.everywhere()
    ledger.done("deaf")
    job = whole.wait_ended(job_id)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 2), whole.evidence(job_id)
    ledger.check(job_id)
    whole.rejoin(mute)
