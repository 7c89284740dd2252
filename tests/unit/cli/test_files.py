"""`init`, `schema`, `completion`, and the reference page."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli.app import ENTRIES, LazyCommands
from orchestrator.cli.reference import examples, render_cli_reference
from orchestrator.spec.job import parse_job
from orchestrator.spec.reader.reading import job_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


def test_the_reference_page_is_current() -> None:
    assert DOCS.read_text() == render_cli_reference(), (
        "write it anew: python -m orchestrator.cli.reference > docs/cli.md"
    )


def test_the_reference_page_has_every_command() -> None:
    page = render_cli_reference()
    for entry in ENTRIES:
        assert f"### `orch {entry.name}" in page
    for sub in ("cordon", "drain", "uncordon"):
        assert f"### `orch nodes {sub}" in page
    assert "Typer" not in page
    assert "None" not in page


def test_every_command_has_an_example_that_it_takes() -> None:
    shown = examples()
    for path, item in commands_of("", LazyCommands()):
        if path not in shown:
            assert getattr(item, "commands", None), f"{path} has no example in orchestrator/cli/reference.py"
            continue
        words = shlex.split(shown.pop(path))[1 + len(path.split()) :]
        item.make_context(path, words)
    assert shown == {}


def commands_of(path: str, commands: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in commands:
        item, whole = commands[name], f"{path} {name}".strip()
        yield whole, item
        yield from commands_of(whole, getattr(item, "commands", {}))


def test_every_option_and_argument_is_explained() -> None:
    commands = LazyCommands()
    for name in commands:
        item = commands[name]
        for part in [item, *getattr(item, "commands", {}).values()]:
            assert part.help, name
            for parameter in part.params:
                assert parameter.help, (name, parameter.name)


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    commands = LazyCommands()
    for entry in ENTRIES:
        help_text = " ".join(commands[entry.name].help.split())
        summary = entry.summary.removesuffix(".")
        assert summary != entry.summary, entry.name
        assert help_text.startswith(summary), f"{entry.name}: {help_text}"
        assert help_text[len(summary)] in ".,;:", f"{entry.name}: ends within a phrase"
        assert len(summary) <= 110, entry.name


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('hi')\n")
    return tmp_path / "src" / "train.py"


def test_init(orch: Orch, script: Path, tmp_path: Path) -> None:
    done = orch("init", "src/train.py")
    assert (done.code, done.out) == (0, "job.yaml\n")
    assert "orch submit job.yaml" in done.err
    spec = parse_job((tmp_path / "job.yaml").read_text())
    assert spec.entrypoint == "python src/train.py"


def test_init_elsewhere_is_relative_to_the_file(orch: Orch, script: Path) -> None:
    assert orch("init", "src/train.py", "-o", "src/digits.yaml").code == 0
    assert parse_job((script.parent / "digits.yaml").read_text()).entrypoint == "python train.py"
    shown = orch("init", "src/train.py", "-o", "-")
    assert parse_job(shown.out).entrypoint == "python src/train.py"
    assert not (script.parents[1] / "job.yaml").exists()


def test_init_overwrites_nothing_unasked(orch: Orch, script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    done = orch("init", "src/train.py")
    assert done.code == 5
    assert "--force" in done.err
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert orch("init", "src/train.py", "--force").code == 0
    assert (tmp_path / "job.yaml").read_text() != "mine"


def test_schema(orch: Orch) -> None:
    assert json.loads(orch("schema").out) == job_schema()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(orch: Orch, shell: str) -> None:
    done = orch("completion", shell)
    assert done.code == 0
    assert "_ORCH_COMPLETE" in done.out


def complete(words: str, home: Path) -> list[str]:
    environ = {
        **os.environ, "ORCH_HOME": str(home), "_ORCH_COMPLETE": "complete_bash", "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['orch']; from orchestrator.cli.main import main; main()"],
        env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout.split()


def test_completion_of_commands_and_jobs(served: ServedFake, home: Path) -> None:
    job = served.do(lambda service: service.add("digits"))
    served.do(lambda service: service.add("resnet"))
    assert complete("orch stat", home) == ["status"]
    assert complete("orch logs dig", home) == [job.id]
    served.stop()
    assert complete("orch logs dig", home) == []
    served.start()
