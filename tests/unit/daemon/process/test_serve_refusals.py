"""Conditions that keep a daemon from starting are reported before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import ServeOptions
from orchestrator.daemon.process.serve import serve
from orchestrator.spec.settings import Settings


def test_a_daemon_of_root_serves_no_group(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(RefusedError, match="members of lab would run whatever they submit as root") as caught:
        serve(Settings(home=home, uid=0), ServeOptions(group="lab"))
    assert "an account of its own" in caught.value.hint
    assert not home.exists()


def test_exporters_on_the_network_want_a_token(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(RefusedError, match="open to the network") as caught:
        serve(Settings(home=home, exporter_address="node"), ServeOptions())
    assert "--token-file" in caught.value.hint
    assert not home.exists()
