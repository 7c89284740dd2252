"""An installed wheel, away from the repository, contains everything that the documentation shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.support.stack import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel into a directory outside of the repository; return its path."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("*.whl")
    target = directory / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def _run(site: Path, *arguments: str, cwd: Path, seconds: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ORCH_", "RAY_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _running(site: Path) -> list[psutil.Process]:
    """Return the processes that were started from the wheel and still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PYTHONPATH") == str(site):
                found.append(process)
    return found


def test_it_is_the_wheel_that_is_imported(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, "-c", "import orchestrator; print(orchestrator.__file__)", cwd=tmp_path)
    assert done.stdout.startswith(str(installed))


def test_the_demo_runs_from_the_wheel_and_ends_with_a_good_model(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, "-m", "orchestrator.cli.main", "demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _running(installed) == []
    told = json.loads(done.stdout)
    assert set(told) == {
        "job_id",
        "state",
        "restarts",
        "steps_lost",
        "submit_to_first_step_seconds",
        "recovery_seconds",
        "accuracy",
    }
    assert told["state"] == "SUCCEEDED"
    assert told["restarts"] == 1
    assert told["accuracy"] >= 0.95
    assert told["steps_lost"] <= 1


def test_boards_and_rules_come_with_it(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, "-m", "orchestrator.cli.main", "dashboards", "export", str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {p.suffix for p in (tmp_path / "out").rglob("*") if p.is_file()} >= {".json", ".yml"}


LINK = re.compile(r"\]\(([^)\s]+)\)")


def page_of(metadata: str) -> tuple[list[str], list[str]]:
    """Return the project's addresses and the links of the package's page."""
    head, _, text = metadata.partition("\n\n")
    return re.findall(r"^Project-URL: (.+)$", head, re.MULTILINE), LINK.findall(text)


def test_the_package_page_names_nothing_that_is_not_known(installed: Path) -> None:
    """Without the repository's address there are no addresses, and a link to a file is its text."""
    (metadata,) = installed.glob("orchd-*.dist-info/METADATA")
    addresses, links = page_of(metadata.read_text())
    assert addresses == []
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.rare
def test_the_links_of_the_package_page_lead_to_files_of_that_version(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    environ = {**os.environ, "ORCH_REPOSITORY_URL": "https://git.example.org/me/orch/"}
    done = subprocess.run(build, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.glob("orchd-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        addresses, links = page_of(member.read().decode())
    assert {"LICENSE", "README.md", "Makefile", ".ci/python", "deploy/published.py", "docs/install.md"} <= names
    version = sdist.name.removeprefix("orchd-").removesuffix(".tar.gz")
    assert "Source, https://git.example.org/me/orch" in addresses
    prefix = f"https://git.example.org/me/orch/blob/v{version}/"
    files = [link.removeprefix(prefix).partition("#")[0] for link in links if link.startswith(prefix)]
    assert {"docs/install.md", "LICENSE"} <= set(files)
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_what_an_administrator_copies_comes_with_it(installed: Path) -> None:
    """The pages of operations name these files below the installation's prefix, where pip puts a wheel's data."""
    (data,) = installed.glob("orchd-*.data/data")
    shared = data / "share" / "orch"
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/operations").glob("*.md"))
    (block,) = re.findall(r"^cd /opt/orch/share/orch .*?^```", pages, re.MULTILINE | re.DOTALL)
    patterns = re.findall(r"(?<=\s)(systemd/[\w.*]+)", block)
    assert len(patterns) >= 4
    for pattern in [
        *patterns,
        "kubernetes/*.yaml",
        "prometheus/*.yml",
        "alertmanager/*.yml",
    ]:
        found = {path.name for path in shared.glob(pattern)}
        assert found == {path.name for path in (ROOT / "deploy").glob(pattern)}, pattern
        assert found, pattern
    boards = {path.name for path in (ROOT / "orchestrator/data/dashboards").glob("*.json")}
    assert {path.name for path in shared.glob("kubernetes/generated/*.json")} == boards
    for path in re.findall(r"/opt/orch/share/orch/([\w./-]*\w)", pages + units(shared)):
        assert (shared / path).exists(), path
    assert not list(shared.rglob("secrets"))


def units(shared: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((shared / "systemd").glob("*.service")))


def test_the_backup_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (program,) = installed.glob("orchd-*.data/data/share/orch/backup.py")
    done = _run(installed, str(program), "check", str(tmp_path / "none.sqlite3"), cwd=tmp_path)
    assert done.returncode == 1
    assert "backup.py:" in done.stderr
