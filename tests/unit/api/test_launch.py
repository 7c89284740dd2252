"""Options of the daemon that are read from files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import ServeOptions, read_token
from tests.support.users import OTHER, as_root, as_user

TOKEN = "secret-of-enough-length"


def test_the_token_is_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    assert ServeOptions(token_file=str(tmp_path / "token")).read_token() == TOKEN
    assert ServeOptions().read_token() == ""


def test_a_file_without_a_token_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "pipe").mkdir()
    for name, said in (
        ("missing", "cannot be read"),
        ("empty", "holds no token"),
        ("binary", "cannot be read"),
        ("pipe", "not a regular file"),
    ):
        with pytest.raises(RefusedError, match=said) as caught:
            ServeOptions(token_file=str(tmp_path / name)).read_token()
        assert "urandom" in caught.value.hint


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o602, 0o610])
def test_a_file_that_others_can_read_or_change_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    os.chown(token, -1, os.getegid() if os.geteuid() else 65534)
    token.chmod(mode)
    with pytest.raises(RefusedError, match=f"mode {mode:04o}") as caught:
        read_token(str(token))
    assert caught.value.hint == f"chmod 600 {token}"
    token.chmod(0o600)
    assert read_token(str(token)) == TOKEN


@as_root
def test_a_secret_that_kubernetes_mounts_for_the_pod_s_group_is_taken() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        token = Path(directory) / "token"
        token.write_text(f"{TOKEN}\n")
        os.chown(token, 0, OTHER)
        token.chmod(0o440)
        assert as_user(OTHER, lambda: read_token(str(token))) == TOKEN
        token.chmod(0o444)
        assert "mode 0444" in as_user(OTHER, lambda: read_token(str(token)))


@as_root
def test_root_has_no_token_that_its_group_can_read(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o640)
    with pytest.raises(RefusedError, match="mode 0640"):
        read_token(str(token))


@as_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    os.chown(token, 65534, 65534)
    with pytest.raises(RefusedError, match="belongs to user 65534"):
        read_token(str(token))


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN[:15])
    token.chmod(0o600)
    with pytest.raises(RefusedError, match="15 characters") as caught:
        ServeOptions(token_file=str(token)).read_token()
    assert "urandom" in caught.value.hint
