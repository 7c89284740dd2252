"""The fast parser of arguments reads a line exactly as typer does, or leaves it to typer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.cli import fast_args as fast
from orchestrator.cli.app import command
from orchestrator.cli.commands import status as status_module
from orchestrator.cli.commands import submit as submit_module

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = [
    *fast.SUBMIT_SWITCHES,
    *fast.SUBMIT_VALUES,
    *fast.STATUS_SWITCHES,
    *fast.STATUS_VALUES,
    "--set=a=b",
    "--set=",
    "--user=ada",
    "--user",
    "-uada",
    "--label=team=a",
    "-wu",
    "--state=a,b",
    "--json=1",
    "--no-json",
    "--js",
    "--help",
    "--",
    "-",
    "-x",
    "",
    "a",
    "job.yaml",
    "k=v",
    "two words",
    "--unknown",
]


@pytest.fixture(scope="module")
def typed() -> Iterator[Any]:
    """Yield a function that returns typer's options for a line, or None where typer refuses it or shows help."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []

        def note(_: object, options: object) -> int:
            seen.append(options)
            return 0

        patch.setattr(submit_module, "submit_files", note)
        patch.setattr(status_module, "show_status", note)
        group = command()

        def parse(line: list[str]) -> Any:
            seen.clear()
            try:
                group.main(args=line, prog_name="orch", standalone_mode=False)
            except Exception as error:
                if not hasattr(error, "exit_code"):
                    raise
            return seen[0] if seen else None

        yield parse


lines = st.lists(st.sampled_from(WORDS), max_size=6)


@given(line=lines)
@example(line=["job.yaml", "--set", "a=b", "--set=c=d", "-q", "--json"])
@example(line=["--set", "--json"])
@example(line=["-"])
@example(line=["job.yaml", "--resume-from", "x", "--resume-from", "y"])
def test_submit_lines(typed: Any, line: list[str]) -> None:
    quick = fast.parse_submit(line)
    if quick is not None:
        assert typed(["submit", *line]) == quick


@given(line=lines)
@example(line=["job", "-w", "--json"])
@example(line=["-s", "a", "--state", "b", "--user", "x", "-u", "y", "--since=2h"])
@example(line=["a", "b"])
@example(line=[])
def test_status_lines(typed: Any, line: list[str]) -> None:
    quick = fast.parse_status(line)
    if quick is not None:
        assert typed(["status", *line]) == quick


@pytest.mark.parametrize(
    "line",
    [["submit", "a.yaml"], ["submit", "a.yaml", "--json", "-q"], ["submit", "--set", "a=b", "a.yaml"], ["submit", "-"]],
)
def test_everyday_submissions_are_quick(line: list[str]) -> None:
    assert fast.parse_submit(line[1:]) is not None


@pytest.mark.parametrize("line", [[], ["digits"], ["--json"], ["--watch"], ["--state", "running", "digits"]])
def test_everyday_questions_are_quick(line: list[str]) -> None:
    assert fast.parse_status(line) is not None


@pytest.mark.parametrize(
    "line",
    [
        ["submit"],
        ["submit", "--help"],
        ["submit", "a", "--bogus"],
        ["status", "a", "b"],
        ["status", "--user"],
        ["logs", "a"],
        [],
    ],
)
def test_what_is_not_sure_goes_to_typer(line: list[str]) -> None:
    assert fast.run(line) is None


def test_completion_goes_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ORCH_COMPLETE", "complete_bash")
    assert fast.run(["status"]) is None
