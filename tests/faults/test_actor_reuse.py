"""A job reuses the actors of a job that succeeded, and nothing else of it; whichever process dies, every job still runs once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.support.processes import actor_pids, all_gone
from tests.support.stack import Stack, wait_until

MOST_PAIRS = 40  # each takes a second; on a busy machine too, one in a few reuses the actors
TELL = """import json, os, sys
fds = sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}"))
print(json.dumps({"env": dict(os.environ), "files": fds, "cwd": os.getcwd()}))
"""
WAIT = """import os, sys, time
open(sys.argv[1] + ".up", "a").write(os.environ["ORCH_ATTEMPT"] + "\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def submit(stack: Stack, directory: Path, name: str, script: str, *args: str, cpu: float = 0.1, **keys: Any) -> str:
    worker = {"gpu": 0, "cpu": cpu}
    spec = {
        "version": 1,
        "name": name,
        "entrypoint": " ".join(["python train.py", *args]),
        "resources": {"num_workers": keys.pop("ranks", 1), "resources_per_worker": worker},
        **keys,
    }
    return stack.submit(json.dumps(spec), directory / name, train=script)


def run(stack: Stack, directory: Path, name: str, script: str, **keys: Any) -> str:
    job_id = submit(stack, directory, name, script, **keys)
    job = stack.wait(job_id)
    assert (job.state, job.attempt) == ("SUCCEEDED", 1), job.failure
    wait_until("its gang is parked or removed", lambda: is_released(stack, job_id))
    return job_id


def is_released(stack: Stack, job_id: str) -> bool:
    """Return whether the gang no longer serves the job: another job can use it."""
    return any(event.kind == "gang_released" for event in stack.client.events(job_id))


def told(log: str) -> Any:
    """Return what the script ``TELL`` printed, parsed as JSON."""
    return json.loads(log[log.index("{") : log.rindex("}") + 1])


def links(stack: Stack) -> list[str]:
    folder = stack.settings.paths.ray / "gangs"
    return sorted(link.name for link in folder.iterdir()) if folder.exists() else []


def follow_until_taken(stack: Stack, folder: Path) -> tuple[str, str]:
    """Run pairs of jobs until the second reuses the actors of the first: a gang is kept only if its ends are all confirmed soon."""
    for number in range(MOST_PAIRS):
        first = run(stack, folder, f"first{number}", TELL, ranks=2, env={"FIRST": "its own"})
        second = run(stack, folder, f"second{number}", TELL, ranks=2, env={"SECOND": "its own"})
        if actor_pids(stack, second) == actor_pids(stack, first):
            return first, second
    raise AssertionError(f"{MOST_PAIRS} times a job had actors of its own right behind another")


def waiting_on_taken_actors(stack: Stack, folder: Path) -> tuple[str, str, Path]:
    """Run pairs of jobs as above, but return while the second runs: both jobs, and the file that ends the second."""
    for number in range(MOST_PAIRS):
        first = run(stack, folder, f"first{number}", "pass")
        end = folder / f"end{number}"
        second = submit(stack, folder, f"second{number}", WAIT, str(end))
        wait_until("it runs", Path(f"{end}.up").exists)
        stack.wait_state(second, "RUNNING")
        if actor_pids(stack, second) == actor_pids(stack, first):
            return first, second, end
        end.touch()
        stack.wait(second)
        wait_until("its gang is parked or removed", lambda job_id=second: is_released(stack, job_id))
    raise AssertionError(f"{MOST_PAIRS} times a job had actors of its own right behind another")


def run_until_parked(stack: Stack, folder: Path, *, ranks: int = 1) -> str:
    """Run jobs until the gang of one is parked, and return that job; first wait until earlier gangs are removed."""
    wait_until("what was parked is removed", lambda: not links(stack))
    for number in range(MOST_PAIRS):
        job_id = run(stack, folder, f"first{number}", "pass", ranks=ranks)
        if f"{job_id}-g1.parked" in links(stack):
            return job_id
    raise AssertionError(f"{MOST_PAIRS} times a gang was not parked")


def test_the_next_job_has_the_actors_and_nothing_of_the_job_before(breakable: Stack, tmp_path: Path) -> None:
    first, second = follow_until_taken(breakable, tmp_path)
    for rank in (0, 1):
        said = told(breakable.log(second, rank=rank))
        assert said["env"]["SECOND"] == "its own"
        assert "FIRST" not in said["env"]
        assert first not in json.dumps(said), "neither in a variable nor behind a descriptor"
        assert second in said["cwd"]


def test_jobs_with_secrets_and_jobs_that_failed_leave_no_actor(breakable: Stack, tmp_path: Path) -> None:
    failed = submit(breakable, tmp_path, "failed", "raise SystemExit(3)")
    assert breakable.wait(failed).state == "FAILED"
    after = run(breakable, tmp_path, "after", "pass")
    assert actor_pids(breakable, after) != actor_pids(breakable, failed)
    other = run(breakable, tmp_path, "other", "pass", cpu=0.2)
    assert actor_pids(breakable, other) != actor_pids(breakable, after), "another reservation"


def test_a_job_that_finds_no_room_beside_a_parked_gang_gets_it(breakable: Stack, tmp_path: Path) -> None:
    small = run(breakable, tmp_path, "small", "pass")
    actors = actor_pids(breakable, small)
    whole = sum(node.cpus_total for node in breakable.client.nodes())
    run(breakable, tmp_path, "whole", "pass", cpu=whole)
    all_gone("the parked actor", actors)
    assert not [link for link in links(breakable) if link.startswith(small)]


def test_a_daemon_that_is_killed_finds_the_job_that_runs_on_reused_actors(breakable: Stack, tmp_path: Path) -> None:
    stack = breakable
    first, second, end = waiting_on_taken_actors(stack, tmp_path)
    stack.kill_daemon()
    stack.up()
    assert stack.job(second).state == "RUNNING"
    end.touch()
    job = stack.wait(second)
    assert (job.state, job.attempt) == ("SUCCEEDED", 1), job.failure
    assert Path(f"{end}.up").read_text() == "1\n", "it was started once"
    all_gone("the actor that an earlier daemon created", actor_pids(stack, second))
    assert not [link for link in links(stack) if link.startswith((first, second))]


def test_what_a_killed_daemon_parked_is_removed_and_not_taken(breakable: Stack, tmp_path: Path) -> None:
    first = run_until_parked(breakable, tmp_path)
    breakable.kill_daemon()
    breakable.up()
    second = run(breakable, tmp_path, "second", "pass")
    assert actor_pids(breakable, second) != actor_pids(breakable, first)
    all_gone("the parked actor", actor_pids(breakable, first))
    assert f"{first}-g1.parked" not in links(breakable)


def test_what_a_killed_daemon_parked_is_freed_though_no_job_follows(breakable: Stack, tmp_path: Path) -> None:
    first = run_until_parked(breakable, tmp_path)
    breakable.kill_daemon()
    breakable.up()
    wait_until("what was parked is removed", lambda: not links(breakable))
    all_gone("the parked actor", actor_pids(breakable, first))


def test_a_parked_actor_that_was_killed_costs_no_attempt(breakable: Stack, tmp_path: Path) -> None:
    first = run_until_parked(breakable, tmp_path, ranks=2)
    os.kill(actor_pids(breakable, first)[1], signal.SIGKILL)
    second = run(breakable, tmp_path, "second", "pass", ranks=2)
    assert not set(actor_pids(breakable, second)) & set(actor_pids(breakable, first))


def test_a_reused_actor_that_is_killed_loses_its_job_and_no_other(breakable: Stack, tmp_path: Path) -> None:
    stack = breakable
    first, second, end = waiting_on_taken_actors(stack, tmp_path)
    os.kill(actor_pids(stack, first)[0], signal.SIGKILL)
    wait_until("it runs again", lambda: Path(f"{end}.up").read_text() == "1\n2\n")
    end.touch()
    job = stack.wait(second)
    assert (job.state, job.attempt) == ("SUCCEEDED", 2), job.failure
    assert stack.job(first).state == "SUCCEEDED"
    assert not [link for link in links(stack) if link.startswith(first)]
