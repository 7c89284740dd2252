"""A fork of the template runs a worker's program as if it had been executed; a caller that gives up gets none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster.head import late_agent, worker_setup, worker_template
from tests.support.stack import process_gone, wait_until

REPORTS = """
import json, os, random, signal, sys, threading
import ray
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "directory": os.getcwd(), "parent": os.getppid(), "leads": os.getpgid(0) == os.getpid(),
    "mine": os.environ.get("MINE"), "job": os.environ["RAY_JOB_ID"], "input": sys.stdin.read(),
    "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "threads": threading.active_count(),
    "random": [ray.ObjectRef.from_random().hex(), random.random()], "title": open("/proc/self/cmdline").read(),
    "handles": sorted(os.listdir("/proc/self/fd")), "oom": open("/proc/self/oom_score_adj").read().strip(),
}), flush=True)
"""
ASKS = """
import sys
from orchestrator.runtime.cluster.head import worker_setup
print(worker_setup.fork_from_template(sys.argv[2:], sys.argv[1], 300.0), file=sys.stderr)
"""


@contextmanager
def template_of(raylet: int) -> Iterator[tuple[Path, psutil.Process]]:
    with tempfile.TemporaryDirectory(prefix="orch-t-") as directory:
        path = Path(directory) / "workers"
        environ = {**os.environ, late_agent.RAYLET_PID: str(raylet)}
        command = [*worker_template.command(sys.executable, str(path)), "--of-ray"]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        try:
            wait_until("it listens", path.exists)
            yield path, psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def template() -> Iterator[tuple[Path, psutil.Process]]:
    with template_of(os.getpid()) as one:
        yield one


def ask(path: Path, program: Path, *arguments: str, **options: str) -> dict[str, object]:
    """Run the program in a fork; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(path), str(program), *arguments],
        input="typed",
        check=True,
        capture_output=True,
        text=True,
        cwd=program.parent,
        env={**os.environ, "RAY_JOB_ID": "01000000", **options},
        timeout=300,
        process_group=0,
    )
    assert done.stderr == "True\n"
    reply: dict[str, object] = json.loads(done.stdout)
    return reply


def program_in(folder: Path) -> Path:
    path = folder / "worker.py"
    path.write_text(REPORTS)
    return path


def test_a_fork_is_what_an_executed_worker_would_be(template: tuple[Path, psutil.Process], tmp_path: Path) -> None:
    path, process = template
    program = program_in(tmp_path)
    found = ask(path, program, "--worker-id", "7", MINE="a\udcff")
    assert found["name"] == "__main__"
    assert found["argv"] == [str(program), "--worker-id", "7"]
    assert found["path"] == found["directory"] == str(tmp_path)
    assert found["parent"] == process.pid
    assert found["mine"] == "a\udcff"
    assert found["leads"], "as the caller did"
    assert found["job"] == "ffffffff", "as Ray read it when it was imported"
    assert (found["input"], found["sigchld"], found["threads"]) == ("typed", True, 1)
    assert str(path) in str(found["title"]), "it is found by the session that it belongs to"
    assert found["handles"] == ["0", "1", "2", "3"], "the last one lists them"
    assert found["oom"] == Path("/proc/self/oom_score_adj").read_text().strip()


def test_forks_share_no_random_numbers(template: tuple[Path, psutil.Process], tmp_path: Path) -> None:
    program = program_in(tmp_path)
    first, second = (ask(template[0], program)["random"] for _ in range(2))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert not set(first) & set(second)


def test_a_caller_that_gives_up_gets_no_worker_and_holds_up_no_other(
    template: tuple[Path, psutil.Process], tmp_path: Path
) -> None:
    path, process = template
    program = program_in(tmp_path)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as gives_up:
        silent.connect(str(path))
        gives_up.connect(str(path))
        content = json.dumps(worker_setup._request([str(program)])).encode()
        with (tmp_path / "output").open("wb") as output:
            handles = [0, output.fileno(), output.fileno()]
            socket.send_fds(gives_up, [worker_setup.SIZE.pack(len(content))], handles)
        gives_up.sendall(content)
        assert gives_up.recv(1) == worker_setup.HERE
        gives_up.close()
        assert ask(path, program)["name"] == "__main__"
        waiting = [child.pid for child in process.children()]
        assert len(waiting) <= 2
    wait_until("the forks of both have ended", lambda: not process.children())
    assert (tmp_path / "output").read_bytes() == b""


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", worker_setup.SIZE.pack(2) + b"[]"])
def test_what_is_no_request_is_refused(template: tuple[Path, psutil.Process], content: bytes, tmp_path: Path) -> None:
    path, process = template
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    wait_until("its fork has ended", lambda: not process.children())
    assert ask(path, program_in(tmp_path))["name"] == "__main__"


def test_it_ends_with_its_raylet() -> None:
    raylet = subprocess.Popen(["sleep", "1000"])
    try:
        with template_of(raylet.pid) as (_, process):
            assert process.is_running()
            raylet.send_signal(signal.SIGKILL)
            raylet.wait()
            wait_until("it has ended", lambda: process_gone(process.pid))
    finally:
        raylet.kill()
        raylet.wait()


def test_without_a_template_the_worker_is_executed(tmp_path: Path) -> None:
    assert not worker_setup.fork_from_template(["worker.py"], str(tmp_path / "workers"), 0.0)
    with socket.socket(socket.AF_UNIX) as ended, tempfile.TemporaryDirectory(prefix="orch-t-") as directory:
        ended.bind(f"{directory}/workers")
        assert not worker_setup.fork_from_template(["worker.py"], f"{directory}/workers", 300.0), "nothing listens"
    program = program_in(tmp_path)
    environ = {**os.environ, "RAY_JOB_ID": "01000000"} | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    context = "--serialized-runtime-env-context={}"
    command = [sys.executable, worker_setup.__file__, context, "--language=PYTHON", str(program)]
    done = subprocess.run(command, input="", capture_output=True, text=True, env=environ, check=True, timeout=300)
    assert json.loads(done.stdout)["job"] == "01000000"


def test_a_template_of_another_user_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="orch-t-") as directory, closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"{directory}/workers")
        listener.listen()
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        assert not worker_setup.fork_from_template(["worker.py"], f"{directory}/workers", 300.0)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b""


def test_a_template_that_closes_the_connection_is_not_waited_for(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="orch-t-") as directory, closing(socket.socket(socket.AF_UNIX)) as listener:
        path = f"{directory}/workers"
        listener.bind(path)
        listener.listen()
        closes = threading.Thread(target=_accept_and_close, args=(listener,))
        closes.start()
        assert not worker_setup.fork_from_template(["worker.py"], path, 300.0)
        closes.join()


def _accept_and_close(listener: socket.socket) -> None:
    listener.accept()[0].close()
