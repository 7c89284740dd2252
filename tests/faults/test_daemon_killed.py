"""The daemon is killed with jobs in every state, and faults occur while it is down: jobs step on, nothing runs twice."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import actor_pids, all_gone, command_line, kill_each
from tests.support.stack import Stack, wait_until


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: object) -> str:
    return stack.submit(job_spec(ledger, **options), directory / "work", train=SCRIPT)  # type: ignore[arg-type]


def steps_on(ledger: Ledger, job_id: str, by: int = 5) -> None:
    seen = ledger.last_step(job_id)
    wait_until(f"{job_id} steps on", lambda: ledger.last_step(job_id) >= seen + by)


def test_a_job_in_every_state_outlives_the_daemon(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, done = breakable, tmp_path / "done"
    whole = {"resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": os.cpu_count()}}}
    deaf = {"stop_duration": "5s"}
    backoff = {"retry": {"max_restarts": {"infra": 5}, "backoff": {"initial": "4s", "max": "4s"}}}
    crashes = [{"attempt": attempt, "step": 2, "kind": "sigkill"} for attempt in (1, 2)]

    running = submit(stack, ledger, tmp_path, name="running", ranks=2, until=str(done))
    draining = submit(stack, ledger, tmp_path, name="draining", until=str(done), deaf=True, spec=deaf)
    suspended = submit(stack, ledger, tmp_path, name="suspended", until=str(done))
    recovering = submit(stack, ledger, tmp_path, name="recovering", until=str(done), faults=crashes, spec=backoff)
    for job_id in (running, draining, suspended):
        wait_until(f"{job_id} steps", lambda job_id=job_id: ledger.last_step(job_id) >= 6)
    stack.client.pause(suspended)
    stack.wait_state(suspended, "SUSPENDED")
    pending = submit(stack, ledger, tmp_path, name="pending", steps=3, spec=whole)
    stack.client.cancel(draining)
    wait_until("it waits for its second restart", lambda: ledger.attempts(recovering) == [1, 2])
    stack.wait_state(recovering, "RECOVERING")
    starting = submit(stack, ledger, tmp_path, name="starting", ranks=2, until=str(done))
    stack.kill_daemon()

    steps_on(ledger, running)
    stack.up()
    states = {job.id: job.state for job in stack.client.jobs().jobs}
    assert states[pending] == "PENDING"
    assert states[suspended] == "SUSPENDED"
    assert states[running] == "RUNNING"
    assert states[draining] in ("DRAINING", "CANCELLED")
    assert states[recovering] in ("RECOVERING", "STARTING", "RUNNING")
    assert states[starting] in ("STARTING", "RUNNING")
    stack.client.resume(suspended)
    for job_id, attempts in ((running, 1), (suspended, 2), (recovering, 3), (starting, 1)):
        wait_until(
            f"{job_id} steps in attempt {attempts}",
            lambda job_id=job_id, attempts=attempts: any(
                line.attempt == attempts and line.what == "step" for line in ledger.lines(job_id)
            ),
        )
    assert stack.wait(draining).state == "CANCELLED"
    done.touch()
    for job_id, attempts in ((running, 1), (suspended, 2), (recovering, 3), (starting, 1), (pending, 1)):
        job = stack.wait(job_id)
        assert (job.state, job.attempt) == ("SUCCEEDED", attempts), (job.name, job.failure)
    ledger.check()


_DIES_BEFORE_TIDYING = """
import os, signal
from orchestrator.cli.main import main
from orchestrator.daemon.bootstrap import JobObservers

JobObservers.ended = lambda self, job: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


@pytest.mark.rare
def test_a_daemon_that_dies_between_the_end_of_a_job_and_its_tidying_leaves_nothing_for_ever(
    breakable: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    stack, done = breakable, tmp_path / "done"
    stack.environ["A_SECRET"] = "hush"
    job_id = submit(stack, ledger, tmp_path, until=str(done), spec={"secrets": ["A_SECRET"]})
    wait_until("it steps", lambda: ledger.last_step(job_id) >= 6)
    left = stack.leftovers(job_id)
    assert stack.settings.paths.secrets(job_id) in left
    (node,) = stack.client.nodes()
    stack.client.node_action(node.name, "cordon")
    stack.kill_daemon()
    dying = stack.serve(program=_DIES_BEFORE_TIDYING)
    wait_until("the job is adopted", stack.answers)
    done.touch()
    assert dying.wait(300) == -signal.SIGKILL
    assert stack.settings.paths.secrets(job_id) in stack.leftovers(job_id)

    stack.up()
    assert stack.job(job_id).state == "SUCCEEDED"
    assert stack.leftovers(job_id) == []
    assert [n.state for n in stack.client.nodes()] == ["CORDONED"], "by what was said to a daemon before the last"
    stack.client.node_action(node.name, "uncordon")
    ledger.check()


def test_down_with_stop_jobs_ends_soon_and_the_next_daemon_goes_on_and_knows_everything(
    breakable: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    """On another head of Ray, the last report of an ended job and the cordon of a node are kept."""
    stack, done = breakable, tmp_path / "done"
    ended_before = submit(stack, ledger, tmp_path, name="ended", steps=10)
    job_id = submit(stack, ledger, tmp_path, ranks=2, until=str(done))
    before = stack.wait(ended_before)
    assert before.state == "SUCCEEDED"
    assert before.progress is not None
    wait_until("it steps", lambda: ledger.last_step(job_id) >= 6)
    pids = stack.pids(job_id)
    (node,) = stack.client.nodes()
    stack.client.node_action(node.name, "cordon")
    ended = stack.orch("down", "--stop-jobs")
    assert (ended.returncode, job_id in ended.stderr) == (0, True), ended.stderr
    all_gone("the job's ranks", pids)
    last_step = ledger.last_step(job_id)
    stack.up()
    (again,) = stack.client.nodes()
    assert again.id != node.id
    assert again.state == "CORDONED"
    stack.client.node_action(node.name, "uncordon")
    assert [n.state for n in stack.client.nodes()] == ["READY"]

    found = stack.job(ended_before).progress
    assert found is not None
    assert (found.step, found.total_steps, found.metrics) == (
        before.progress.step,
        before.progress.total_steps,
        before.progress.metrics,
    )
    assert {job.id: job.progress for job in stack.client.jobs().jobs}[ended_before] == found

    wait_until("it goes on", lambda: ledger.last_step(job_id) > last_step)
    assert ledger.resumed(job_id, 2) > 0, "from what it saved"
    done.touch()
    job = stack.wait(job_id)
    assert (job.state, job.attempt, job.restarts) == ("SUCCEEDED", 2, 0), job.failure
    ledger.check()


@pytest.mark.rare
def test_whatever_happens_while_the_daemon_is_away(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack, go, over = breakable, tmp_path / "go", tmp_path / "over"
    ends = {"until": str(go), "ranks": 2}
    fails = [{"file": str(go), "kind": "exception"}]
    crashes = [{"file": str(go), "kind": "sigkill", "rank": 1}]

    ending = submit(stack, ledger, tmp_path, name="ending", **ends)
    ended_then_lost = submit(stack, ledger, tmp_path, name="lost", **ends)
    failing = submit(stack, ledger, tmp_path, name="failing", faults=fails)
    crashing = submit(stack, ledger, tmp_path, name="crashing", ranks=2, faults=crashes, until=str(over))
    losing = submit(stack, ledger, tmp_path, name="losing", ranks=2, until=str(over))
    everyone = (ending, ended_then_lost, failing, crashing, losing)
    for job_id in everyone:
        wait_until(f"{job_id} steps", lambda job_id=job_id: ledger.last_step(job_id) >= 6)
    actors = {job_id: actor_pids(stack, job_id) for job_id in everyone}
    stack.kill_daemon()

    go.touch()
    for job_id in (ending, ended_then_lost):
        wait_until(f"{job_id} ends", lambda job_id=job_id: ledger.ended(job_id, ranks=2))
    for job_id in (failing, crashing):
        wait_until(f"{job_id} fails", lambda job_id=job_id: any(x.what == "fault" for x in ledger.lines(job_id)))
    records = stack.settings.paths
    wait_until("exits are on record", lambda: all(records.exit_record(ended_then_lost, 1, r).exists() for r in (0, 1)))
    kill_each(*actors[ended_then_lost], actors[losing][0])
    stack.up()

    for job_id in (ending, ended_then_lost):
        job = stack.wait(job_id)
        assert (job.state, job.attempt, job.restarts) == ("SUCCEEDED", 1, 0), job.failure
    failed = stack.wait(failing)
    assert (failed.state, failed.exit_code) == ("FAILED", 1)
    assert failed.failure is not None
    assert failed.failure.sentence == "rank 0 raised ValueError: a fault of the schedule"
    assert "rank 0 suffers exception" in "\n".join(failed.failure.log_tail)
    for job_id in (crashing, losing):
        wait_until("it goes on", lambda job_id=job_id: ledger.attempts(job_id) == [1, 2])
    over.touch()
    for job_id in (crashing, losing):
        job = stack.wait(job_id)
        assert (job.state, job.attempt) == ("SUCCEEDED", 2), job.failure
        assert job.restarts_by_class == {"infra": 1}
    assert stack.job(crashing).attempts[0].reason == "rank 1 was killed by SIGKILL"
    ledger.check()


@pytest.mark.rare
def test_a_half_started_ray_is_not_left_behind_and_two_who_start_the_daemon_at_once_get_one() -> None:
    """The daemon dies before it records which Ray it has begun to start; then two users run ``orch up``."""
    stack = Stack()

    def started(name: str) -> list[int]:
        return [p.pid for p in stack.processes() if program_of(p).endswith(name)]

    try:
        daemon = stack.serve()
        strays = wait_until("the head is half started", lambda: started("raylet")) + started("gcs_server")
        daemon.kill()
        daemon.wait()
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: stack.up(), range(2))
        assert first["pid"] == second["pid"]
        all_gone("the head that nobody knew", strays)
        assert len(started("gcs_server")) == 1
        assert len(started("raylet")) == 1
    finally:
        stack.close()


def program_of(process: psutil.Process) -> str:
    return next(iter(command_line(process)), "")
