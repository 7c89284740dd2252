"""Commands on several jobs: their selection, the confirmation, and the exit codes."""

from __future__ import annotations

import io
import os
import pwd
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.server.testing import serve_fake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def jobs(served: ServedFake) -> dict[str, JobView]:
    def add(name: str, state: str, user: str = ME, **labels: str) -> JobView:
        return served.do(lambda service: service.add(name, state=state, user=user, labels=labels))

    return {
        "waits": add("sweep-a", "PENDING", team="a"),
        "runs": add("sweep-b", "RUNNING", team="b"),
        "paused": add("other", "SUSPENDED", team="a"),
        "failed": add("sweep-c", "FAILED", team="a"),
        "foreign": add("sweep-d", "PENDING", user="bob", team="a", big="1"),
    }


def states(orch: Orch) -> dict[str, str]:
    return {item["job_id"]: item["state"] for item in orch("status", "--state", "all", "--json").json["jobs"]}


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (("--user", "me"), ["waits", "runs", "paused"]),
        (("--user", "bob"), ["foreign"]),
        (("--state", "pending,suspended", "-u", "me"), ["waits", "paused"]),
        (("--state", "all"), ["waits", "runs", "paused", "failed", "foreign"]),
        (("--label", "team=a"), ["waits", "paused", "foreign"]),
        (("-l", "team=a", "-l", "big"), ["foreign"]),
        (("--name", "sweep-*"), ["waits", "runs", "foreign"]),
        (("--name", "sweep-?", "--user", "me", "--label", "team=b"), ["runs"]),
        (("--label", "team=c"), []),
    ],
)
def test_options_choose_jobs_and_a_dry_run_shows_them(
    orch: Orch, jobs: dict[str, JobView], options: tuple[str, ...], meant: list[str]
) -> None:
    before = states(orch)
    shown = orch("cancel", *options, "--dry-run", "--json").json
    assert shown["would"] == "cancel"
    assert [job["job_id"] for job in shown["jobs"]] == [jobs[name].id for name in meant]
    text = orch("cancel", *options, "--dry-run")
    assert text.code == 0
    assert all(jobs[name].id in text.out for name in meant)
    assert f"would cancel {len(meant)} job" in text.err
    assert states(orch) == before


@pytest.mark.parametrize(
    ("verb", "meant"),
    [
        ("pause", ["waits", "runs"]),
        ("resume", ["paused"]),
        ("rerun", ["failed"]),
        ("wait", ["waits", "runs", "paused"]),
    ],
)
def test_without_a_state_those_are_meant_for_which_the_command_has_a_sense(
    orch: Orch, jobs: dict[str, JobView], verb: str, meant: list[str]
) -> None:
    shown = orch(verb, "--user", "me", "--dry-run", "--json").json
    assert [job["job_id"] for job in shown["jobs"]] == [jobs[name].id for name in meant]


def test_nothing_is_done_without_a_yes(orch: Orch, jobs: dict[str, JobView], monkeypatch: pytest.MonkeyPatch) -> None:
    before = states(orch)
    refused = orch("cancel", "--user", "me")
    assert refused.code == 5
    assert "cancel 3 jobs" in refused.err
    assert "--yes" in refused.err
    assert jobs["runs"].id in refused.err
    assert states(orch) == before

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert orch("cancel", "--user", "me").code == 5
    assert states(orch) == before
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert orch("cancel", "--user", "me").code == 0
    assert states(orch)[jobs["runs"].id] == "CANCELLED"
    assert states(orch)[jobs["foreign"].id] == "PENDING"


def test_all_are_acted_on_and_counted(orch: Orch, jobs: dict[str, JobView]) -> None:
    done = orch("pause", "--name", "sweep-*", "--user", "me", "--yes")
    assert (done.code, done.out.split()) == (0, [jobs["waits"].id, jobs["runs"].id])
    assert done.err.endswith("pause: 2 jobs done\n")
    again = orch("resume", "--label", "team=a", "-y", "--json")
    assert [item["job_id"] for item in again.json] == [jobs["waits"].id, jobs["paused"].id]
    alone = orch("rerun", "--state", "failed", "--yes", "--set", "priority=3", "--json")
    assert len(alone.json) == 1, "an array, whatever the options choose"
    changed = orch("update", "--name", "sweep-d", "--priority", "7", "--yes", "--json")
    assert (changed.code, [item["job_id"] for item in changed.json]) == (0, [jobs["foreign"].id])


def test_the_exit_code_tells_of_a_partial_failure(orch: Orch, jobs: dict[str, JobView]) -> None:
    done = orch("pause", jobs["runs"].id, jobs["failed"].id, jobs["waits"].id)
    assert done.code == 6
    assert done.out.split() == [jobs["runs"].id, jobs["waits"].id]
    assert done.err.endswith("pause: 2 jobs done, 1 not\n")
    none = orch("pause", jobs["failed"].id, "nothing")
    assert (none.code, none.out) == (5, "")
    assert orch("cancel", "nothing", jobs["waits"].id, "--json").json[0]["job_id"] == jobs["waits"].id


def test_no_job_fits(orch: Orch, jobs: dict[str, JobView]) -> None:
    done = orch("cancel", "--label", "team=nobody")
    assert (done.code, done.out) == (0, "")
    assert "no job matches" in done.err
    assert orch("cancel", "--label", "team=nobody", "--json").json == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("cancel",), "--user me"),
        (("wait",), "--user me"),
        (("cancel", "x", "--user", "me"), "both named jobs and options"),
        (("pause", "--label", "=a", "--yes"), "has no key"),
        (("cancel", "--state", "flying", "--yes"), "RUNNING"),
    ],
)
def test_lines_that_mean_no_jobs(orch: Orch, jobs: dict[str, JobView], line: tuple[str, ...], said: str) -> None:
    done = orch(*line)
    assert done.code == 2
    assert said in done.err


def test_wait_for_those_that_are_chosen(orch: Orch, served: ServedFake, jobs: dict[str, JobView]) -> None:
    for name, state in (("waits", "SUCCEEDED"), ("runs", "FAILED"), ("paused", "CANCELLED")):
        served.do(lambda service, name=name, state=state: service.set(jobs[name].id, state=state))
    done = orch("wait", "--user", "me", "--state", "all")
    assert done.code == 1
    assert done.err.endswith("4 jobs ended: 1 SUCCEEDED, 3 not\n")
    one = orch("wait", "--state", "succeeded", "--json")
    assert [item["job_id"] for item in one.json] == [jobs["waits"].id]
    assert orch("wait", "--user", "me").code == 0, "none is left to wait for"


def test_status_lists_by_label_name_and_me(orch: Orch, jobs: dict[str, JobView]) -> None:
    shown = orch("status", "--user", "me", "--label", "team=a", "--name", "sweep-*", "--json").json["jobs"]
    assert [job["job_id"] for job in shown] == [jobs["failed"].id, jobs["waits"].id]
    assert orch("status", "-l", "team=nobody").out == "no job matches\n"
    assert orch("status", "other", "--label", "team=a").code == 2


def test_me_over_tcp_is_the_owner_for_whom_the_token_stands(
    orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_fake(home / "tcp", owner_uid=os.getuid(), token="t" * 40) as served:
        mine = served.do(lambda service: service.add("mine"))
        served.do(lambda service: service.add("other", user="bob"))
        monkeypatch.setenv("ORCH_ADDRESS", served.tcp_endpoint.label)
        monkeypatch.setenv("ORCH_TOKEN", served.tcp_endpoint.token)
        shown = orch("cancel", "--user", "me", "--dry-run", "--json").json["jobs"]
        assert [job["job_id"] for job in shown] == [mine.id]
