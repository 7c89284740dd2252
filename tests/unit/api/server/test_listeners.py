"""Listeners: the socket's owner and mode, one daemon at a time, and an end that waits for nobody."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, RefusedError
from orchestrator.api.server import listeners as serve
from orchestrator.api.server.listeners import address_of, bind_control_socket, bind_tcp, host_names, is_loopback
from orchestrator.api.server.testing import serve_fake
from orchestrator.api.transport import serving_lock

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "orch.sock"
    previous = os.umask(0)
    try:
        bound = bind_control_socket(path)
    finally:
        os.umask(previous)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    bound.release()
    assert not path.exists()


def test_a_group_may_connect_when_it_is_named(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    bound = bind_control_socket(tmp_path / "s", group=group)
    assert mode(tmp_path / "s") == 0o660
    assert (tmp_path / "s").stat().st_gid == os.getgid()
    bound.release()


def test_the_lock_says_who_serves_until_the_process_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert serving_lock.holder(path) is None
    bound = bind_control_socket(tmp_path / "s")
    assert serving_lock.holder(path) == os.getpid()
    bound.withdraw()
    assert not (tmp_path / "s").exists()
    assert serving_lock.holder(path) == os.getpid()
    os.close(bound.lock)
    assert serving_lock.holder(path) is None


def test_an_unknown_group_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no group"):
        bind_control_socket(tmp_path / "new" / "s", group="no-such-group")
    assert not (tmp_path / "new").exists()


def test_what_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))  # closed without being removed, as by kill -9
    bound = bind_control_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(str(path))
    bound.release()


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    with closing_socket(tmp_path / "s"), pytest.raises(RefusedError, match="another daemon listens") as caught:
        bind_control_socket(tmp_path / "s")
    assert "orch down" in caught.value.hint


class closing_socket:  # noqa: N801 - a context manager
    def __init__(self, path: Path) -> None:
        self._bound = bind_control_socket(path)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._bound.release()


def test_a_live_listener_without_our_lock_is_respected(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "s"))
        other.listen(1)
        with pytest.raises(RefusedError, match="another daemon"):
            bind_control_socket(tmp_path / "s")
        assert (tmp_path / "s").exists()


def test_a_daemon_on_its_way_out_is_waited_for(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "s.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.2, lambda: os.close(lock))
    timer.start()
    bind_control_socket(tmp_path / "s").release()
    timer.join()


def test_but_not_for_ever(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "s.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(RefusedError, match="another daemon"):
        bind_control_socket(tmp_path / "s", predecessor_seconds=0.1)
    os.close(lock)


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(RefusedError, match="not a socket"):
        bind_control_socket(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"
    with pytest.raises(RefusedError, match="not a socket"):  # and the lock was let go
        bind_control_socket(tmp_path / "s")


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "tmp" / "shared"
    shared.mkdir(parents=True)
    shared.parent.chmod(0o1777)
    shared.chmod(0o777)
    with pytest.raises(RefusedError, match="can be written by other users") as caught:
        bind_control_socket(shared / "s")
    assert "ORCH_HOME" in caught.value.hint
    with pytest.raises(RefusedError, match="users share"):
        bind_control_socket(shared.parent / "s")


def test_release_leaves_a_successor_s_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bound = bind_control_socket(path)
    path.unlink()
    path.write_text("someone else's")
    bound.release()
    assert path.read_text() == "someone else's"


def test_tcp_listeners() -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as sock:
        host, _, port = address_of(sock).rpartition(":")
        assert host == "127.0.0.1"
        with pytest.raises(RefusedError, match="cannot listen"):
            bind_tcp("127.0.0.1", int(port))
    with pytest.raises(BadRequestError, match="no address"):
        bind_tcp("no such host.", 0)


def test_names_of_a_listener() -> None:
    assert "gpu-box" in host_names("GPU-box")
    assert "[fe80::1]" in host_names("fe80::1")
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.7")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("gpu-box")


def test_stopping_ends_held_requests_and_followed_logs(served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    client = Client(served.endpoint)
    failures: list[BaseException] = []

    def hold(ask: object) -> None:
        try:
            ask()  # type: ignore[operator]
        except DaemonUnreachableError as error:
            failures.append(error)

    version = client.wait_change(None)
    threads = [
        threading.Thread(target=hold, args=(lambda: client.wait_change(version, timeout_seconds=600),)),
        threading.Thread(target=hold, args=(lambda: list(client.logs(job.id, follow=True)),)),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 2)
    served.stop()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "it is held no longer"
    assert len(failures) == 2
    served.start()


def test_a_client_that_leaves_frees_what_it_held(served: ServedFake) -> None:
    served.do(lambda service: service.add())
    version = Client(served.endpoint).wait_change(None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(served.endpoint.socket_path)
        sock.sendall(f"GET /api/v1/changes?after={version} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: served.do(lambda service: len(service._waiters)) == 1)
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 0)


def test_a_follower_that_leaves_frees_what_it_held(served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    served.do(lambda service: service.write(job.id, "one"))
    lines = Client(served.endpoint).logs(job.id, follow=True)
    assert next(lines).text == "one"
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 1)
    lines.close()  # type: ignore[attr-defined]
    wait_until(lambda: served.do(lambda service: len(service._waiters)) == 0)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"GET /api/v1/jobs HTTP/1.1\r\nX-Slow: "])
def test_a_connection_that_never_finishes_its_head_is_closed(tmp_path: Path, said: bytes) -> None:
    quick = serve.Deadlines(head_seconds=0.1)
    with (
        serve_fake(tmp_path, owner_uid=os.getuid(), deadlines=quick) as served,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.settimeout(60)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(said)
        assert sock.recv(100) == b""


def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid(), body_seconds=0.1) as served, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(served.endpoint.socket_path)
        sock.sendall(
            b"POST /api/v1/prune HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 30\r\n\r\n{"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 504")


def test_it_can_be_stopped_and_started_again(served: ServedFake) -> None:
    served.stop()
    with pytest.raises(DaemonUnreachableError):
        Client(served.endpoint).health()
    served.start()
    assert Client(served.endpoint).health().ready
