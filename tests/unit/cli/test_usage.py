"""Rules for every command: help, names, units, confirmation before a removal, the job's id in every answer."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.views import NodeView

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


class Terminal(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def job(served: ServedFake) -> JobView:
    found: JobView = served.do(lambda service: service.add(state="RUNNING", reason="every rank is up"))
    return found


def test_prune_without_a_terminal_says_what_would_go_and_removes_nothing(orch: Orch, served: ServedFake) -> None:
    old = served.do(lambda service: service.add(state="FAILED"))
    done = orch("prune")
    assert done.code == 5
    assert f"not confirmed (no terminal): removes 1 job, 1.0 KiB with their checkpoints: {old.id}" in done.err
    assert "--yes" in done.err
    assert orch("status", old.id).code == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 5)])
def test_prune_asks(orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    old = served.do(lambda service: service.add(state="FAILED"))
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    done = orch("prune", "--older-than", "1h")
    assert done.code == code
    assert done.out.strip() == (old.id if code == 0 else "")
    asked = [call[1][:2] for call in served.do(lambda s: s.calls)]
    assert asked[0] == (3600, True)
    assert [dry for _, dry in asked] == ([True, False] if code == 0 else [True])
    assert asked[-1][0] >= 3600, "what grew old enough while it waited for an answer stays"


def test_a_span_without_a_unit_is_refused(orch: Orch, served: ServedFake) -> None:
    for line in (
        ("prune", "--older-than", "1"),
        ("status", "--since", "5"),
        ("record", "--duration", "30"),
        ("drill", "x", "--hang", "--timeout", "60"),
        ("profile", "x", "--timeout", "60"),
        ("top", "--interval", "1"),
    ):
        done = orch(*line)
        assert done.code == 2, line
        assert "unit" in done.err or "not a time" in done.err, line


# -- help, and the names of commands


@pytest.mark.parametrize("line", [("-h",), ("status", "-h"), ("nodes", "drain", "-h"), ("run", "-h"), ("help",)])
def test_help_is_a_letter_away(orch: Orch, line: tuple[str, ...]) -> None:
    done = orch(*line)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: orch")


@pytest.mark.parametrize("words", [(), ("submit",), ("nodes", "cordon"), ("node",)])
def test_help_of_a_command_is_what_the_command_says(orch: Orch, words: tuple[str, ...]) -> None:
    def without_usage(text: str) -> list[str]:
        return text.strip().splitlines()[1:]

    assert without_usage(orch("help", *words).out) == without_usage(orch(*words, "--help").out)


@pytest.mark.parametrize(("words", "hint"), [(("sumbit",), "did you mean submit?"), (("status", "x"), "--help")])
def test_help_of_no_command(orch: Orch, words: tuple[str, ...], hint: str) -> None:
    done = orch("help", *words)
    assert done.code == 2
    assert hint in done.err


def test_json_names_its_job(orch: Orch, served: ServedFake, job: JobView) -> None:
    served.do(lambda service: service.write(job.id, "step 1"))
    assert orch("status", "--json").json["jobs"][0]["job_id"] == job.id
    for command in ("status", "events", "explain", "checkpoints", "stacks", "logs", "wait"):
        if command == "wait":
            served.do(lambda service: service.set(job.id, state="SUCCEEDED"))
        assert orch(command, job.id, "--json").json["job_id"] == job.id, command
    assert json.loads(orch("events", job.id, "--follow", "--json").out.splitlines()[0])["job_id"] == job.id


def test_a_rank_or_an_attempt_that_a_job_lacks_is_an_error(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING", num_workers=2, attempt=1))
    served.do(lambda service: service.write(job.id, "step 1"))
    wrong = orch("logs", job.id, "--rank", "2")
    assert (wrong.code, wrong.out) == (2, "")
    assert f"{job.id} has no rank 2" in wrong.err
    assert "0 to 1" in wrong.err
    assert "has no attempt 2" in orch("logs", job.id, "--attempt", "2").err
    assert orch("logs", job.id, "--rank", "1").code == 0


def test_nodes_show_what_is_used(orch: Orch, served: ServedFake) -> None:
    node = NodeView(id="n", name="n", state="READY", cpus_total=8.0, cpus_free=5.5, gpus_total=2.0, gpus_free=2.0)
    served.do(lambda service: service._nodes.update({"node-a": node}))
    head, row = orch("nodes").out.splitlines()
    assert "CPUS USED" in head
    assert "0/2" in row.split()
    assert "2.5/8" in row.split()
    served.do(lambda service: service._nodes.update({"node-a": replace(node, state="UNREACHABLE", cpus_free=0.0)}))
    assert "-/8" in orch("nodes").out.splitlines()[1].split(), "of a node that is down nothing is used"
