"""What `orch doctor` says of the tool that reads stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api.launch import Finding, Level
from orchestrator.daemon.process import doctor
from orchestrator.parts import install_line
from orchestrator.spec.settings import Settings


def about_py_spy(home: Path) -> Finding:
    (found,) = [f for f in doctor.examine(Settings(home=home)) if "py-spy" in f.what]
    return found


def test_whether_stacks_can_be_read_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert about_py_spy(tmp_path).level is Level.OK
    monkeypatch.setattr(doctor, "find_py_spy", lambda: None)
    missing = about_py_spy(tmp_path)
    assert (missing.level, missing.remedy) == (Level.WARNING, install_line("stacks"))
