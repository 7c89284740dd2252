"""Options of the daemon that are read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import ServeOptions


def test_the_token_is_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert ServeOptions(token_file=str(tmp_path / "token")).read_token() == "secret"
    assert ServeOptions().read_token() == ""


def test_a_file_without_a_token_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, said in (("missing", "cannot be read"), ("empty", "holds no token"), ("binary", "cannot be read")):
        with pytest.raises(RefusedError, match=said) as caught:
            ServeOptions(token_file=str(tmp_path / name)).read_token()
        assert "urandom" in caught.value.hint
