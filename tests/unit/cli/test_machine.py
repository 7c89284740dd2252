"""`up`, `down`, `serve`, `doctor`, `demo`: their calls of the daemon's code, and their output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import DemoOptions, Finding, Level, ServeOptions, UpReply, serve_arguments
from orchestrator.api.transport.endpoint import endpoint_from
from orchestrator.cli.commands.machine import DaemonProcess
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.cli.commands.test_submit import module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

EVERY_OPTION = ServeOptions(
    simulate_gpus=4,
    ray_address="127.0.0.1:6379",
    with_prometheus=True,
    group="ml",
    listen="127.0.0.1:8265",
    read_listen="127.0.0.1:0",
    token_file="/run/token",
    page_listen="127.0.0.1:8266",
    page_cert="/etc/cert.pem",
    page_key="/etc/key.pem",
    page_plain=True,
    read_fixed=True,
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the daemon's functions; return the record of their arguments."""
    seen: dict[str, Any] = {}

    def up(settings: object, options: ServeOptions) -> UpReply:
        seen["up"] = options
        started = options.simulate_gpus != 99
        return UpReply(
            pid=42,
            started=started,
            seconds=1.5,
            address="/s",
            read_address="127.0.0.1:9476",
            log_file="/l",
            page_address="http://127.0.0.1:8270/",
        )

    def serve(settings: object, options: ServeOptions) -> int:
        seen["serve"] = options
        return 0

    def examine(settings: object) -> list[Finding]:
        return seen.get("findings", [Finding(level=Level.OK, what="Python 3.11")])

    def run_demo(options: DemoOptions) -> int:
        seen["demo"] = options
        return 1

    for name, function in (("up", up), ("serve", serve), ("doctor.examine", examine), ("demo.run_demo", run_demo)):
        place, _, attribute = name.partition(".")
        monkeypatch.setitem(
            sys.modules, f"orchestrator.daemon.process.{place}", module(**{attribute or place: function})
        )
    return seen


def test_up(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    done = orch("up")
    assert (done.code, done.out) == (0, "the daemon is ready (process 42, 1.5s)\n")
    assert done.err == ("page: http://127.0.0.1:8270/ (`orch ui` opens it)\nmetrics: http://127.0.0.1:9476/metrics\n")
    assert daemon["up"] == ServeOptions()
    assert orch("up", "-q").err == ""
    assert orch("up", "--simulate-gpus", "99").out == "the daemon runs already (process 42)\n"
    assert orch("up", "--json").json == {
        "pid": 42, "started": True, "seconds": 1.5, "address": "/s", "read_address": "127.0.0.1:9476",
        "prometheus_url": "", "alertmanager_url": "", "prometheus_password_file": "", "log_file": "/l",
        "page_address": "http://127.0.0.1:8270/",
    }  # fmt: skip


def test_serve_takes_what_up_takes(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    line = serve_arguments(EVERY_OPTION)
    assert orch("serve", *line).code == 0
    assert orch("up", *line).code == 0
    assert daemon["serve"] == daemon["up"] == EVERY_OPTION


texts = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=10)


@given(
    st.builds(
        ServeOptions, simulate_gpus=st.integers(0, 64), ray_address=texts, with_prometheus=st.booleans(), group=texts,
        listen=texts, read_listen=texts, token_file=texts, page_listen=texts, page_cert=texts,
        page_key=texts, page_plain=st.booleans(), read_fixed=st.just(True),
    ) | st.just(ServeOptions())
)  # fmt: skip
def test_a_detached_daemon_is_started_with_the_same_options(options: ServeOptions) -> None:
    from orchestrator.cli.main import run

    seen: list[ServeOptions] = []

    def serve(_: object, given: ServeOptions) -> int:
        seen.append(given)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "orchestrator.daemon.process.serve", module(serve=serve))
        assert run(["serve", *serve_arguments(options)]) == 0
    files = {name: getattr(options, name) for name in ("token_file", "page_cert", "page_key")}
    assert seen == [
        replace(options, **{name: file and os.path.join(os.getcwd(), file) for name, file in files.items()})
    ]


@pytest.mark.parametrize("command", ["up", "serve"])
def test_files_are_found_from_where_the_command_is_typed(
    orch: Orch, daemon: dict[str, Any], home: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ("--token-file", "token", "--page-cert", "tls/cert.pem", "--page-key", "/etc/key.pem")
    assert orch(command, *line).code == 0
    given = daemon[command]
    assert given.token_file == str(tmp_path / "token")
    assert (given.page_cert, given.page_key) == (str(tmp_path / "tls/cert.pem"), "/etc/key.pem")


def test_where_metrics_are_read_comes_from_the_settings(
    orch: Orch, daemon: dict[str, Any], home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_METRICS_ADDRESS", "::1")
    monkeypatch.setenv("ORCH_METRICS_PORT", "1234")
    orch("up")
    assert (daemon["up"].read_listen, daemon["up"].read_fixed) == ("[::1]:1234", True)
    orch("up", "--read-listen", "")
    assert daemon["up"].read_listen == ""
    orch("up", "--read-listen", "127.0.0.1:9476")
    assert daemon["up"].read_fixed
    monkeypatch.setenv("ORCH_METRICS_PORT", "many")
    done = orch("up")
    assert done.code == 2
    assert "ORCH_METRICS_PORT" in done.err


def test_an_up_that_fails(orch: Orch, home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def up(*_: object) -> UpReply:
        raise RefusedError("the daemon did not start:\nlast line of its log", hint="`orch doctor` looks further")

    monkeypatch.setitem(sys.modules, "orchestrator.daemon.process.up", module(up=up))
    done = orch("up")
    assert done.code == 5
    assert "last line of its log" in done.err


def test_down(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    stopper = stop_when_asked(served)
    done = orch("down")
    stopper.join(timeout=PATIENCE_SECONDS)
    assert (done.code, done.out) == (0, "the daemon has stopped\n")
    assert f"still running without it: {job.id}" in done.err
    assert served.do(lambda service: service.calls[0][1][0]) is False
    assert orch("down").out == "no daemon is running\n"
    assert orch("down", "--json").json == {"running": [], "stopped": [], "was_running": False}


def stop_when_asked(served: ServedFake) -> threading.Thread:
    asked = threading.Event()
    original = served.service.shutdown

    def shutdown(**arguments: Any) -> Any:
        reply = original(**arguments)
        asked.set()
        return reply

    served.service.shutdown = shutdown  # type: ignore[method-assign]

    def stop() -> None:
        assert asked.wait(300)
        served.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_down_with_jobs(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    stopper = stop_when_asked(served)
    done = orch("down", "--stop-jobs", "--json")
    stopper.join(timeout=PATIENCE_SECONDS)
    assert done.json == {"running": [], "stopped": [job.id], "was_running": True}


def test_a_daemon_that_will_not_go(orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = DaemonProcess.wait_until_gone
    monkeypatch.setattr(DaemonProcess, "wait_until_gone", lambda process, _seconds: wait(process, 0.2))
    done = orch("down")
    assert done.code == 4
    assert "has not ended" in done.err
    assert "orch doctor" in done.err


SLOW_TO_END = """
import json, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(16)
print("listening", flush=True)
listener.accept()[0].close()  # the look at who listens
connection, _ = listener.accept()
connection.recv(65536)
body = json.dumps({"running": [], "stopped": []}).encode()
head = f"HTTP/1.1 200 OK\\r\\nX-Orch-Protocol: 1\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
connection.sendall(head.encode() + body)
connection.close()
listener.close()
print("deaf", flush=True)
sys.stdin.readline()
"""
"""Accepts the request to stop and closes its socket, as a daemon that closes its store; ends with its input."""


@pytest.fixture
def slow_to_end(home: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has accepted a request to stop, answers no other request, and keeps running."""
    path = endpoint_from(os.environ).socket_path
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_down_returns_when_the_process_has_ended(
    orch: Orch, slow_to_end: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    wait = DaemonProcess.wait_until_gone

    def ends_only_while_it_is_waited_for(process: DaemonProcess, seconds: float) -> None:
        assert slow_to_end.stdout is not None
        assert slow_to_end.stdin is not None
        slow_to_end.stdout.readline()  # it has closed its socket
        seen.append(slow_to_end.poll())
        threading.Timer(0.3, slow_to_end.stdin.close).start()
        wait(process, seconds)
        with open(f"/proc/{slow_to_end.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] == "Z", "it has ended, and its parent has not asked yet"

    monkeypatch.setattr(DaemonProcess, "wait_until_gone", ends_only_while_it_is_waited_for)
    done = orch("down")
    assert (done.code, done.out) == (0, "the daemon has stopped\n"), done.err
    assert seen == [None]


def test_down_beside_a_daemon_that_is_stopped_meanwhile(
    orch: Orch, slow_to_end: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = DaemonProcess.wait_until_gone

    def stopped(process: DaemonProcess, seconds: float) -> None:
        os.kill(slow_to_end.pid, signal.SIGSTOP)
        wait(process, seconds, look_seconds=0.1)

    monkeypatch.setattr(DaemonProcess, "wait_until_gone", stopped)
    done = orch("down")
    assert done.code == 4
    assert f"kill -CONT {slow_to_end.pid}" in done.err


ENDS_DEAF = """
import fcntl, os, sys
from orchestrator.api.transport import peer
lock = os.open(peer.lock_path(sys.argv[1]), os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
peer.sign(lock)
print("holds", flush=True)
sys.stdin.readline()
"""
"""A daemon that another `orch down` has requested to stop: it does not listen and has not ended."""


@pytest.fixture
def ends_deaf(home: object) -> Iterator[subprocess.Popen[bytes]]:
    path = endpoint_from(os.environ).socket_path
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_DEAF, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process
        process.kill()


@pytest.mark.parametrize("flags", [[], ["--stop-jobs"], ["--json"]])
def test_a_second_down_returns_when_the_process_has_ended(
    orch: Orch, ends_deaf: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    seen: list[int | None] = []
    wait = DaemonProcess.wait_until_gone

    def ends_only_while_it_is_waited_for(process: DaemonProcess, seconds: float) -> None:
        assert ends_deaf.stdin is not None
        seen.append(process.pid)
        threading.Timer(0.2, ends_deaf.stdin.close).start()
        wait(process, seconds)
        with open(f"/proc/{ends_deaf.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] == "Z", "it has ended, and its parent has not asked yet"

    monkeypatch.setattr(DaemonProcess, "wait_until_gone", ends_only_while_it_is_waited_for)
    done = orch("down", *flags)
    assert done.code == 0, done.err
    assert seen == [ends_deaf.pid]
    if "--json" in flags:
        assert done.json == {"running": [], "stopped": [], "was_running": True}
    else:
        assert done.out == "the daemon has stopped\n"


def test_doctor(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    assert orch("doctor") == (0, "ok      Python 3.11\n", "")
    daemon["findings"] = [
        Finding(level=Level.WARNING, what="little disk", remedy="orch prune"),
        Finding(level=Level.ERROR, what="no Ray", remedy="pip install ray"),
    ]
    done = orch("doctor")
    assert done.code == 5
    assert done.out.splitlines() == [
        "warning little disk",
        "        orch prune",
        "error   no Ray",
        "        pip install ray",
    ]
    answer = orch("doctor", "--json")
    assert answer.code == 5
    assert answer.json["healthy"] is False
    assert answer.json["findings"][1] == {"level": "error", "what": "no Ray", "remedy": "pip install ray"}


def test_demo(orch: Orch, daemon: dict[str, Any]) -> None:
    assert orch("demo", "--json").code == 1, "the demo's own result"
    assert daemon["demo"] == DemoOptions(json=True)
