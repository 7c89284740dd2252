"""A rank's plan: the request for its process is made from it."""

from __future__ import annotations

from dataclasses import fields, replace

from orchestrator.core.codec import from_bytes, to_bytes
from orchestrator.runtime.forkserver.wire import SpawnRequest, parse
from orchestrator.runtime.ranks.launch_spec import RankPlan

PLAN = RankPlan(
    job_id="job-aaaaaa",
    attempt=2,
    rank=1,
    mode="script",
    target="train.py",
    args=("--lr", "1"),
    python_options=("-u",),
    cwd="/work",
    env={"A": "b"},
    threads=3,
    cold=True,
    python="/usr/bin/python3",
    fork_socket="/tmp/s",
    log_dir="/logs",
    exit_record="/exits/1.json",
    page="/dev/shm/p",
    previous_step=7,
    memory_bytes=8,
    runtime_env=("pip",),
    progress_pattern="step",
    log_policies=(("x", "fail"),),
    secrets=("hush",),
    umask=18,
)


def test_a_plan_arrives_as_it_was() -> None:
    env = {"A": "b", "NOT_UTF8": "\udcff"}
    plan = replace(PLAN, env=env, args=["--lr", "1"], python_options=["-u"], secrets=["hush"])
    assert from_bytes(RankPlan, to_bytes(plan)) == plan
    assert replace(PLAN, rank=3).record == {"job": "job-aaaaaa", "attempt": 2, "rank": 3}


def test_the_fork_server_understands_what_a_plan_asks_for() -> None:
    message, descriptors = PLAN.message({"stdout": 4, "stderr": 5, "lifeline": 6, "lease": 7})
    assert not {"job_id", "log_dir", "python", "fork_socket"} & message.keys(), "what the process is not for"
    spawn = parse({**message, "args": list(PLAN.args), "python_options": ["-u"], "secrets": ["hush"]}, descriptors)
    asked = {f.name: getattr(spawn, f.name) for f in fields(SpawnRequest)}
    assert asked == {f.name: getattr(PLAN, f.name) for f in fields(SpawnRequest)}
    assert (spawn.stdout, spawn.stderr, spawn.lifeline, spawn.lease, spawn.listen) == (4, 5, 6, 7, None)


def test_a_plan_does_not_show_what_is_secret() -> None:
    assert "hush" not in repr(PLAN)
    assert "env" not in repr(PLAN).replace("runtime_env", "")
