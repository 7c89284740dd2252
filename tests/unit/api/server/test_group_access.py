"""The path to a group's socket is opened for that group, and nothing else is; obstacles are reported."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from orchestrator.api.errors import BadRequestError, InvalidSpecError, RefusedError
from orchestrator.api.requests import SubmitRequest
from orchestrator.api.server.group_access import open_way
from orchestrator.daemon.submitting.submission import check

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to use a group of others")
GROUP = grp.getgrgid(os.getgid()).gr_name
OTHERS = "users"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def home_in(folder: Path) -> Path:
    """Make a home that only its owner can enter, with files that all can read; make its parents traversable."""
    for above in folder.parents:
        if above.stat().st_uid == os.geteuid() and mode(above) & 0o011 != 0o011:
            above.chmod(mode(above) | 0o011)
    folder.chmod(0o755)
    home = folder / "home"
    (home / "run").mkdir(parents=True)
    (home / "jobs").mkdir(mode=0o755)
    (home / "store.sqlite3").touch(mode=0o644)
    (home / "run" / "daemon.json").touch(mode=0o644)
    home.chmod(0o700)
    (home / "run").chmod(0o700)
    return home


@as_root
def test_the_group_passes_through_and_nothing_else_is_open(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    open_way(home, home / "run" / "orch.sock", OTHERS)
    gid = grp.getgrnam(OTHERS).gr_gid
    for directory in (home, home / "run"):
        assert (mode(directory), directory.stat().st_gid) == (0o710, gid)
    assert mode(home / "jobs") == 0o700
    assert mode(home / "store.sqlite3") == mode(home / "run" / "daemon.json") == 0o600


def test_a_way_that_is_open_already_keeps_its_mode(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    for directory in (home, home / "run"):
        directory.chmod(0o711)
    open_way(home, home / "run" / "orch.sock", GROUP)
    assert mode(home) == mode(home / "run") == 0o711
    assert mode(home / "store.sqlite3") == 0o600


@as_root
def test_a_closed_directory_above_is_named(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    tmp_path.chmod(0o700)
    with pytest.raises(RefusedError, match=f"cannot pass through {tmp_path}") as caught:
        open_way(home, home / "run" / "orch.sock", OTHERS)
    assert f"chmod o+x {tmp_path}" in caught.value.hint
    assert mode(home) == 0o700


def test_a_socket_outside_the_home_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="too long") as caught:
        open_way(home_in(tmp_path), Path("/run/user/0/orch-1.sock"), GROUP)
    assert "ORCH_HOME" in caught.value.hint


def test_an_unknown_group(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no group"):
        open_way(tmp_path, tmp_path / "run" / "orch.sock", "no-such-group")


@as_root
def test_a_group_that_the_daemon_s_user_is_no_member_of(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    for path in (home, home / "run", home / "jobs", home / "store.sqlite3", home / "run" / "daemon.json"):
        os.chown(path, 65534, 65534)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            open_way(home, home / "run" / "orch.sock", OTHERS)
        except RefusedError as error:
            os._exit(0 if "not a member" in error.message else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@as_root
def test_a_working_directory_that_the_daemon_s_user_cannot_read_is_said(tmp_path: Path) -> None:
    home_in(tmp_path)
    (tmp_path / "theirs").mkdir(mode=0o700)
    request = SubmitRequest(
        yaml="name: x\nentrypoint: sleep 1\nworking_dir: theirs\n",
        source="job.yaml",
        idempotency_key="k" * 32,
        cwd=str(tmp_path),
        path="/usr/bin:/bin",
    )
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            check(request)
        except InvalidSpecError as error:
            os._exit(0 if "cannot be read by the daemon" in error.problems[0].message else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
