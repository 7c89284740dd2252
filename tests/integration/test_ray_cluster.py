"""A daemon on a shared Ray cluster of several nodes: it obeys placement rules, survives lost nodes, spares other users.

The nodes are real raylets on this machine (``tests/support/cluster.py``); they are killed and frozen for real.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.api.errors import InvalidSpecError, RefusedError
from tests.support.cluster import RayCluster, RayNode
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import all_gone, tree
from tests.support.stack import Stack, wait_until

ELASTIC = Path(__file__).parent / "elastic_scripts" / "ledger.py"
SHOW = """
import json, os, time
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("ENV " + json.dumps({name: os.environ[name] for name in names}))
"""


def spread(ranks: int, strategy: str = "STRICT_SPREAD", cpu: float = 0.1) -> dict[str, Any]:
    return {
        "resources": {
            "num_workers": ranks,
            "resources_per_worker": {"gpu": 0, "cpu": cpu},
            "placement_strategy": strategy,
        }
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    made = RayCluster(workers=3)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def guest(cluster: RayCluster) -> Iterator[Stack]:
    """Yield a daemon that uses the cluster; at the end, check that it leaves others' actors alone."""
    made = Stack(extra=("--ray-address", cluster.address), environ=cluster.environ)
    try:
        made.up()
        yield made
        leaves_alone_what_others_have(cluster, made)
    finally:
        made.close()


HOLD = """
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=2)
class Holder:
    def here(self):
        return 1

for number, node in enumerate({nodes}):
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = Holder.options(name=f"holder-{{number}}", lifetime="detached", scheduling_strategy=there).remote()
    assert ray.get(actor.here.remote()) == 1
"""
ASK = """
import json
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
holders = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
answers = [ray.get(ray.get_actor(name).here.remote()) for name in holders if name.startswith("holder")]
print(json.dumps([sorted(holders), groups, answers]))
"""
LET_GO = "for number in range(2): ray.kill(ray.get_actor(f'holder-{number}'))"


def leaves_alone_what_others_have(cluster: RayCluster, guest: Stack) -> None:
    """Check that after ``orch down`` the cluster has the actors of others, and nothing of the daemon's."""
    cluster.keep(2)
    cluster.run(HOLD.format(nodes=[node.id for node in cluster.workers[:2]]))
    assert guest.orch("down").returncode == 0
    assert json.loads(cluster.run(ASK).splitlines()[-1]) == [["holder-0", "holder-1"], [], [1, 1]]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def whole(cluster: RayCluster, guest: Stack) -> RayCluster:
    """Return the cluster with three workers, all of them ready in the daemon."""
    cluster.keep(3)
    guest.up()
    ready(guest, {node.id for node in cluster.workers})
    return cluster


def ready(stack: Stack, wanted: set[str]) -> None:
    def known() -> bool:
        return wanted <= {node.id for node in stack.client.nodes() if node.state == "READY"}

    wait_until("the daemon knows the nodes", known)


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: Any) -> str:
    return stack.submit(job_spec(ledger, **options), directory / "work", train=SCRIPT)


def seats(stack: Stack, job_id: str) -> list[str]:
    """Return the nodes of the newest gang, by rank."""
    placed = [event for event in stack.client.events(job_id) if event.kind == "gang_placed"]
    return [seat["node_id"] for seat in placed[-1].body["seats"]]


def environments(stack: Stack, job_id: str) -> dict[int, dict[str, str]]:
    lines = [line.text for line in stack.client.logs(job_id) if line.text.startswith("ENV ")]
    found = [json.loads(line.removeprefix("ENV ")) for line in lines]
    return {int(env["RANK"]): env for env in found}


def degraded(stack: Stack, job_id: str, *, expected: bool) -> Callable[[], bool]:
    return lambda: stack.job(job_id).degraded is expected


def stepping(ledger: Ledger, job_id: str, attempt: int, ranks: int) -> Callable[[], bool]:
    def steps() -> bool:
        done = {line.rank for line in ledger.lines(job_id) if line.attempt == attempt and line.what == "step"}
        return len(done) == ranks

    return steps


def test_ranks_are_told_where_they_are(whole: RayCluster, guest: Stack, tmp_path: Path) -> None:
    def spec(name: str, strategy: str) -> str:
        return json.dumps({"version": 1, "name": name, "entrypoint": "python train.py", **spread(3, strategy)})

    apart = guest.submit(spec("apart", "STRICT_SPREAD"), tmp_path / "a", train=SHOW)
    together = guest.submit(spec("together", "PACK"), tmp_path / "b", train=SHOW)
    for job_id in (apart, together):
        job = guest.wait(job_id)
        assert job.state == "SUCCEEDED", job.failure
    found = environments(guest, apart)
    assert sorted(found) == [0, 1, 2]
    for rank, env in found.items():
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["WORLD_SIZE"]) == ("0", "1", "3")
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == (str(rank), "3")
        assert env["MASTER_ADDR"] == "127.0.0.1"
    assert len({env["MASTER_PORT"] for env in found.values()}) == 1
    assert set(seats(guest, apart)) == {node.id for node in whole.workers}
    for rank, env in environments(guest, together).items():
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")


def fork_servers(node: RayNode) -> list[int]:
    """Return the fork servers of a node: their command lines have the first 12 characters of its id."""
    return [
        process.pid
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "orch-forkserver" and node.id[:12] in " ".join(process.info["cmdline"] or ())
    ]


def test_lost_nodes_are_survived_and_nodes_that_join_are_used(
    whole: RayCluster, guest: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    killed = submit(guest, ledger, tmp_path, name="killed", ranks=2, until=str(done), spec=spread(2, cpu=1.5))
    guest.wait_state(killed, "RUNNING")
    frozen = submit(guest, ledger, tmp_path, name="frozen", ranks=1, until=str(done), spec=spread(1, cpu=1.5))
    for job_id in (killed, frozen):
        wait_until(f"{job_id} saves", lambda job_id=job_id: ledger.last_step(job_id) >= 6)
    victim, silent = whole.node(seats(guest, killed)[0]), whole.node(seats(guest, frozen)[0])
    first = tree(*ledger.pids(frozen, 1).values())
    silent.freeze()
    try:
        wait_until("the job on the frozen node is degraded", degraded(guest, frozen, expected=True))
        job = guest.job(frozen)
        assert (job.state, job.attempt, job.restarts) == ("RUNNING", 1, 0), (
            "not failed while Ray has hopes for its node"
        )
        assert {n.id: n.state for n in guest.client.nodes()}[silent.id] == "UNREACHABLE"
        victim.kill()
        guest.wait_state(killed, "RECOVERING")
        whole.add_node()
        whole.add_node()
        for job_id, ranks in ((killed, 2), (frozen, 1)):
            wait_until(f"{job_id} goes on elsewhere", stepping(ledger, job_id, attempt=2, ranks=ranks))
            assert ledger.resumed(job_id, 2) >= 5, "from its checkpoint"
            assert {victim.id, silent.id}.isdisjoint(seats(guest, job_id))
        all_gone("the ranks that were cut off", first, 1)
        assert any(map(fork_servers, whole.workers)), "a node has one"
        wait_until("the fork server of the node that ended has ended too", lambda: not fork_servers(victim))
        done.touch()
        for job_id in (killed, frozen):
            job = guest.wait(job_id)
            assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.failure
        ledger.check()
    finally:
        silent.kill()  # frozen, it would outlive its daemon


@pytest.mark.rare
def test_a_rank_that_alone_is_asked_to_stop_is_followed_by_those_of_other_nodes(
    whole: RayCluster, guest: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    """The other rank does not get the signal, and the ranks run no collective."""
    done = tmp_path / "done"
    job_id = submit(guest, ledger, tmp_path, name="asked", ranks=2, until=str(done), spec=spread(2))
    wait_until("both ranks step", lambda: all(ledger.last_step(job_id, rank) >= 6 for rank in (0, 1)))
    assert len(set(seats(guest, job_id))) == 2
    assert {node.id for node in whole.workers} >= set(seats(guest, job_id))
    os.kill(ledger.pids(job_id, 1)[1], signal.SIGTERM)
    wait_until("the next attempt steps", stepping(ledger, job_id, attempt=2, ranks=2))
    stopped = {line.rank: line.step for line in ledger.lines(job_id) if line.attempt == 1 and line.what == "stopped"}
    assert set(stopped) == {0, 1}, "the other one has saved as well"
    assert ledger.resumed(job_id, 2) >= stopped[1]
    done.touch()
    job = guest.wait(job_id)
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.reason
    assert "rank 1" in job.attempts[0].reason
    (asked,) = [event for event in guest.client.events(job_id) if event.kind == "ranks_asked"]
    assert asked.summary.endswith("the other ranks are asked to stop")
    ledger.check(job_id)


@pytest.mark.rare
def test_a_job_waits_for_the_only_node_that_holds_it_while_that_is_down(
    whole: RayCluster, guest: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    large = whole.add_node(cpus=6)
    ready(guest, {large.id})
    large.kill()

    def down() -> bool:
        return {n.id: (n.state, n.cpus_total) for n in guest.client.nodes()}[large.id] == ("UNREACHABLE", 6)

    wait_until("the node is down", down)
    job_id = submit(guest, ledger, tmp_path, name="large", ranks=1, steps=3, spec=spread(1, cpu=5))
    name = socket.gethostname()

    def waits() -> bool:
        job = guest.job(job_id)
        return job.state == "PENDING" and f"for node {name}, which is down" in job.reason

    wait_until("it waits, and names the node", waits)
    guest.kill_daemon()
    guest.up()
    wait_until("so it does with the next daemon", waits)
    again = submit(guest, ledger, tmp_path, name="large-too", ranks=1, steps=3, spec=spread(1, cpu=5))
    with pytest.raises(RefusedError, match="no node can fit"):
        submit(guest, ledger, tmp_path, name="never", ranks=1, steps=3, spec=spread(1, cpu=7))
    back = whole.add_node(cpus=6)
    for one in (job_id, again):
        assert guest.wait(one).state == "SUCCEEDED"
        assert seats(guest, one) == [back.id]
    assert large.id not in {n.id for n in guest.client.nodes()}, "its place was taken"
    back.kill()  # the next test's jobs must not be placed there
    wait_until(
        "it is down", lambda: {n.id: n.state for n in guest.client.nodes()}.get(back.id) in (None, "UNREACHABLE")
    )


@pytest.mark.rare
def test_an_elastic_job_goes_on_with_fewer_nodes_and_grows_again(
    whole: RayCluster, guest: Stack, tmp_path: Path
) -> None:
    stop_file, result = tmp_path / "stop", tmp_path / "result.json"
    spec = {
        "name": "elastic",
        "entrypoint": f"python train.py 20 {stop_file} {result}",
        "checkpoint": {"interval": 5},
        **spread(1),
    }
    spec["resources"]["num_workers"] = {"min": 1, "max": 3, "grow_after": "1s"}
    job_id = guest.submit(json.dumps(spec), tmp_path / "work", train=ELASTIC.read_text())

    def steps_on(ranks: int) -> Callable[[], bool]:
        def look() -> bool:
            job = guest.job(job_id)
            on_it = (job.state, job.num_workers) == ("RUNNING", ranks)
            return on_it and job.progress is not None and (job.progress.step or 0) > 6

        return look

    wait_until("it steps on three nodes", steps_on(3))
    whole.node(seats(guest, job_id)[1]).kill()
    wait_until("it goes on with two", steps_on(2))
    whole.add_node()
    wait_until("it grows again", steps_on(3))
    stop_file.touch()
    job = guest.wait(job_id)
    assert (job.state, job.restarts_by_class) == ("SUCCEEDED", {"infra": 1}), job.failure
    lines = [json.loads(line) for rank in range(3) for line in Path(f"{result}.{rank}").read_text().splitlines()]
    assert {line["ranks"] for line in lines} == {3, 2}


@pytest.mark.rare
def test_a_restarted_daemon_adopts_and_a_node_may_be_away_for_a_moment(
    whole: RayCluster, guest: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    job_id = submit(guest, ledger, tmp_path, ranks=3, until=str(done), spec=spread(3))
    wait_until("it steps", stepping(ledger, job_id, attempt=1, ranks=3))
    guest.kill_daemon()
    before = ledger.last_step(job_id)
    guest.up()
    assert ledger.last_step(job_id) > before, "it stepped on without a daemon"
    guest.wait_state(job_id, "RUNNING")
    away = whole.node(seats(guest, job_id)[1])
    away.freeze()
    try:
        wait_until("it is degraded", degraded(guest, job_id, expected=True))
    finally:
        away.thaw()
    wait_until("it is degraded no more", degraded(guest, job_id, expected=False))
    done.touch()
    job = guest.wait(job_id)
    assert (job.state, job.attempt, job.restarts) == ("SUCCEEDED", 1, 0)
    ledger.check(job_id)


@pytest.mark.rare
def test_other_users_of_the_cluster_are_respected(
    whole: RayCluster, guest: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    held = [node.id for node in whole.workers[:2]]
    whole.run(HOLD.format(nodes=held))

    def seen() -> bool:
        return all(n.cpus_free == 0 for n in guest.client.nodes() if n.id in held)

    wait_until("what others hold is seen", seen)
    fits = submit(guest, ledger, tmp_path, name="fits", ranks=2, steps=3, spec=spread(2, "SPREAD", cpu=1))
    waits = submit(guest, ledger, tmp_path, name="waits", ranks=2, steps=3, spec=spread(2, cpu=1))
    assert guest.wait(fits).state == "SUCCEEDED"
    assert set(seats(guest, fits)) == {whole.workers[2].id}, "the one node that nobody holds"
    job = guest.job(waits)
    assert (job.state, job.attempt) == ("PENDING", 0)
    whole.run(LET_GO)
    assert guest.wait(waits).state == "SUCCEEDED", "what was given back is used"
    ledger.check()


APART = """
import os
from pathlib import Path
from orchestrator.train import context

ctx = context()
print("works in", Path.cwd(), flush=True)
saved = ctx.load()
if saved is None:
    ctx.save({"step": 1}, step=1)
    os.kill(os.getpid(), 9)
Path("out").mkdir()
Path("out/answer.txt").write_text(Path("data.txt").read_text() * 2)
os.symlink("/etc/passwd", "out/link")
print("resumed from", saved.step, flush=True)
"""


@pytest.mark.rare
def test_a_node_that_does_not_share_the_home(whole: RayCluster, guest: Stack, tmp_path: Path) -> None:
    own_home = tmp_path / "home-of-the-node"
    node = whole.add_node(cpus=4, environ={"ORCH_NODE_HOME": str(own_home)})
    ready(guest, {node.id})
    spec = {
        "version": 1,
        "name": "apart",
        "entrypoint": "python train.py",
        "outputs": ["out/**"],
        **spread(1, cpu=3),  # no other node is that large
    }
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "data.txt").write_text("21")
    with pytest.raises(RefusedError) as refused:
        guest.submit(json.dumps(spec), directory, train=APART)
    assert "do not share ORCH_HOME" in refused.value.message
    assert "checkpoint.storage_path" in refused.value.hint
    spec["checkpoint"] = {"storage_path": str(tmp_path / "shared")}
    job_id = guest.submit(json.dumps(spec), directory, train=APART)
    job = guest.wait(job_id)
    assert (job.state, job.restarts_by_class) == ("SUCCEEDED", {"infra": 1}), job.failure
    assert seats(guest, job_id) == [node.id]
    first, second = guest.log(job_id, attempt=1), guest.log(job_id, attempt=2)
    assert first == f"works in {own_home}/jobs/{job_id}/work"
    assert second.splitlines()[-1] == "resumed from 1"
    assert job.outputs_dir in guest.orch("status", job_id).stdout.replace("\n", "")
    brought = {path.name: path.read_text() for path in Path(job.outputs_dir).rglob("*") if path.is_file()}
    assert brought == {"answer.txt": "2121"}, "what the job wrote, and no file that a link leads to"
    assert guest.settings.paths.exit_record(job_id, 1, 0).exists()
    node.kill()


def test_nodes_and_logs_from_everywhere(whole: RayCluster, guest: Stack, tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = f"""
import os, time
from pathlib import Path
print("hello from", os.environ["RANK"], flush=True)
while not Path({str(done)!r}).exists():
    time.sleep(0.02)
print("goodbye from", os.environ["RANK"], flush=True)
"""
    spec = json.dumps({"version": 1, "name": "talks", "entrypoint": "python train.py", **spread(3)})
    job_id = guest.submit(spec, tmp_path / "work", train=script)

    def said(word: str) -> set[str]:
        return {line for line in guest.log(job_id).splitlines() if line.startswith(word)}

    wait_until("every rank's words arrive while it runs", lambda: len(said("hello")) == 3)
    listed = json.loads(guest.orch("nodes", "--json").stdout)
    ours = [n for n in listed["nodes"] if n["jobs"] == [job_id]]
    assert {n["id"] for n in ours} == {node.id for node in whole.workers}
    done.touch()
    assert guest.wait(job_id).state == "SUCCEEDED"
    assert said("hello") | said("goodbye") == {f"{word} from {r}" for word in ("hello", "goodbye") for r in range(3)}
    shown = guest.orch("logs", job_id, "--rank", "2").stdout
    assert "goodbye from 2" in shown
    assert "from 1" not in shown


def wheel(directory: Path, name: str, value: int) -> Path:
    """Build a wheel of one module that holds one value."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", f"VALUE = {value}\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.mark.rare
def test_a_runtime_env_is_installed_by_ray(whole: RayCluster, guest: Stack, tmp_path: Path) -> None:
    package = tmp_path / "lib" / "some_modules"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 40\n")
    work = tmp_path / "work"
    spec: dict[str, Any] = {
        "version": 1,
        "name": "modules",
        "entrypoint": "python train.py --flag",
        "runtime_env": {"py_modules": ["../lib/some_modules"]},
        **spread(1),
    }
    see = "import sys, some_modules\nprint(some_modules.VALUE, sys.argv[1:], flush=True)\n"
    modules = guest.submit(json.dumps(spec), work, train=see)
    (package / "__init__.py").write_text("VALUE = 0  # changed after the submission\n")
    spec["runtime_env"] = {"pip": [str(wheel(tmp_path, "some_package", 2))]}
    spec["name"] = "pip"
    see = "import sys, some_package, torch\nprint(some_package.VALUE, sys.argv[1:], __name__, flush=True)\n"
    pip = guest.submit(json.dumps(spec), work, train=see)
    spec["runtime_env"] = {"pip": [str(tmp_path / "nothing-1.0-py3-none-any.whl")]}
    spec["retry"] = {"max_restarts": {"infra": 0}}
    broken = guest.submit(json.dumps(spec), work, train=see)
    for job_id, said in ((modules, "40 ['--flag']"), (pip, "2 ['--flag'] __main__")):
        job = guest.wait(job_id)
        assert job.state == "SUCCEEDED", (job.failure, guest.log(job_id))
        assert guest.log(job_id).splitlines()[-1] == said
    job = guest.wait(broken)
    assert job.state == "FAILED"
    assert job.failure is not None
    assert "runtime_env could not be installed" in job.failure.sentence
    assert "nothing-1.0" in job.failure.sentence
    spec["runtime_env"] = {"py_modules": ["nowhere"]}
    with pytest.raises(InvalidSpecError) as refused:
        guest.submit(json.dumps(spec), work, train=see)
    assert "neither a directory nor a wheel" in refused.value.problems[0].message
