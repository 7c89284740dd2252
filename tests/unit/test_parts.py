"""The part of the distribution that provides a module, and the line that installs it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
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


def installed(prefix: Path, **known: Any) -> parts.Installation:
    return dataclasses.replace(parts.Installation(f"{prefix}/bin/python", prefix, None, has_pip=True), **known)


def uv_tool(prefix: Path, receipt: str) -> parts.Installation:
    (prefix / "uv-receipt.toml").write_text(f"[tool]\n{receipt}\n")
    return installed(prefix, has_pip=False)


def pipx_tool(venvs: Path) -> parts.Installation:
    (venvs / "orchd").mkdir(parents=True)
    (venvs / "orchd" / "pipx_metadata.json").write_text("{}")
    return installed(venvs / "orchd", has_pip=False)


def test_with_pip_the_line_names_the_interpreter(tmp_path: Path) -> None:
    here = installed(tmp_path, python="/home/me/my envs/bin/python")
    assert parts.install_line("daemon", here) == "'/home/me/my envs/bin/python' -m pip install 'orchd[daemon]'"


def test_an_environment_without_pip_is_uvs(tmp_path: Path) -> None:
    here = installed(tmp_path, python="/venv/bin/python", has_pip=False)
    assert parts.install_line("top", here) == "uv pip install --python /venv/bin/python 'orchd[top]'"


def test_a_checkout_stays_one(tmp_path: Path) -> None:
    here = installed(tmp_path, python="/venv/bin/python", editable="/home/me/my orch")
    assert parts.install_line("top", here) == "/venv/bin/python -m pip install --editable '/home/me/my orch[top]'"
    by_uv = dataclasses.replace(here, has_pip=False)
    assert (
        parts.install_line("top", by_uv)
        == "uv pip install --python /venv/bin/python --editable '/home/me/my orch[top]'"
    )


def test_pipx_injects_into_the_environment_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPX_GLOBAL_HOME", str(tmp_path / "global"))
    mine = pipx_tool(tmp_path / "pipx" / "venvs")
    assert parts.install_line("daemon", mine) == "pipx inject orchd 'orchd[daemon]'"
    from_wheel = dataclasses.replace(mine, source="https://files.example.org/orchd.whl")
    assert (
        parts.install_line("daemon", from_wheel)
        == "pipx inject orchd 'orchd[daemon] @ https://files.example.org/orchd.whl'"
    )
    everyones = pipx_tool(tmp_path / "global" / "venvs")
    assert parts.install_line("daemon", everyones) == "pipx inject --global orchd 'orchd[daemon]'"


def test_uv_installs_the_tool_again_from_its_source(tmp_path: Path) -> None:
    wheel = tmp_path / "my orchd.whl"
    wheel.touch()
    here = uv_tool(tmp_path, f'requirements = [{{ name = "orchd", path = "{wheel}" }}]')
    assert parts.install_line("top", here) == f"uv tool install --with 'orchd[top]' '{wheel}'"


def test_uv_keeps_what_the_tool_has(tmp_path: Path) -> None:
    here = uv_tool(
        tmp_path,
        """requirements = [
            { name = "orchd", extras = ["daemon"], url = "https://files.example.org/orchd.whl" },
            { name = "orchd", extras = ["stacks", "top"] },
            { name = "virtualenv", specifier = ">=20" },
            { name = "torchx", extras = ["dev"], git = "https://git.example.org/torchx" },
        ]
        python = "3.12"
        """,
    )
    assert parts.install_line("top", here) == (
        "uv tool install --python 3.12 --with 'orchd[daemon,stacks,top]' --with 'virtualenv>=20' "
        "--with 'torchx[dev] @ git+https://git.example.org/torchx' https://files.example.org/orchd.whl"
    )


def test_uv_with_a_checkout(tmp_path: Path) -> None:
    here = uv_tool(tmp_path, f'requirements = [{{ name = "orchd", editable = "{tmp_path}" }}]')
    assert parts.install_line("top", here) == f"uv tool install --with 'orchd[top]' --editable {tmp_path}"


def test_uv_with_an_index(tmp_path: Path) -> None:
    here = uv_tool(tmp_path, 'requirements = [{ name = "orchd" }]')
    assert parts.install_line("top", here) == "uv tool install --with 'orchd[top]' orchd"


@pytest.mark.parametrize(
    "receipt", ['requirements = [{ name = "orchd", path = "/no/such/orchd.whl" }]', "", "requirements = [1]"]
)
def test_uv_without_a_source_adds_the_packages_themselves(tmp_path: Path, receipt: str) -> None:
    here = dataclasses.replace(uv_tool(tmp_path, receipt), source="file:///no/such/orchd.whl")
    line = parts.install_line("top", here)
    assert line.startswith(f"uv pip install --python {tmp_path}/bin/python 'textual>=")
    assert "orchd" not in line


def test_the_line_names_the_wheel_while_it_exists_and_then_the_packages(tmp_path: Path) -> None:
    """An index may not have the distribution: the line must not look for it there."""
    wheel = tmp_path / "my orchd.whl"
    wheel.touch()
    here = installed(tmp_path, python="/venv/bin/python", source=wheel.as_uri())
    assert parts.install_line("top", here) == f"/venv/bin/python -m pip install 'orchd[top] @ {wheel.as_uri()}'"
    wheel.unlink()
    line = parts.install_line("daemon", here)
    assert "'orchd" not in line
    assert {"'ray>", "'torch>", "'fastapi>"} <= {word.partition("=")[0] for word in line.split()}
    of_url = dataclasses.replace(here, source="https://files.example.org/orchd.whl")
    assert parts.install_line("top", of_url).endswith(" 'orchd[top] @ https://files.example.org/orchd.whl'")


def test_installed_versions_are_held_against_the_declared_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.unmet("daemon") == []
    for name, lines in (
        ("orchd-9", "Requires-Dist: old>=2.56; extra == 'daemon'\nRequires-Dist: new>=1; extra == 'daemon'"),
        ("old-2.50.1", ""),
        ("new-1.0rc1", ""),
    ):
        metadata = tmp_path / f"{name}.dist-info"
        metadata.mkdir()
        title, _, version = name.partition("-")
        (metadata / "METADATA").write_text(f"Name: {title}\nVersion: {version}\n{lines}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert parts.unmet("daemon") == ["old>=2.56 (2.50.1 is installed)", "new>=1 (1.0rc1 is installed)"]


def test_a_receipt_that_is_none_is_not_uvs(tmp_path: Path) -> None:
    (tmp_path / "uv-receipt.toml").write_text("what = is this")
    assert "pip install" in parts.install_line("top", installed(tmp_path))


@pytest.mark.parametrize(
    ("record", "editable", "source"),
    [
        ('{"url": "file:///home/me/my%20orch", "dir_info": {"editable": true}}', "/home/me/my orch", None),
        ('{"url": "file:///home/me/orch", "dir_info": {}}', None, "file:///home/me/orch"),
        ('{"url": "https://a.example/orchd.whl", "archive_info": {}}', None, "https://a.example/orchd.whl"),
        (
            '{"url": "https://a.example/orch", "vcs_info": {"vcs": "git", "commit_id": "0f"}}',
            None,
            "git+https://a.example/orch@0f",
        ),
        ("no JSON", None, None),
        (None, None, None),
    ],
)
def test_how_this_environment_has_orch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None, editable: str | None, source: str | None
) -> None:
    metadata = tmp_path / "orchd-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: orchd\nVersion: 9\n")
    if record is not None:
        (metadata / "direct_url.json").write_text(record)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    here = parts.this_installation()
    assert (here.python, here.prefix, here.editable) == (sys.executable, Path(sys.prefix), editable)
    assert here.source == source
    assert here.has_pip == (importlib.util.find_spec("pip") is not None)
    assert parts.install_line("top") == parts.install_line("top", here)


def test_what_is_missing_is_found_without_an_import() -> None:
    assert parts.missing_modules("train") == ()
    assert parts.missing_modules("some", {"some": ("json", "nowhere_at_all")}) == ("nowhere_at_all",)
