"""Which part of the distribution brings a module, and the line that installs it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from orchestrator import parts


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("torch", "train"),
        ("torch.nn", "train"),
        ("ray", "daemon"),
        ("matplotlib", "plots"),
        ("numpy", "plots"),
        ("json", None),
    ],
)
def test_a_module_is_brought_by_the_smallest_part_that_has_it(module: str, part: str | None) -> None:
    assert parts.part_of(module) == part


def test_the_line_names_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/my envs/bin/python")
    assert parts.install_line("daemon") == "'/home/me/my envs/bin/python' -m pip install 'orchd[daemon]'"


def test_an_environment_without_pip_is_uvs(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pip(name: str, package: str | None = None) -> Any:
        return None if name == "pip" else importlib.util.find_spec(name, package)

    monkeypatch.setattr(parts, "find_spec", without_pip)
    assert parts.install_line("top") == f"uv pip install --python {sys.executable} 'orchd[top]'"


def test_what_is_missing_is_found_without_an_import() -> None:
    assert parts.missing_modules("train") == ()
    assert parts.missing_modules("some", {"some": ("json", "nowhere_at_all")}) == ("nowhere_at_all",)
