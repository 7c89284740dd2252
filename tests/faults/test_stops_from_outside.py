"""SIGTERM that orch did not send: whichever process gets it, however the script ends, the job runs to its real end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.nodes.directories import namespace, page_directory
from orchestrator.runtime.spawn.client import read_exit_record
from tests.support.ledger import SCRIPT, TINY, Ledger, job_spec
from tests.support.processes import parent, tree
from tests.support.stack import Stack, process_gone, wait_until

STEPS = 60
BUDGET = {"retry": {"max_restarts": {"user": 0, "infra": 3}}}

# A script that does not use orch: it keeps its step in a file of its own, and treats SIGTERM as its argument says.
PLAIN = """
import json, os, signal, sys, time
style, steps, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stopping = False

def handle(number, frame):
    global stopping
    stopping = True
    if style == "raise":
        raise RuntimeError("told to stop")

if style != "default":
    signal.signal(signal.SIGTERM, handle)
    assert signal.getsignal(signal.SIGTERM) is handle
step = int(open(file).read()) if os.path.exists(file) else 0
with open(file + ".starts", "a") as starts:
    starts.write(f"{os.getpid()} {step}\\n")
while step < steps and not os.path.exists(file + ".done"):
    time.sleep(0.05)
    step += 1
    with open(file + ".new", "w") as new:
        new.write(str(step))
    os.replace(file + ".new", file)
    print(f"step {step}/{steps}", flush=True)
    if stopping and style != "late":
        sys.exit(int(style))
while style == "late" and not stopping:
    time.sleep(0.01)
"""


def failures(stack: Stack, job_id: str) -> list[dict[str, object]]:
    """Return the failure of each failed attempt, as its event records it."""
    return [e.body["failure"] for e in stack.client.events(job_id) if e.kind == "attempt_failed"]


def terminate(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def submit(stack: Stack, ledger: Ledger, directory: Path, **options: object) -> str:
    job = {"steps": STEPS, "seconds": 0.05, "spec": BUDGET, **options}
    return stack.submit(job_spec(ledger, **job), directory / "work", train=SCRIPT)  # type: ignore[arg-type]


def ranks_at(ledger: Ledger, job_id: str, step: int, attempt: int = 1, ranks: int = 1) -> list[int]:
    """Return the process ids of the ranks, once each has done that step."""

    def there() -> bool:
        lines = [line for line in ledger.lines(job_id) if line.attempt == attempt and line.what == "step"]
        return all(any(line.rank == rank and line.step >= step for line in lines) for rank in range(ranks))

    wait_until(f"{job_id} does step {step}", there)
    pids = ledger.pids(job_id, attempt)
    return [pids[rank] for rank in range(ranks)]


def stopped_at(ledger: Ledger, job_id: str) -> int:
    return max(line.step for line in ledger.lines(job_id) if line.what == "stopped")


@pytest.mark.parametrize(
    ("whom", "code"),
    [("one rank", 143), pytest.param("every rank", 0, marks=pytest.mark.rare), ("ranks and keepers", 0)],
)
def test_the_documented_loop_is_resumed_where_it_left(
    stack: Stack, ledger: Ledger, tmp_path: Path, dice: random.Random, code: int, whom: str
) -> None:
    job_id = submit(stack, ledger, tmp_path, ranks=2, collective=True, stop_code=code)
    pids = ranks_at(ledger, job_id, 6, ranks=2)
    keepers = [parent(pid) for pid in pids]
    terminate(*{"one rank": [dice.choice(pids)], "every rank": pids, "ranks and keepers": [*pids, *keepers]}[whom])
    job = stack.wait(job_id)
    expected = "preemption" if whom == "ranks and keepers" else "infra"
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {expected: 1}), job.failure
    (failure,) = failures(stack, job_id)
    assert failure["code"] == "stopped_from_outside"
    assert ledger.resumed(job_id, 2) == stopped_at(ledger, job_id) < STEPS
    assert ledger.last_step(job_id) == STEPS
    ledger.check(job_id)


@pytest.mark.rare
def test_the_exit_record_says_why_a_rank_left_and_how_far_it_was(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    job_id = submit(stack, ledger, tmp_path)
    (pid,) = ranks_at(ledger, job_id, 6)
    terminate(pid)
    assert stack.wait(job_id).state == "SUCCEEDED"
    first, second = (
        read_exit_record(stack.settings.paths.exit_record(job_id, attempt, 0))  # type: ignore[arg-type]
        for attempt in (1, 2)
    )
    assert first is not None
    assert (first.exit_code, first.cause) == (0, None)
    assert first.started_at < (first.ending.stop_seen_at or 0.0) <= first.ended_at
    assert first.ending.keeper_terminated_at is None
    assert (first.ending.last_step, first.ending.total_steps) == (stopped_at(ledger, job_id), STEPS)
    assert second is not None
    assert (second.ending.stop_seen_at, second.ending.last_step) == (None, STEPS)


def plain(style: str, file: Path, *, entrypoint: str = "", **spec: object) -> str:
    arguments = f"{style} {STEPS} {shlex.quote(str(file))}"
    return json.dumps(
        {
            "version": 1,
            "name": f"plain-{style}",
            "entrypoint": entrypoint or f"python train.py {arguments}",
            "resources": {"num_workers": 1, "resources_per_worker": TINY},
            **BUDGET,
            **spec,
        }
    )


def starts(file: Path) -> list[tuple[int, int]]:
    """Return process id and first step of each start of the plain script."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path(f"{file}.starts").read_text().splitlines()
        return [(int(pid), int(step)) for pid, step in (line.split() for line in lines)]
    return []


def at_step(file: Path, step: int) -> int:
    """Return the process id of the plain script, once it has done that step."""
    wait_until("it has done some steps", lambda: file.exists() and int(file.read_text()) >= step)
    return starts(file)[-1][0]


@pytest.mark.rare
def test_a_rank_that_is_killed_after_its_keeper_was_terminated_has_failed(
    stack: Stack, ledger: Ledger, tmp_path: Path
) -> None:
    """No request to stop has reached the other rank, so it does not get the five minutes of a stop to save."""
    job_id = submit(stack, ledger, tmp_path, ranks=2)
    wait_until("it steps", lambda: ledger.last_step(job_id) >= 5)
    pid = ledger.pids(job_id, 1)[1]
    terminate(parent(pid))
    step = ledger.last_step(job_id)
    wait_until("its keeper does not mind", lambda: ledger.last_step(job_id) > step)
    os.kill(pid, signal.SIGKILL)
    job = stack.wait(job_id)
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.reason
    (failure,) = failures(stack, job_id)
    assert (failure["rank"], failure["signal"]) == (1, signal.SIGKILL)
    assert "a request to stop" not in str(failure["sentence"])
    ledger.check(job_id)


@pytest.mark.parametrize(
    "style", [*(pytest.param(style, marks=pytest.mark.rare) for style in ("0", "143", "1", "raise")), "default"]
)
def test_a_script_that_knows_nothing_of_orch_is_resumed(stack: Stack, tmp_path: Path, style: str) -> None:
    file = tmp_path / "step"
    job_id = stack.submit(plain(style, file), tmp_path / "work", train=PLAIN)
    terminate(at_step(file, 6))
    job = stack.wait(job_id)
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.failure
    assert [step > 0 for _, step in starts(file)] == [False, True]


@pytest.mark.rare
def test_a_shell_script_whose_child_died_of_it_is_resumed(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "step"
    (tmp_path / "work").mkdir()
    (tmp_path / "work/run.sh").write_text(
        f"{sys.executable} train.py default {STEPS} {shlex.quote(str(file))}\nexit $?\n"
    )
    job_id = stack.submit(plain("default", file, entrypoint="bash run.sh"), tmp_path / "work", train=PLAIN)
    terminate(at_step(file, 6))
    job = stack.wait(job_id)
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"infra": 1}), job.failure
    (failure,) = failures(stack, job_id)
    assert (failure["exit_code"], failure["code"]) == (143, "stopped_from_outside")


@pytest.mark.rare
def test_a_shell_script_that_ends_with_0_while_its_node_shuts_down_is_resumed(stack: Stack, tmp_path: Path) -> None:
    """orch cannot see a signal arrive in a program that the keeper executes, but the keeper gets the signal too."""
    file = tmp_path / "step"
    (tmp_path / "work").mkdir()
    script = f"{sys.executable} train.py 0 {STEPS} {shlex.quote(str(file))} & wait $!; exit 0\n"
    (tmp_path / "work/run.sh").write_text(f"trap 'kill %1; wait; exit 0' TERM\n{script}")
    job_id = stack.submit(plain("0", file, entrypoint="bash run.sh"), tmp_path / "work", train=PLAIN)
    shell = psutil.Process(at_step(file, 6)).parent()
    assert shell is not None
    terminate(parent(shell.pid), shell.pid)
    job = stack.wait(job_id)
    assert (job.state, job.attempt, job.restarts_by_class) == ("SUCCEEDED", 2, {"preemption": 1}), job.failure


def test_an_order_of_orch_is_none_from_outside(stack: Stack, ledger: Ledger, tmp_path: Path) -> None:
    """Cancel and pause end in their states, even if SIGTERM came from elsewhere just before."""
    jobs = [submit(stack, ledger, tmp_path, name=f"j{i}", steps=100_000) for i in range(2)]
    pids = [ranks_at(ledger, job_id, 6)[0] for job_id in jobs]
    terminate(*pids)
    stack.client.pause(jobs[0])
    stack.client.cancel(jobs[1])
    stack.wait_state(jobs[0], "SUSPENDED")
    assert stack.wait(jobs[1]).state == "CANCELLED"
    stack.client.cancel(jobs[0])
    assert stack.wait(jobs[0]).state == "CANCELLED"
    ledger.check(*jobs)


KINDS: list[dict[str, object]] = [
    {"stop_code": 0, "stop_seconds": 3},
    {"ranks": 2, "collective": True, "stop_code": 143},
]
"""Options of jobs that save when they are told to stop."""


def started(
    stack: Stack, ledger: Ledger, tmp_path: Path, kinds: list[dict[str, object]], styles: tuple[str, ...]
) -> tuple[list[str], dict[str, Path]]:
    """Start jobs of these kinds, and plain scripts; return the jobs' ids, and the scripts' ids with their files."""
    ends = {"steps": None, "until": str(tmp_path / "done")}  # none ends before the last has started
    jobs = [submit(stack, ledger, tmp_path, name=f"k{i}", **{**kind, **ends}) for i, kind in enumerate(kinds)]
    files = {}
    for style in styles:
        file = tmp_path / f"step-{style}"
        spec = plain(style, file).replace(f" {STEPS} ", " 1000000 ")
        files[stack.submit(spec, tmp_path / "work", train=PLAIN)] = file
    for job_id, kind in zip(jobs, kinds, strict=True):
        ranks_at(ledger, job_id, 6, ranks=int(kind.get("ranks", 1)))  # type: ignore[call-overload]
    for file in files.values():
        at_step(file, 6)
    return jobs, files


def check_all(stack: Stack, ledger: Ledger, tmp_path: Path, jobs: list[str], files: dict[str, Path]) -> None:
    for job_id in jobs:
        wait_until(f"{job_id} is there again", lambda job_id=job_id: len(ledger.attempts(job_id)) > 1)
    for job_id, file in files.items():
        wait_until(f"{job_id} is there again", lambda file=file: len(starts(file)) > 1)
        Path(f"{file}.done").touch()
    (tmp_path / "done").touch()
    for job_id in (*jobs, *files):
        job = stack.wait(job_id)
        assert job.state == "SUCCEEDED", (job.name, job.failure)
        assert set(job.restarts_by_class) <= {"preemption", "infra"}
    for job_id in jobs:
        left = stopped_at(ledger, job_id)
        assert left >= 6
        assert ledger.resumed(job_id, ledger.attempts(job_id)[1]) == left, "at its last step"
    for file in files.values():
        assert starts(file)[1][1] >= 6
    ledger.check(*jobs)


@pytest.mark.rare
def test_everything_but_the_daemon_is_told_to_stop(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack = breakable
    jobs, files = started(stack, ledger, tmp_path, [{"stop_code": 143}, *KINDS[1:]], ("0", "default"))
    daemon = stack.daemon_pid()
    terminate(*(process.pid for process in stack.processes() if process.pid != daemon))
    check_all(stack, ledger, tmp_path, jobs, files)
    assert stack.daemon_pid() == daemon


@pytest.mark.rare
def test_the_machine_shuts_down_with_a_grace_of_some_seconds(breakable: Stack, ledger: Ledger, tmp_path: Path) -> None:
    stack = breakable
    jobs, files = started(stack, ledger, tmp_path, KINDS, ("default",))
    ranks = [pid for job_id in jobs for pid in ledger.pids(job_id, 1).values()]
    everything = tree(*(process.pid for process in stack.processes()))
    terminate(*everything)
    wait_until("the ranks have ended", lambda: all(process_gone(pid) for pid in ranks))
    stack.kill_everything()
    shutil.rmtree(page_directory(namespace(stack.home)))  # shared memory is empty after a boot
    shutil.rmtree(stack.node_root)
    stack.up()
    check_all(stack, ledger, tmp_path, jobs, files)
