"""What README and docs show works: every command of the tour is run, every other one exists, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from orchestrator.core.states import mermaid
from orchestrator.spec.job import parse_job
from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")


def _blocks(page: Path, language: str, flag: str = "") -> list[str]:
    return [body for kind, rest, body in FENCE.findall(page.read_text()) if kind == language and flag in rest]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_the_state_diagram_is_the_one_of_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_job_of_the_readme_is_a_good_one() -> None:
    (text,) = _blocks(ROOT / "README.md", "yaml")
    assert parse_job(text).resources.num_workers == 2


def test_the_script_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = _blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "ORCH_PROGRESS_PATH", "ORCH_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    exec(compile(text, "README.md", "exec"), {})


def test_every_command_of_the_tour_runs(tmp_path: Path) -> None:
    (tour,) = _blocks(ROOT / "README.md", "console", "tour")
    directory = tmp_path / "digits"
    shutil.copytree(ROOT / "examples" / "digits", directory)
    job = directory / "job.yaml"
    job.write_text(job.read_text().replace("--epochs 60", "--epochs 3"))
    stack = Stack()
    try:
        for line in tour.strip().splitlines():
            words = shlex.split(line.removeprefix("$ "))
            assert words[0] == "orch", line
            more = ["--read-listen", "127.0.0.1:0"] if words[1] == "up" else []
            done = stack.orch(*words[1:], *more, cwd=directory, seconds=120)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    finally:
        stack.close()
