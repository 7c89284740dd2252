"""A rank's plan: the request for its process is made from it, and it is compatible across versions."""

from __future__ import annotations

import pickle
from base64 import b64decode
from dataclasses import fields, replace

from orchestrator.runtime.forkserver.request import SpawnRequest, parse
from orchestrator.runtime.ranks.launch_spec import RankPlan

PLAN_OF_AN_EARLIER_VERSION = b64decode(
    b"gAWVPQEAAAAAAACMJm9yY2hlc3RyYXRvci5ydW50aW1lLnJhbmtzLmxhdW5jaF9zcGVjlIwIUmFua1BsYW6Uk5QpgZRdlCiMCmpv"
    b"Yi1hYWFhYWGUSwJLAYwGc2NyaXB0lIwIdHJhaW4ucHmUjAQtLWxylIwBMZSGlIwCLXWUhZSMBS93b3JrlH2UjAFBlIwBYpRzSwOI"
    b"jBAvdXNyL2Jpbi9weXRob24zlIwGL3RtcC9zlIwFL2xvZ3OUjA0vZXhpdHMvMS5qc29ulIwKL2Rldi9zaG0vcJRLB0sIjANwaXCU"
    b"hZROTowEc3RlcJSMAXiUjARmYWlslIaUhZSMBGh1c2iUhZRLEowfb3JjaGVzdHJhdG9yLnJ1bnRpbWUucmFua3MubG9nc5SMCUxv"
    b"Z0xpbWl0c5STlCmBlF2UKEoAAAAESwJlYmViLg=="
)
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


def test_an_actor_of_an_earlier_version_takes_a_plan_of_this_one() -> None:
    """It reads the values in the order of its own fields, and ignores those that follow."""

    class Unpickler(pickle._Unpickler):
        """Reads the state that an instance is given, without the instance."""

        def find_class(self, module: str, name: str) -> object:
            return Given if name == "RankPlan" else super().find_class(module, name)

    class Given:
        def __setstate__(self, state: list[object]) -> None:
            self.state = tuple(state)

    def state_of(pickled: bytes) -> object:
        import io

        return Unpickler(io.BytesIO(pickled)).load().state

    assert state_of(pickle.dumps(PLAN)) == state_of(PLAN_OF_AN_EARLIER_VERSION)


def test_a_plan_arrives_as_it_was() -> None:
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert pickle.loads(PLAN_OF_AN_EARLIER_VERSION) == PLAN
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
