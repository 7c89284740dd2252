"""docs/recipes.md: each script runs and resumes, each job file is valid, each command runs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli.app import ENTRIES
from orchestrator.spec.job import parse_job
from orchestrator.spec.reader.reading import all_keys
from tests.support import warm
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE, re.DOTALL))
JOBS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
NEEDS = {"hf.py": "transformers", "lit.py": "lightning", "acc.py": "accelerate"}
SHOWN = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
INLINE = [c for line in PAGE.splitlines() if line.startswith("| ") for c in re.findall(r"`(orch [^`]+)`", line)]
STARTS_A_DAEMON = ("orch up", "orch port-forward", "orch run -i", "orch attach")


@pytest.mark.rare
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_script_runs_and_a_second_start_has_nothing_left_to_do(tmp_path: Path, name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    modules = warm.FRAMEWORKS if name in NEEDS else warm.TRAINING
    steps = []
    for _ in range(2):
        done = warm.run(SCRIPTS[name], cwd=tmp_path, modules=modules)
        assert done.returncode == 0, done.stderr
        steps.append(done.stdout.splitlines()[-1])
    assert steps == ["step 12", "step 12"]


@pytest.mark.rare
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_two_ranks_train_together_and_save_once(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    assert _two_ranks(SCRIPTS[name], tmp_path) == [(0, "step 12"), (0, "step 12")]
    saved = [path.name for path in tmp_path.rglob("*") if re.fullmatch(r"(step|checkpoint)-\d+(\.ckpt)?", path.name)]
    assert len(saved) >= 2
    assert not list(tmp_path.rglob(".draft-*"))


@pytest.mark.parametrize(
    ("name", "found", "alone"),
    [
        pytest.param("acc.py", "cpu=not torch.cuda.is_available()", "", marks=pytest.mark.rare),
        ("lit.py", "devices=ranks", "devices=1"),
    ],
)
def test_ranks_that_do_not_find_each_other_are_told_what_to_write(
    tmp_path: Path, name: str, found: str, alone: str
) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    assert found in SCRIPTS[name]
    for code, errors in _two_ranks(SCRIPTS[name].replace(found, alone), tmp_path, errors=True):
        assert code != 0
        assert "orchestrator.train.errors.ConfigError: " in errors
        assert "the job has 2 ranks: they would not train together" in errors
    assert not list(tmp_path.rglob("step-*"))


def _two_ranks(script: str, folder: Path, *, errors: bool = False) -> list[tuple[int, str]]:
    """Run the script as two ranks on CPUs; return each one's exit code and last line of output or errors."""
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "recipe", "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> tuple[int, str]:
        environ = {**os.environ, **both, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        done = warm.run(script, cwd=folder, modules=warm.FRAMEWORKS, env=environ)
        lines = (done.stderr if errors else done.stdout).splitlines()
        return done.returncode, lines[-1] if lines else done.stderr

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("text", JOBS, ids=range(len(JOBS)))
def test_each_job_file_is_one_and_names_a_script_of_the_page(text: str) -> None:
    spec = parse_job(text)
    script = spec.entrypoint.split()[-1]
    assert script in SCRIPTS or script == "train.py"


def test_what_a_job_file_watches_is_what_its_script_writes() -> None:
    code = (
        "from orchestrator.train.integrations import accelerate, lightning; print(lightning.FOLDER, accelerate.FOLDER)"
    )
    done = warm.run(code, modules=warm.FRAMEWORKS)
    assert done.returncode == 0, done.stderr
    of_lightning, of_accelerate = done.stdout.split()
    watched = {parse_job(text).name: parse_job(text).checkpoint.watch or "" for text in JOBS}
    assert watched["lit"].partition("/")[0] == of_lightning
    assert watched["acc"].partition("/")[0] == of_accelerate
    assert watched["gpt"] in SCRIPTS["gpt.py"]


@pytest.mark.parametrize("line", [line for line in (*SHOWN, *INLINE) if not line.startswith(STARTS_A_DAEMON)])
def test_the_command_runs(
    orch: Orch, served: ServedFake, home: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(home)
    (home / "job.yaml").write_text("name: digits\nentrypoint: python train.py\n")
    (home / "train.sbatch").write_text("#!/bin/bash\n#SBATCH -n 2\nsrun python train.py\n")
    state = {"rerun": "SUCCEEDED", "hold": "PENDING", "release": "PENDING"}.get(words[0], "RUNNING")
    served.do(lambda service: service.add("digits", state=state, num_workers=2, attempt=1))
    done = orch(*words)
    assert done.code in ((0, 3) if words[:2] == ["nodes", "drain"] else (0,)), done.err


@pytest.mark.parametrize("line", [line for line in SHOWN if line.startswith(STARTS_A_DAEMON)])
def test_the_options_of_what_starts_or_forwards_exist(orch: Orch, line: str) -> None:
    words = shlex.split(line)[1:]
    assert words[0] in {entry.name for entry in ENTRIES}
    shown = orch(words[0], "--help").out
    assert all(word in shown for word in words if word.startswith("--"))


def test_keys_of_the_phrase_book_are_keys_of_job_yaml() -> None:
    keys = {path.partition(".")[0] for path in all_keys()}
    named = re.findall(r"`([a-z_]+):", PAGE.partition("## From Slurm")[2])
    assert named
    assert set(named) <= keys | {"resources_per_worker"}


def test_what_a_job_sees_names_real_variables_and_the_page_is_listed() -> None:
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    from orchestrator.runtime.spawn.environment import visibility

    for vendor in ("nvidia", "amd", "intel"):
        assert all(f"`{name}" in page for name in visibility(vendor, ("0",)))
    listed = (DOCS / "README.md").read_text(encoding="utf-8")
    assert "(recipes.md)" in listed
    assert "(environment.md)" in listed
    assert json.dumps(sorted(SCRIPTS)) == '["acc.py", "gpt.py", "hf.py", "lit.py", "three.py"]'
