"""Commands, shells and ports beside a running rank, against a real daemon: how users use them, and how they end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import PATIENCE_SECONDS, Stack, process_gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = """
import http.server, os, threading, time
if os.environ["RANK"] == "0":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    with open("port.tmp", "w") as file:
        file.write(str(server.server_port))
    os.rename("port.tmp", "port")
    threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(600)
"""
SPEC = {
    "version": 1,
    "name": "entered",
    "entrypoint": "python train.py",
    "env": {"FLAVOUR": "vanilla"},
    "secrets": ["ENTER_TOKEN"],
    "stop_duration": "1s",
    "health": {"on_hang": "notify"},
    "resources": {"num_workers": 2, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
}


@pytest.fixture
def job(stack: Stack, tmp_path: Path) -> Iterator[str]:
    stack.client._environ = {**stack.client._environ, "ENTER_TOKEN": "the-secret-value"}
    job_id = stack.submit(json.dumps(SPEC), tmp_path, train=SCRIPT)
    stack.wait_state(job_id, "RUNNING")
    yield job_id
    stack.client.cancel(job_id)
    stack.wait(job_id)


def started(stack: Stack, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.main", *arguments],
        env=stack.environ,
        **options,  # type: ignore[call-overload]
    )


def pid_in(path: Path) -> int:
    return int(wait_until("the command has said who it is", lambda: path.exists() and path.read_text()))


def test_a_command_has_the_rank_s_place_and_environment(stack: Stack, job: str) -> None:
    done = stack.orch(
        "exec", job, "--rank", "1", "--", "sh", "-c", "pwd; echo $RANK $FLAVOUR $ENTER_TOKEN; echo no >&2; exit 7"
    )
    assert done.returncode == 7
    assert done.stdout == f"{stack.job(job).working_dir}\n1 vanilla the-secret-value\n"
    assert done.stderr.endswith("no\n")
    assert stack.orch("exec", job, "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    missing = stack.orch("exec", job, "--", "no-such-command")
    assert (missing.returncode, "no-such-command" in missing.stderr) == (127, True)
    refused = stack.orch("exec", job, "--rank", "2", "--", "true")
    assert (refused.returncode, "0 to 1" in refused.stderr) == (2, True)


def test_input_goes_through_unchanged(stack: Stack, job: str) -> None:
    data = os.urandom(3_000_000)
    with started(stack, "exec", job, "--", "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(data, timeout=PATIENCE_SECONDS)
    assert out == data
    assert process.returncode == 0


def test_a_shell_on_a_terminal_and_its_end_with_a_killed_client(stack: Stack, job: str) -> None:
    ours, theirs = pty.openpty()
    process = started(stack, "exec", job, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    work = Path(stack.job(job).working_dir)
    os.write(ours, b"stty rows 31 cols 99; tty > name; echo $$ > shell.tmp; mv shell.tmp shell; sleep 600 &\r")
    shell = pid_in(work / "shell")
    assert (work / "name").read_text().startswith("/dev/pts/")
    process.kill()
    process.wait()
    wait_until("the shell has ended", lambda: process_gone(shell))
    os.close(ours)


def test_a_session_ends_with_its_job(stack: Stack, job: str) -> None:
    work = Path(stack.job(job).working_dir)
    script = "echo $$ > shell.tmp; mv shell.tmp shell; trap '' TERM HUP INT; sleep 600 & wait; sleep 600"
    with started(stack, "exec", job, "--", "sh", "-c", script, stderr=subprocess.PIPE, text=True) as process:
        shell = pid_in(work / "shell")
        stack.client.cancel(job)
        assert stack.wait(job).state == "CANCELLED"
        assert process_gone(shell), "nothing of a session outlives its rank"
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode in {137, 5}
    assert "rank 0" in said
    refused = stack.orch("exec", job, "--", "true")
    assert (refused.returncode, "CANCELLED" in refused.stderr) == (5, True)


def test_a_port_is_reached_from_here(stack: Stack, job: str) -> None:
    work = Path(stack.job(job).working_dir)
    port = pid_in(work / "port")
    (work / "large").write_bytes(data := os.urandom(2_000_000))
    with started(stack, "port-forward", job, f"0:{port}", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [], PATIENCE_SECONDS)
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        for _ in range(3):
            with urllib.request.urlopen(f"{url}/large", timeout=PATIENCE_SECONDS) as answer:
                assert answer.read() == data
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143


def on_terminal(stack: Stack, *arguments: str, cwd: Path | None = None) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    process = started(stack, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=cwd)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, text: bytes) -> bytes:
    said = b""
    while text not in said:
        ready, _, _ = select.select([terminal], [], [], PATIENCE_SECONDS)
        assert ready, said
        said += os.read(terminal, 65536)
    return said


def test_a_rank_at_a_breakpoint_is_told_of_and_attached_to(stack: Stack, tmp_path: Path) -> None:
    script = "import os\nx = 41\nif os.environ['RANK'] == '1':\n    breakpoint()\n    print('x is', x, flush=True)\n"
    job_id = stack.submit(json.dumps({**SPEC, "name": "stops", "secrets": []}), tmp_path, train=script)
    found = wait_until("it is found", lambda: [one for one in stack.job(job_id).findings if one.rank == 1])
    assert [one.kind for one in found] == ["rank_at_breakpoint"]
    process, terminal = on_terminal(stack, "attach", job_id, "--rank", "1")
    read_until(terminal, b"(Pdb) ")
    os.write(terminal, b"x = x + 1\r")
    read_until(terminal, b"(Pdb) ")
    os.write(terminal, b"~.")
    read_until(terminal, b"detached")
    assert process.wait() == 0
    os.close(terminal)
    with started(stack, "attach", job_id, "--rank", "1", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as again:
        out, _ = again.communicate(b"c\n", timeout=PATIENCE_SECONDS)
    assert (again.returncode, b"x is 42" in out) == (0, True)
    assert stack.wait(job_id).state == "SUCCEEDED"


@pytest.mark.rare
def test_an_interactive_job_is_a_shell_until_it_exits_or_is_idle(stack: Stack, tmp_path: Path) -> None:
    line = ("run", "-i", "--gpu", "1", "--cpu", "0", "--idle-limit", "3s", "--name", "shell", "--", "sh")
    process, terminal = on_terminal(stack, *line, cwd=tmp_path)
    read_until(terminal, b"detaches")
    os.write(terminal, b"stty size; tty; echo job $ORCH_JOB_ID; exit 7\r")
    said = read_until(terminal, b"job shell-")
    assert b"/dev/pts/" in said
    assert process.wait() == 7
    os.close(terminal)
    process, terminal = on_terminal(stack, *line, cwd=tmp_path)
    read_until(terminal, b"detaches")
    process.kill()
    process.wait()
    os.close(terminal)
    job = stack.wait(stack.job("shell").id)
    assert (job.state, "interactive.idle_limit" in job.reason) == ("CANCELLED", True)
