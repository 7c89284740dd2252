"""Ray's head or every process dies: after a new start, every accepted job continues from its checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.support.campaign import left_in_ray
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import all_gone, of_cwd, tree
from tests.support.stack import Stack, process_gone, wait_until


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: object) -> str:
    return stack.submit(job_spec(ledger, **options), directory / "work", train=SCRIPT)  # type: ignore[arg-type]


def stepping(ledger: Ledger, job_id: str, attempt: int, ranks: int = 1) -> Callable[[], bool]:
    def steps() -> bool:
        done = {line.rank for line in ledger.lines(job_id) if line.attempt == attempt and line.what == "step"}
        return len(done) == ranks

    return steps


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("part", "number"),
    [
        pytest.param("gcs_server", signal.SIGKILL, id="control store"),
        pytest.param("raylet", signal.SIGKILL, id="raylet", marks=pytest.mark.rare),
        pytest.param("raylet", signal.SIGTERM, id="raylet, in order", marks=pytest.mark.rare),
    ],
)
def test_a_dead_head_is_started_again_and_jobs_resume(
    breakable: Stack, ledger: Ledger, tmp_path: Path, part: str, number: signal.Signals
) -> None:
    stack, done = breakable, tmp_path / "done"
    jobs = [submit(stack, ledger, tmp_path, name=f"j{i}", ranks=2, until=str(done)) for i in range(2)]
    paused = submit(stack, ledger, tmp_path, name="paused", until=str(done))
    for job_id in (*jobs, paused):
        wait_until(f"{job_id} saves", lambda job_id=job_id: ledger.last_step(job_id) >= 6)
    stack.client.pause(paused)
    stack.wait_state(paused, "SUSPENDED")
    pid, head = stack.daemon_pid(), stack.head_pids()
    ranks = tree(*(p for job_id in jobs for p in ledger.pids(job_id, 1).values()))
    os.kill(head[part], number)
    starting = submit(stack, ledger, tmp_path, name="new", ranks=2, until=str(done))
    for job_id in jobs:
        wait_until(f"{job_id} resumes", stepping(ledger, job_id, attempt=2, ranks=2))
    all_gone("the first attempts", ranks)
    assert stack.daemon_pid() == pid, "the daemon lives on"
    assert set(stack.head_pids().values()).isdisjoint(head.values())
    stack.client.resume(paused)
    wait_until("it starts", lambda: ledger.last_step(starting) > 0)
    wait_until("it resumes", stepping(ledger, paused, attempt=2))
    done.touch()
    for job_id in jobs:
        job = stack.wait(job_id)
        assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.failure
        lost = [event.body["reason"] for event in stack.client.events(job_id) if event.kind == "gang_lost"]
        assert not any("node" in reason for reason in lost), (
            f"{lost}: its only node is the head, no lease is waited for"
        )
    for job_id in (paused, starting):
        assert stack.wait(job_id).state == "SUCCEEDED"
    ledger.check()
    assert left_in_ray(stack) == []


@pytest.mark.rare
def test_a_raylet_that_is_stopped_for_good_is_replaced(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    """Ray's control store declares the node dead after some seconds, for good; every process of the head still exists."""
    stack, done = breakable, tmp_path / "done"
    job_id = submit(stack, ledger, tmp_path, ranks=2, until=str(done))
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    pid, head = stack.daemon_pid(), stack.head_pids()
    os.kill(head["raylet"], signal.SIGSTOP)
    wait_until(
        "it resumes",
        lambda: ledger.attempts(job_id)[-1] > 1 and stepping(ledger, job_id, ledger.attempts(job_id)[-1], 2)(),
    )
    assert stack.daemon_pid() == pid
    assert set(stack.head_pids().values()).isdisjoint(head.values())
    assert all(process_gone(one) for one in head.values()), "what is left of the first one is ended"
    done.touch()
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    ledger.check(job_id)


@pytest.mark.rare
def test_a_daemon_that_starts_beside_a_control_plane_that_only_seems_to_live(
    breakable: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    """After SIGTERM Ray's control store closes its port and never exits; the daemon must not wait for it."""
    stack, done = breakable, tmp_path / "done"
    job_id = submit(stack, ledger, tmp_path, ranks=2, until=str(done))
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    head = stack.head_pids()
    daemon = stack.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)  # else it would see the head's end first
    os.kill(head["gcs_server"], signal.SIGTERM)
    address = json.loads((stack.settings.paths.ray / "head.json").read_text())["gcs_address"]
    wait_until("its port is closed", lambda: not _listens(address))
    kill(daemon)
    wait_until("the daemon is dead", lambda: process_gone(daemon))
    stack.up()
    assert set(stack.head_pids().values()).isdisjoint(head.values())
    wait_until("the job resumes", stepping(ledger, job_id, attempt=2, ranks=2))
    done.touch()
    assert stack.wait(job_id).state == "SUCCEEDED"
    ledger.check(job_id)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.rare
def test_a_head_that_dies_again_while_it_comes_back(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, done = breakable, tmp_path / "done"
    job_id = submit(stack, ledger, tmp_path, ranks=2, until=str(done))
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    pid, first = stack.daemon_pid(), stack.head_pids()
    kill(first["gcs_server"])
    second = wait_until("there is another head", lambda: another_head(stack, first), interval=0.002)
    kill(second["raylet"])
    wait_until("it is noticed", lambda: another_head(stack, second) or process_gone(pid))
    if process_gone(pid):  # Ray ends a process whose raylet dies while it registers there: docs/operations/clusters.md
        stack.up()
        pid = stack.daemon_pid()
    wait_until("there is a third head", lambda: another_head(stack, second))
    wait_until("Ray is there for good", lambda: not stack.client.health().problems)

    def steps() -> bool:
        return stepping(ledger, job_id, attempt=stack.job(job_id).attempt, ranks=2)()  # the attempt may be a new one

    wait_until("the job steps", steps)
    assert stack.job(job_id).attempt > 1
    done.touch()
    assert stack.wait(job_id).state == "SUCCEEDED"
    assert stack.daemon_pid() == pid, "the daemon lives on"
    assert stack.client.health().problems == ()
    ledger.check(job_id)


@pytest.mark.rare
def test_a_server_of_others_at_the_dead_heads_port(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    """Another server takes the port of the dead head, and answers the daemon's calls with an error."""
    stack, done = breakable, tmp_path / "done"
    job_id = submit(stack, ledger, tmp_path, ranks=2, until=str(done))
    wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
    pid, head = stack.daemon_pid(), stack.head_pids()
    address = json.loads((stack.settings.paths.ray / "head.json").read_text())["gcs_address"]
    os.kill(head["gcs_server"], signal.SIGSTOP)
    starting = submit(stack, ledger, tmp_path, name="new", until=str(done))
    stack.wait_state(starting, "STARTING")
    kill(head["gcs_server"])
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    try:
        wait_until("the port is free", lambda: listens(server, address))
        server.start()
        wait_until("it resumes", stepping(ledger, job_id, attempt=2, ranks=2))
        wait_until("it starts", lambda: ledger.last_step(starting) > 0)
        done.touch()
        for name in (job_id, starting):
            assert stack.wait(name).state == "SUCCEEDED"
        assert stack.daemon_pid() == pid, "the daemon lives on"
        ledger.check()
    finally:
        server.stop(None)


def listens(server: grpc.Server, address: str) -> bool:
    try:
        return bool(server.add_insecure_port(address))
    except RuntimeError:
        return False


def another_head(stack: Stack, than: dict[str, int]) -> dict[str, int] | None:
    try:
        found = stack.head_pids()
    except (FileNotFoundError, ValueError):
        return None
    return found if found != than else None


@pytest.mark.parametrize("moment", ["at work", pytest.param("starting", marks=pytest.mark.rare)])
def test_a_power_cut_loses_no_job(
    breakable: Stack, ledger: Ledger, tmp_path: Path, dice: random.Random, moment: str
) -> None:
    stack, done = breakable, tmp_path / "done"
    whole = {"resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": os.cpu_count()}}}
    jobs = [submit(stack, ledger, tmp_path, name=f"j{i}", ranks=2, until=str(done)) for i in range(2)]
    waiting = submit(stack, ledger, tmp_path, name="waiting", steps=2, spec=whole)
    paused = submit(stack, ledger, tmp_path, name="paused", until=str(done))
    if moment == "at work":
        for job_id in jobs:
            wait_until(f"{job_id} saves", lambda job_id=job_id: ledger.last_step(job_id, 1) >= 6)
        stack.client.pause(paused)
        draining = submit(stack, ledger, tmp_path, name="draining", until=str(done), deaf=True)
        stack.wait_state(draining, "RUNNING")
        stack.client.cancel(draining)
    else:
        wait_until("some have begun to start", lambda: dice.random() < 0.02 or ledger.jobs())
    cut = stack.daemon_pid()
    stack.kill_everything()
    begun = {job_id: len(ledger.attempts(job_id)) for job_id in jobs}
    assert stack.up()["pid"] != cut
    for job_id in jobs:
        wait_until(
            f"{job_id} steps again",
            lambda job_id=job_id: (
                len(ledger.attempts(job_id)) > begun[job_id]
                and stepping(ledger, job_id, attempt=ledger.attempts(job_id)[-1], ranks=2)()
            ),
        )
    if moment == "at work":
        assert stack.job(jobs[0]).attempt == 2
        assert stack.wait(draining).state == "CANCELLED"
        assert all(ledger.resumed(job_id, 2) >= 5 for job_id in jobs), "from a checkpoint, not from the beginning"
        stack.client.resume(paused)
    done.touch()
    for job_id in (*jobs, waiting, paused):
        job = stack.wait(job_id)
        assert job.state == "SUCCEEDED", (job.name, job.failure)
    ledger.check()
    assert left_in_ray(stack) == []
    assert of_cwd(stack.settings.paths.jobs) == []
