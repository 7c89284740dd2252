"""The fork server: how it starts, which requests and users it serves or refuses, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import (
    Exited,
    ForkServerClient,
    ForkServerMissingError,
    ForkServerRefusedError,
    ForkServerStartError,
    ForkServerTimeoutError,
    ForkServerVersionError,
    Started,
    start_fork_server,
)
from tests.integration.forkserver_fixture import (
    BARE_PYTHON,
    ENVIRONMENT,
    BlockingClient,
    RunningServer,
    alive,
    next_event,
    running_server,
    wait_until,
)
from tests.support.stack import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a name short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="orch-fs-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def bare() -> Iterator[RunningServer]:
    """Yield a server in an interpreter that has no torch."""
    with running_server(str(BARE_PYTHON)) as running:
        yield running


def run(server: RunningServer, place: Path, **fields: Any) -> tuple[Started | None, Exited, str]:
    """Run one process to its end; return its start, its exit, and what it printed on both streams."""
    request = SpawnRequest(**{"mode": "command", "cwd": str(place), "env": ENVIRONMENT} | fields)
    log = place / "log"
    with log.open("wb") as file:
        spawned = server.client.spawn_sync(request, stdout=file.fileno(), stderr=file.fileno())
    with contextlib.closing(spawned.lifeline) as lifeline:
        events = []
        while (event := next_event(lifeline, timedelta(seconds=PATIENCE_SECONDS))) is not None:
            events.append(event)
    started = [event for event in events if isinstance(event, Started)]
    [exited] = [event for event in events if isinstance(event, Exited)]
    return started[0] if started else None, exited, log.read_text()


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_hello_says_what_it_is(server: RunningServer) -> None:
    import platform

    import torch

    hello = server.client.hello_sync()
    assert hello == server.hello
    assert (hello.pid, hello.protocol) == (server.started.pid, wire.PROTOCOL)
    assert (hello.executable, hello.python) == (sys.executable, platform.python_version())
    assert (hello.torch, hello.keepers) == (torch.__version__, 0)
    assert hello.warm_seconds > 0
    assert (hello.nice, hello.oom_score_adj) == (0, 0)


def test_is_nobodys_child_and_has_one_thread(server: RunningServer) -> None:
    found = status(server.started.pid)
    assert int(found["PPid"]) != os.getpid()
    assert os.getsid(server.started.pid) != os.getsid(0)
    assert found["Threads"] == "1"
    assert os.readlink(f"/proc/{server.started.pid}/cwd") == "/"
    assert server.socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.rare
def test_opens_no_device(server: RunningServer) -> None:
    targets = descriptors(server.started.pid)
    assert targets
    assert not [target for target in targets if target.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd"))]
    maps = Path(f"/proc/{server.started.pid}/maps").read_text()
    assert "libcuda.so" not in maps
    assert "libnvidia-ml" not in maps


def test_second_start_changes_nothing(server: RunningServer) -> None:
    again = start_fork_server(sys.executable, server.socket, server.directory / "fork.log", env=ENVIRONMENT)
    assert (again.already_running, again.pid) == (True, server.started.pid)
    assert server.client.hello_sync().pid == server.started.pid


def test_environment_of_a_ray_worker_is_shed(folder: Path) -> None:
    """Ray's variables, priorities and signal dispositions reach neither the server nor what it forks."""
    worker = (
        "import os, signal, sys; from pathlib import Path\n"
        "from orchestrator.runtime.spawn.client import start_fork_server\n"
        "os.nice(5); Path('/proc/self/oom_score_adj').write_text('500')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "folder = Path(sys.argv[1])\n"
        "print(start_fork_server(sys.executable, folder / 's', folder / 'l').pid)\n"
    )
    env = {**ENVIRONMENT, "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1", "RANK": "3"}
    started = subprocess.run(
        [sys.executable, "-c", worker, str(folder)],
        env=env | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(started.stdout)
    client = BlockingClient(folder / "s")
    try:
        hello = client.hello_sync()
        assert (hello.pid, hello.oom_score_adj) == (pid, 0)
        assert hello.nice == (0 if os.geteuid() == 0 else 5)
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {entry.partition(b"=")[0] for entry in environ}
        assert names & {b"RAY_JOB_ID", b"CUDA_VISIBLE_DEVICES", b"OMP_NUM_THREADS", b"RANK"} == set()
        found = status(pid)
        assert int(found["SigBlk"], 16) == 0
        assert not int(found["SigIgn"], 16) & 1 << (signal.SIGTERM - 1)
    finally:
        client.shutdown_sync()
        wait_until(lambda: not alive(pid), "the server to end")


@pytest.mark.rare
def test_interpreter_without_torch_is_served(bare: RunningServer, tmp_path: Path) -> None:
    assert bare.hello.torch is None
    (tmp_path / "plain.py").write_text("import os, sys\nprint(sys.argv[1], sys.executable, os.environ['A'])\n")
    env = {**ENVIRONMENT, "A": "a", "OMP_NUM_THREADS": "2"}
    started, exited, said = run(bare, tmp_path, mode="script", target="plain.py", args=("x",), env=env)
    assert (exited.exit_code, said) == (0, f"x {BARE_PYTHON} a\n")
    assert started is not None
    assert started.cold is None


@pytest.mark.rare
def test_store_needs_torch(bare: RunningServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, (tmp_path / "log").open("wb") as log:
        request = SpawnRequest(mode="store", cwd=str(tmp_path), env=ENVIRONMENT)
        spawned = bare.client.spawn_sync(request, stdout=log.fileno(), stderr=log.fileno(), listen=listener.fileno())
    with contextlib.closing(spawned.lifeline) as lifeline:
        events = [next_event(lifeline, timedelta(seconds=PATIENCE_SECONDS)) for _ in range(3)]
    assert getattr(events[1], "type", None) == "ModuleNotFoundError"
    assert getattr(events[2], "exit_code", None) == 1


@pytest.mark.rare
@pytest.mark.parametrize(
    ("preload", "said"),
    [
        ("no_such_module_at_all", "forkserver.preload_absent"),
        ("preload_that_raises", "forkserver.preload_absent"),
    ],
)
def test_preload_that_fails_is_logged_and_ignored(folder: Path, preload: str, said: str) -> None:
    (folder / "preload_that_raises.py").write_text("raise RuntimeError('not today')\n")
    with _preloading(folder, preload) as (client, _):
        assert client.hello_sync().torch is None
    assert said in (folder / "l").read_text()


def test_preload_is_there_in_the_fork(folder: Path) -> None:
    (folder / "heavy.py").write_text("import os\nWHERE = os.getpid()\n")
    (folder / "script.py").write_text("import heavy, os\nprint(heavy.WHERE == os.getppid(), heavy.WHERE)\n")
    with _preloading(folder, "heavy") as (client, pid):
        hello = client.hello_sync()
        running = RunningServer(None, hello, client, folder)  # type: ignore[arg-type]
        env = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
        started, _, said = run(running, folder, mode="script", target="script.py", env=env)
        assert started is not None
        assert (started.cold, said) == (None, f"False {pid}\n")


@pytest.mark.rare
@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n", "threads"),
        ("import os\nHELD = os.open('/dev/dri_of_test', os.O_CREAT | os.O_RDWR)\n", "/dev/dri"),
    ],
)
def test_process_that_cannot_be_forked_from_starts_over_and_serves_cold(
    folder: Path, code: str, complaint: str
) -> None:
    """Starts are slower, but every job runs; process, socket and lock stay the same, and no connection is lost."""
    (folder / "unfit.py").write_text(code)
    (folder / "script.py").write_text("import threading; print(threading.active_count())\n")
    try:
        with _preloading(folder, "unfit") as (client, pid):
            hello = client.hello_sync()
            assert hello.pid == pid
            assert hello.cold is not None
            assert complaint in hello.cold
            assert status(pid)["Threads"] == "1"
            running = RunningServer(None, hello, client, folder)  # type: ignore[arg-type]
            env = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
            started, exited, said = run(running, folder, mode="script", target="script.py", env=env)
            assert (exited.exit_code, said) == (0, "1\n")
            assert started is not None
            assert started.cold == hello.cold
            again = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT)
            assert (again.already_running, again.pid) == (True, pid)
    finally:
        Path("/dev/dri_of_test").unlink(missing_ok=True)
    told = [json.loads(line) for line in (folder / "l").read_text().splitlines()]
    [refusal] = [line for line in told if line["event"] == "forkserver.not_servable"]
    assert complaint in refusal["error"]


@pytest.mark.rare
def test_interpreter_that_is_never_fit_does_not_serve(folder: Path) -> None:
    """In this test, a module that every interpreter of the environment imports starts a thread."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    for name in ("unfit.py", "sitecustomize.py"):
        (folder / name).write_text(thread)
    with _preloading(folder, "unfit") as (client, pid):
        with pytest.raises(ForkServerMissingError):
            client.hello_sync()
        wait_until(lambda: not alive(pid), "the server to give up")
    assert not (folder / "s").exists()
    assert (folder / "l").read_text().count("forkserver.not_servable") == 2


@contextlib.contextmanager
def _preloading(folder: Path, module: str) -> Iterator[tuple[ForkServerClient, int]]:
    """Run a server without torch, quick to start, that has imported a module of `folder`."""
    env = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    pid = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", [module], env=env).pid
    client = BlockingClient(folder / "s")
    try:
        yield client, pid
    finally:
        with contextlib.suppress(ForkServerMissingError):
            client.shutdown_sync()
        wait_until(lambda: not alive(pid), "the server to end")


@pytest.mark.rare
@pytest.mark.parametrize("when", ["while it serves", "before it began"])
def test_ends_with_the_process_that_it_is_of_once_nothing_runs(folder: Path, when: str) -> None:
    with subprocess.Popen(["sleep", "3600"]) as owner:
        if when == "before it began":
            owner.kill()
            owner.wait()
        socket_path = folder / "fork.sock"
        started = start_fork_server(
            str(BARE_PYTHON), socket_path, folder / "fork.log", env=ENVIRONMENT, of_process=owner.pid
        )
        if when == "while it serves":
            client = BlockingClient(socket_path)
            request = SpawnRequest(mode="command", target="sleep", args=("3600",), cwd=str(folder), env=ENVIRONMENT)
            with (folder / "log").open("wb") as file:
                spawned = client.spawn_sync(request, stdout=file.fileno(), stderr=file.fileno())
            owner.kill()
            owner.wait()
            assert client.hello_sync().pid == started.pid, "what it has forked still runs"
            spawned.lifeline.close()
        wait_until(lambda: not alive(started.pid), "its end")
        assert "forkserver.owner_ended" in (folder / "fork.log").read_text()
        assert not socket_path.exists()


@pytest.mark.rare
def test_ends_when_its_socket_is_gone(folder: Path) -> None:
    """A server whose socket was removed cannot be reached any more, so it ends."""
    pid = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT).pid
    BlockingClient(folder / "s").hello_sync()
    (folder / "s").unlink()
    again = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT)
    assert not again.already_running
    assert not alive(pid)
    assert BlockingClient(folder / "s").hello_sync().pid == again.pid
    os.kill(again.pid, signal.SIGTERM)
    wait_until(lambda: not alive(again.pid), "the second server to end")
    assert not (folder / "s").exists()


@pytest.mark.rare
@pytest.mark.parametrize("stopped", [False, True])
def test_an_end_that_was_asked_for_is_waited_for(folder: Path, *, stopped: bool) -> None:
    """`end` also waits for a server that a signal has stopped, which no message reaches."""
    started = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT)
    client = BlockingClient(folder / "s")
    client.hello_sync()
    if stopped:
        os.kill(started.pid, signal.SIGSTOP)
    asyncio.run(client.end(timedelta(seconds=1 if stopped else PATIENCE_SECONDS)))
    assert not alive(started.pid)
    asyncio.run(client.end(timedelta(seconds=1)))  # nothing listens there any more


def test_socket_of_a_dead_server_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
    started = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT)
    assert not started.already_running
    client = BlockingClient(folder / "s")
    assert client.hello_sync().pid == started.pid
    client.shutdown_sync()
    wait_until(lambda: not alive(started.pid), "the server to end")


@pytest.mark.parametrize(
    ("python", "socket_name", "log_name", "message"),
    [
        ("/no/such/python", "s", "l", "cannot execute /no/such/python"),
        ("/bin/false", "s", "l", "/bin/false ended with 1: nothing"),
        (str(BARE_PYTHON), "s", "missing/l", "No such file or directory"),
        (str(BARE_PYTHON), "s", "", "Is a directory"),
    ],
)
def test_start_that_fails_says_why(folder: Path, python: str, socket_name: str, log_name: str, message: str) -> None:
    with pytest.raises(ForkServerStartError, match=message):
        start_fork_server(python, folder / socket_name, folder / log_name, env=ENVIRONMENT)


@pytest.mark.rare
def test_start_that_hangs_is_given_up(folder: Path) -> None:
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(ForkServerTimeoutError, match="did not start within"):
        start_fork_server(str(slow), folder / "s", folder / "l", deadline=timedelta(seconds=0.3))


def test_long_socket_path_is_refused(folder: Path) -> None:
    path = folder / ("x" * 120)
    with pytest.raises(ForkServerRefusedError, match="at most 107 bytes"):
        start_fork_server(sys.executable, path, folder / "l")
    with pytest.raises(ForkServerRefusedError, match="at most 107 bytes"):
        BlockingClient(path).hello_sync()


@pytest.mark.rare
def test_frozen_server_is_not_waited_for_forever(bare: RunningServer) -> None:
    os.kill(bare.started.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ForkServerTimeoutError, match=r"no answer within 0\.2 s"):
            BlockingClient(bare.socket, deadline=timedelta(seconds=0.2)).hello_sync()
    finally:
        os.kill(bare.started.pid, signal.SIGCONT)
    assert bare.client.hello_sync().pid == bare.started.pid


@pytest.mark.rare
def test_other_version_is_refused_but_may_end_the_server(folder: Path) -> None:
    pid = start_fork_server(str(BARE_PYTHON), folder / "s", folder / "l", env=ENVIRONMENT).pid
    BlockingClient(folder / "s").hello_sync()
    client = BlockingClient(folder / "s", protocol=99)
    with pytest.raises(ForkServerVersionError, match="protocol 1, not 99; shut that server down"):
        client.hello_sync()
    client.shutdown_sync()
    wait_until(lambda: not alive(pid), "the server to end")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_are_not_served(bare: RunningServer) -> None:
    """The socket's mode refuses them and, if it were open to all, the check of peer credentials."""
    program = (
        "import os, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n    sock.connect(sys.argv[1])\n    sock.send(b'\\0\\0\\0\\2{}'); print(sock.recv(100))\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )

    def ask() -> str:
        command = [str(BARE_PYTHON), "-c", program, str(bare.socket)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    bare.directory.chmod(0o711)
    assert ask() == "PermissionError"
    bare.socket.chmod(0o666)
    try:
        assert ask() in ("b''", "ConnectionResetError", "BrokenPipeError")
    finally:
        bare.socket.chmod(0o600)
    # Every turn of the server's loop checks whether its file was replaced: another mode is no replacement.
    for _ in range(2):
        assert bare.client.hello_sync().pid == bare.started.pid


def raw(server: RunningServer, data: bytes, fds: list[int] | None = None) -> bytes:
    """Return the server's answer to the bytes; empty if it closes the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(str(server.socket))
        socket.send_fds(sock, [data], fds or [])
        sock.shutdown(socket.SHUT_WR)
        try:
            return sock.recv(65536)
        except ConnectionResetError:
            return b""


def holds(server: RunningServer, one: socket.socket) -> bool:
    """Whether the server has a descriptor of this very socket."""
    mine = os.readlink(f"/proc/self/fd/{one.fileno()}")
    return mine in descriptors(server.started.pid)


def descriptors(pid: int) -> list[str]:
    """Return the targets of the process's open descriptors; one that is closed meanwhile is left out."""
    folder = Path(f"/proc/{pid}/fd")
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(folder / name))
    return found


def spawn_message(**changes: Any) -> dict[str, Any]:
    message = {"protocol": wire.PROTOCOL, "op": "spawn", "mode": "command", "target": "true", "cwd": "/", "env": {}}
    return message | {"fds": ["stdout", "stderr", "lifeline"]} | changes


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\3abc", b"\0\0\0\2[]", b"\xff\xff\xff\xff", b"\0\0\1\0{}"],
)
def test_garbage_ends_the_connection_and_nothing_else(bare: RunningServer, data: bytes) -> None:
    assert raw(bare, data) == b""
    assert bare.client.hello_sync().pid == bare.started.pid


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"op": "dance"}, "unknown request 'dance'"),
        (spawn_message(fds=[]), "0 descriptors announced, 3 arrived"),
        (spawn_message(mode="magic"), "mode 'magic' is none of"),
        (spawn_message(cwd="here"), "is not absolute"),
    ],
)
def test_bad_request_is_refused_and_its_descriptors_closed(
    bare: RunningServer, message: dict[str, Any], complaint: str
) -> None:
    with socket.socket() as one:
        answer = raw(bare, wire.encode({"protocol": wire.PROTOCOL, **message}), [one.fileno()] * 3)
        assert complaint in answer.decode()
        assert b'"ok":false' in answer
        wait_until(lambda: not holds(bare, one), "the descriptors to be closed")


@pytest.mark.rare
def test_too_many_descriptors_end_the_connection(bare: RunningServer) -> None:
    with socket.socket() as one:
        assert raw(bare, wire.encode(spawn_message()), [one.fileno()] * (wire.MAX_FDS + 20)) == b""
        wait_until(lambda: not holds(bare, one), "the descriptors to be closed")


def test_refusal_reaches_the_client(bare: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(ForkServerRefusedError, match="cwd 'relative' is not absolute"):
        run(bare, tmp_path, target="true", cwd="relative")
    with pytest.raises(ForkServerRefusedError, match="threads must be a whole number"):
        run(bare, tmp_path, target="true", threads=0)
    with pytest.raises(ForkServerRefusedError, match="needs the listening socket"):
        run(bare, tmp_path, mode="store")


def test_large_environment_arrives_whole(bare: RunningServer, tmp_path: Path) -> None:
    """The environment is larger than a socket's buffer, and has bytes that are not UTF-8."""
    env = {**ENVIRONMENT, **{f"LARGE_{number}": "x" * 10_000 for number in range(100)}, "ODD": "caf\udce9"}
    (tmp_path / "sum.py").write_text(
        "import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('LARGE_')), os.environb[b'ODD'])\n"
    )
    _, exited, said = run(bare, tmp_path, mode="script", target="sum.py", env=env)
    assert (exited.exit_code, said) == (0, "1000000 b'caf\\xe9'\n")
