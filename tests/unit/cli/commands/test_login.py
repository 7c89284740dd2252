"""`orch login`: it stores the daemon for later commands, readable by this user alone."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import BadRequestError, NotPermittedError
from orchestrator.api.server.testing import ServedFake, serve_fake
from orchestrator.api.transport.endpoint import endpoint_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome


@pytest.fixture
def remote(home: Path) -> Iterator[ServedFake]:
    with serve_fake(home / "elsewhere", owner_uid=os.getuid(), token="t0ken") as fake:
        yield fake


def address(remote: ServedFake) -> str:
    return f"http://127.0.0.1:{remote.tcp_endpoint.port}"


def log_in(orch: Callable[..., Outcome], remote: ServedFake, home: Path) -> None:
    token = home / "token"
    token.write_text("t0ken\n")
    token.chmod(0o600)
    answer = orch("login", address(remote), "--token-file", str(token))
    assert answer.code == 0, answer.err
    assert answer.out == f"commands go to {address(remote)}; `orch login --forget` ends that\n"


def test_commands_go_to_the_daemon_of_the_login_until_it_is_forgotten(
    orch: Callable[..., Outcome], remote: ServedFake, home: Path
) -> None:
    log_in(orch, remote, home)
    job = remote.do(lambda service: service.add())
    assert job.id in orch("status").out
    assert orch("login", "--json").json == {"address": address(remote), "remote": True}
    assert (home / "login").stat().st_mode & 0o777 == 0o600
    assert orch("login", "--forget").out == "logged out\n"
    assert orch("status").code == 4
    assert orch("login", "--forget", "--json").json["was_logged_in"] is False


def test_a_wrong_token_is_not_kept(
    orch: Callable[..., Outcome], remote: ServedFake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_TOKEN", "wrong")
    answer = orch("login", address(remote))
    assert answer.code == 5
    assert "requires the daemon's token" in answer.err
    assert not (home / "login").exists()


def test_the_token_may_come_on_standard_input(
    orch: Callable[..., Outcome], remote: ServedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("t0ken\n"))
    assert orch("login", address(remote)).code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "there is no token" in orch("login", address(remote)).err


@pytest.mark.parametrize("text", ["", "host", "https://host:1", "http://host:99999"])
def test_an_address_that_is_none_is_refused(orch: Callable[..., Outcome], home: Path, text: str) -> None:
    answer = orch("login", text)
    assert answer.code == 2
    assert f"{text!r} is not the address of a daemon" in answer.err
    assert not (home / "login").exists()


def test_the_environment_goes_before_the_login(orch: Callable[..., Outcome], remote: ServedFake, home: Path) -> None:
    log_in(orch, remote, home)
    environ = {"ORCH_HOME": str(home)}
    assert endpoint_from(environ).token == "t0ken"
    assert endpoint_from({**environ, "ORCH_ADDRESS": address(remote)}).token == "t0ken"
    other = endpoint_from({**environ, "ORCH_ADDRESS": "http://other:1"})
    assert (other.host, other.token) == ("other", "")
    assert endpoint_from({**environ, "ORCH_ADDRESS": address(remote), "ORCH_TOKEN": "mine"}).token == "mine"


def test_a_login_that_others_could_read_or_write_is_refused(home: Path) -> None:
    file = home / "login"
    file.write_text("http://127.0.0.1:1\nt0ken\n")
    file.chmod(0o644)
    with pytest.raises(NotPermittedError, match="not a file of this user alone"):
        endpoint_from({"ORCH_HOME": str(home)})
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(NotPermittedError, match="cannot be read"):
        endpoint_from({"ORCH_HOME": str(home)})


def test_a_damaged_login_is_named(home: Path) -> None:
    (home / "login").write_text("http://127.0.0.1:1\n")
    (home / "login").chmod(0o600)
    with pytest.raises(BadRequestError, match="is damaged"):
        endpoint_from({"ORCH_HOME": str(home)})
