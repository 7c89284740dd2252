"""The examples of README and docs work: scripts and commands run, and links lead to files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.lifecycle.advance import table
from orchestrator.core.states import mermaid
from orchestrator.spec.job import parse_job
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until
from tests.support.walkthrough import diagram

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")
ANCHOR = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*\.md|)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _blocks(page: Path, language: str, flag: str = "") -> list[str]:
    return [body for kind, rest, body in FENCE.findall(page.read_text()) if kind == language and flag in rest]


README_SCRIPTS = _blocks(ROOT / "README.md", "python")


def test_every_link_leads_to_a_file() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text())]
    assert len(links) > 100
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_into_a_page_leads_to_a_heading() -> None:
    links = [(page, name, at) for page in PAGES for name, at in ANCHOR.findall(page.read_text())]
    assert len(links) > 20
    assert [
        f"{page}: {name}#{at}" for page, name, at in links if at not in anchors(page.parent / name if name else page)
    ] == []


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in (*docs.glob("*.md"), *docs.glob("operations/*.md"))} - {
        "README.md"
    }
    assert pages <= listed


def test_the_state_diagram_is_the_one_of_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_effects_of_each_phase_are_those_of_the_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"<!-- effects:begin -->\n{table()}\n<!-- effects:end -->" in page


def test_the_death_of_a_rank_is_the_one_of_a_run() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"<!-- rank-dies:begin -->\n```mermaid\n{diagram()}\n```\n<!-- rank-dies:end -->" in page


def test_the_job_of_the_readme_is_a_good_one() -> None:
    (text,) = _blocks(ROOT / "README.md", "yaml")
    assert parse_job(text).resources.num_workers == 2


def test_the_trainer_of_the_readme_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = README_SCRIPTS[2]
    assert len([line for line in script.splitlines() if line.strip()]) <= 15
    for name in ("RANK", "WORLD_SIZE", "ORCH_PROGRESS_PATH", "ORCH_CHECKPOINT_DIR", "ORCH_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
        },  # two threads that wait for each other take minutes on a busy machine
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr


WAITS_FOR_ITS_END = """
    if step == 250 and os.environ["ORCH_ATTEMPT"] == "1":
        open(f"waits-{os.environ['RANK']}", "x").close()
        signal.pause()"""


def killed_at_250(script: str) -> str:
    """Return the script with 400 steps, in whose first attempt every rank waits at step 250 for a signal."""
    shorter, totals = re.subn(r"total = 0, \d+", "total = 0, 400", script)
    waiting, loops = re.subn(
        r"^for step in range.*:$", lambda loop: loop[0] + WAITS_FOR_ITS_END, shorter, flags=re.MULTILINE
    )
    assert (totals, loops) == (1, 1)
    return f"import os, signal\n{waiting}"


def kill_the_last_rank(stack: Stack, job_id: str) -> None:
    """Kill the rank once all wait and a checkpoint is known."""
    pids, folder = stack.pids(job_id), Path(stack.job(job_id).working_dir)
    wait_until("the ranks wait", lambda: len(list(folder.glob("waits-*"))) == len(pids))
    wait_until("a checkpoint", lambda: stack.job(job_id).checkpoint)
    os.kill(pids[-1], signal.SIGKILL)


def check_the_readme(stack: Stack, folder: Path) -> None:
    """Run the script for torchrun with the commands of the README, then the loop with the four calls: both continue after a kill."""
    (commands,) = [body for body in _blocks(ROOT / "README.md", "console") if "kill -9" in body]
    (job_file,) = _blocks(ROOT / "README.md", "yaml")
    directory = folder / "readme"
    directory.mkdir()
    (directory / "job.yaml").write_text(job_file)
    (directory / "train.py").write_text(killed_at_250(README_SCRIPTS[0]))
    shown: dict[str, str] = {}
    for line in re.findall(r"^\$ (.+)$", commands, re.MULTILINE):
        program, *words = shlex.split(line)
        if program == "kill":
            kill_the_last_rank(stack, shown["submit"].strip())
            continue
        assert program == "orch", line
        done = stack.orch(*words, cwd=directory)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        shown[words[0]] = done.stdout
    job_id = shown["submit"].strip()
    assert "SUCCEEDED" in shown["status"]
    assert "rank 1 was killed by SIGKILL" in shown["status"]
    first = stack.log(job_id, attempt=2, rank=0).splitlines()[0]  # it prints every 100th step, and then saves
    assert 200 <= int(first.removeprefix("step ").partition("/")[0]) <= 300, first
    assert (directory / job_id / "outputs" / "last.pt").stat().st_size > 0

    alone = job_file.replace("num_workers: 2", "num_workers: 1").partition("checkpoint:")[0]
    own = stack.submit(alone, folder / "own", train=killed_at_250(README_SCRIPTS[1]))
    kill_the_last_rank(stack, own)
    assert stack.wait(own).state == "SUCCEEDED"
    assert int(stack.log(own, attempt=2, rank=0).splitlines()[0].removeprefix("start ")) > 0


SECOND_JOB_WAITS = """from __future__ import annotations
import os, signal, time
os.makedirs(os.path.join({begun!r}, os.environ["ORCH_JOB_ID"]), exist_ok=True)
if len(os.listdir({begun!r})) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(0.1)
"""


def test_every_command_of_the_readme_and_the_tour_runs(tmp_path: Path) -> None:
    """With one daemon, which takes longer to start than any command."""
    (tour,) = _blocks(ROOT / "docs" / "tour.md", "console", "tour")
    directory = tmp_path / "digits"
    shutil.copytree(ROOT / "examples" / "digits", directory)
    job = directory / "job.yaml"
    job.write_text(job.read_text().replace("--epochs 60", "--epochs 3"))
    begun, script = tmp_path / "begun", directory / "train.py"
    # The tour cancels the second job: it must not end before, however long the commands in between take.
    first = "from __future__ import annotations\n"
    script.write_text(script.read_text().replace(first, SECOND_JOB_WAITS.format(begun=str(begun)), 1))
    stack = Stack()
    try:
        for line in tour.strip().splitlines():
            words = shlex.split(line.removeprefix("$ "))
            assert words[0] == "orch", line
            more = ["--read-listen", "127.0.0.1:0"] if words[1] == "up" else []
            done = stack.orch(*words[1:], *more, cwd=directory)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            if words[1] == "up":
                check_the_readme(stack, tmp_path)
    finally:
        stack.close()
