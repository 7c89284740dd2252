"""The control socket: its owner and mode, and one daemon at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.server.control_socket import bind_control_socket
from orchestrator.api.transport import peer

if TYPE_CHECKING:
    from pathlib import Path


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
    shared = tmp_path / "group.sock"
    assert (mode(tmp_path / "s"), mode(shared)) == (0o600, 0o660)
    assert shared.stat().st_gid == os.getgid()
    bound.release()
    assert not shared.exists()


def test_a_queue_that_members_fill_keeps_the_owner_from_nothing(tmp_path: Path) -> None:
    """Nothing accepts: the kernel takes connections until the queue of their socket is full."""
    bound = bind_control_socket(tmp_path / "s", group=grp.getgrgid(os.getgid()).gr_name)
    with contextlib.ExitStack() as members, socket.socket(socket.AF_UNIX) as owner:
        waiting = 0
        while waiting == 0:
            member = members.enter_context(socket.socket(socket.AF_UNIX))
            member.setblocking(False)
            waiting = member.connect_ex(str(tmp_path / "group.sock"))
        assert waiting == errno.EAGAIN
        owner.setblocking(False)
        owner.connect(str(tmp_path / "s"))
    bound.release()


def test_a_daemon_without_a_group_removes_the_socket_that_one_with_a_group_left(tmp_path: Path) -> None:
    left = bind_control_socket(tmp_path / "s", group=grp.getgrgid(os.getgid()).gr_name)
    for sock in left.socks:
        sock.close()
    os.close(left.lock)  # as SIGKILL leaves them
    bound = bind_control_socket(tmp_path / "s")
    assert not (tmp_path / "group.sock").exists()
    bound.release()


def test_the_lock_says_who_serves_until_the_process_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert peer.holder(path) is None
    bound = bind_control_socket(tmp_path / "s")
    assert peer.holder(path) == os.getpid()
    bound.withdraw()
    assert not (tmp_path / "s").exists()
    assert peer.holder(path) == os.getpid()
    os.close(bound.lock)
    assert peer.holder(path) is None


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


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(RefusedError, match="not a socket"):
        bind_control_socket(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"
    with pytest.raises(RefusedError, match="not a socket"):  # and the lock was released
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
