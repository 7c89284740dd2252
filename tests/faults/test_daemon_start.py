"""A failed start says why and leaves no process; commands report a stopped daemon; one that ends leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest

from orchestrator.api.transport.peer import is_stopped
from orchestrator.runtime.cluster.head import ray_environment
from tests.support.processes import all_gone
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stack() -> Iterator[Stack]:
    """Yield a home without a daemon."""
    made = Stack(simulate_gpus=1)
    yield made
    made.close()


def left_of(stack: Stack) -> list[int]:
    """Return the live processes of the home: its daemon, its Ray, its fork servers."""
    marks = (f"ORCH_HOME={stack.home}", str(stack.home), str(stack.node_root))
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            told = [*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())]
            if any(mark in part for part in told for mark in marks):
                found.append(process.pid)
    return found


@pytest.mark.rare
def test_a_daemon_that_is_stopped_a_port_that_is_taken_and_several_who_end_it(stack: Stack) -> None:
    """These cases are tested in this order, with two starts of the daemon."""
    pid = stack.up()["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until("it is stopped", lambda: is_stopped(pid))
    commands = (["up"], ["status"], ["down"], ["submit", "-"])
    with ThreadPoolExecutor(len(commands)) as pool:  # each waits for some seconds
        answers = list(pool.map(lambda command: stack.orch(*command), commands))
    for command, done in zip(commands, answers, strict=True):
        assert done.returncode == 4, (command, done.stderr)
        assert f"process {pid}" in done.stderr.splitlines()[0]
        assert f"kill -CONT {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    all_gone("the daemon that was asked to stop", [pid])
    up_where_the_port_for_metrics_is_taken(stack)
    assert len(left_of(stack)) > 3
    with ThreadPoolExecutor() as pool:
        several = [pool.submit(lambda: (stack.orch("down").returncode, left_without_commands(stack))) for _ in range(3)]
    assert [one.result() for one in several] == [(0, [])] * 3
    assert left_of(stack) == []


def up_where_the_port_for_metrics_is_taken(stack: Stack) -> None:
    """Start the daemon while the port for metrics is taken: it uses a free one."""
    with contextlib.closing(socket.socket()) as other:
        with contextlib.suppress(OSError):  # another daemon is there already
            other.bind(("127.0.0.1", 9476))
            other.listen()
        done = stack.orch("up", "--json")
        assert done.returncode == 0, done.stderr
        address = json.loads(done.stdout)["read_address"]
        assert address != "127.0.0.1:9476"
        with urllib.request.urlopen(f"http://{address}/healthz") as answer:
            assert answer.status == 200
        assert "metrics.port_taken" in stack.daemon_log()


@pytest.mark.rare
def test_up_beside_one_that_was_stopped_before_it_listened(stack: Stack) -> None:
    daemon = stack.serve()
    store = stack.settings.paths.store
    wait_until("it holds the store", store.with_name(store.name + ".lock").exists)
    daemon.send_signal(signal.SIGSTOP)
    stack.settings.socket.unlink(missing_ok=True)
    done = stack.orch("up", "--json")
    daemon.kill()
    daemon.wait()
    assert done.returncode == 4, done.stderr
    assert str(daemon.pid) in done.stderr


@pytest.mark.rare
def test_a_failed_up_says_why_first_and_leaves_no_process(stack: Stack) -> None:
    (stack.settings.paths.ray).mkdir(parents=True)
    (stack.settings.paths.ray / "s").write_text("not a directory")
    done = stack.orch("up", "--read-listen", "")
    assert done.returncode == 5
    first = done.stderr.splitlines()[0]
    assert "the daemon did not start" in first
    assert "Ray's head did not start" in first
    assert "Traceback" not in done.stderr
    log = stack.daemon_log()
    assert log.count("ray.start_failed") == 2
    assert "Event loop is closed" not in log
    assert left_of(stack) == []
    assert not stack.node_root.exists()


@pytest.mark.parametrize(
    ("option", "first"),
    [
        ("--page-listen", "cannot listen on"),
        ("--ray-address", "no Ray cluster at"),
    ],
)
def test_what_is_wrong_with_the_options_is_said_first_and_no_process_is_started(
    stack: Stack, option: str, first: str
) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        if option == "--ray-address":
            taken.close()
        done = stack.orch("up", option, address)
    assert done.returncode == 5
    assert first in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert not stack.settings.paths.daemon_log.exists()
    assert left_of(stack) == []


def test_a_store_that_cannot_be_opened_is_the_first_thing_said(stack: Stack) -> None:
    stack.settings.paths.store.write_bytes(b"no database at all" * 1000)
    done = stack.orch("up")
    assert done.returncode == 5
    assert "cannot be read as a store" in done.stderr.splitlines()[0]
    assert left_of(stack) == []


def address_of(head: Path) -> str:
    """Return the address of the head that the file describes; empty for one that is being started."""
    return str(json.loads(head.read_text())["gcs_address"]) if head.exists() else ""


def connects_to(daemon: int, head: Path) -> bool:
    """Whether the process has a connection to the head's GCS."""
    if not (address := address_of(head)):
        return False
    port = int(address.rpartition(":")[2])
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(c.raddr and c.raddr.port == port for c in psutil.Process(daemon).net_connections("tcp"))
    return False


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("the head is being started", marks=pytest.mark.rare),
        pytest.param("the head is there", marks=pytest.mark.rare),
        "it connects to the head",
    ],
)
def test_a_start_that_is_cut_short_leaves_no_process(stack: Stack, moment: str) -> None:
    daemon = stack.serve()
    head = stack.settings.paths.ray / "head.json"
    begun = {
        "the head is being started": head.exists,
        "the head is there": lambda: address_of(head),
        "it connects to the head": lambda: connects_to(daemon.pid, head),
    }
    wait_until(moment, begun[moment], interval=0.001)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=PATIENCE_SECONDS) == 0, stack.serve_log()
    assert "Traceback" not in stack.serve_log()
    assert left_of(stack) == []


RAISES_SIGTERM = """
import signal, sys, threading
import ray
from orchestrator.runtime.cluster.connection import disarm_abort, restore_handlers
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append("SIGTERM"))
def connect():
    ray.init(address=sys.argv[1], namespace="signals", log_to_driver=False, configure_logging=False)
thread = threading.Thread(target=connect)  # as the daemon does: in the main thread Ray replaces Python's handler, too
thread.start()
thread.join()
signal.raise_signal(signal.SIGTERM)
by_ray = signal.getitimer(signal.ITIMER_REAL)[0] > 0
disarm_abort()
disarmed = signal.getitimer(signal.ITIMER_REAL)[0] == 0
restore_handlers()
signal.raise_signal(signal.SIGTERM)
restored = signal.getitimer(signal.ITIMER_REAL)[0] == 0
ray.shutdown()
restore_handlers()
signal.raise_signal(signal.SIGTERM)
print(by_ray, disarmed, restored, len(seen))
"""


@pytest.mark.rare
def test_rays_handler_of_sigterm_aborts_no_process_of_orch(breakable: Stack) -> None:
    """Ray arms an alarm that aborts the process 3 s after SIGTERM. This fails when Ray no longer does so."""
    token = breakable.settings.paths.ray / "token"
    address = json.loads((breakable.settings.paths.ray / "head.json").read_text())["gcs_address"]
    done = subprocess.run(
        [sys.executable, "-c", RAISES_SIGTERM, address],
        env={**os.environ, **ray_environment(token)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["True", "True", "True", "3"], done.stderr


def left_without_commands(stack: Stack) -> list[int]:
    """Return the live processes of the home without the commands that this test runs."""
    found = []
    for pid in left_of(stack):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).ppid() != os.getpid():
                found.append(pid)
    return found
