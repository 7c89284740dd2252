"""A campaign of drills: the drills that it chooses, the conditions that end it, and its report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import DaemonUnreachableError, RefusedError
from orchestrator.cli.console import Console
from orchestrator.cli.drills import campaign as module
from orchestrator.cli.drills import campaign as text
from orchestrator.cli.drills.campaign import Campaign, CampaignReport, Round, quantile
from orchestrator.cli.drills.drills import CHARGED_TO, IN_A_CAMPAIGN, WHAT, DrillReport, Kind, NotRecoveredError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

FOR_EVER = 1e6


class FakeDaemon:
    """A client of one job that counts the restarts charged for its drills, and saves at once."""

    def __init__(self, *, infra: int = 3, hang: int = 2) -> None:
        self.budgets = {"infra": infra, "hang": hang, "preemption": "unlimited"}
        self.restarts: dict[str, int] = {}
        self.more_restarts: dict[str, int] = {}
        self.state = "RUNNING"
        self.others: list[str] = []
        self.log: list[tuple[Kind, int]] = []
        self.outcomes: dict[Kind, Any] = {}

    def job(self, ref: str) -> Any:
        return SimpleNamespace(
            id=ref,
            state=self.state,
            is_terminal=self.state == "FAILED",
            num_workers=2,
            reason="no restarts are left",
            restarts_by_class={
                name: count + self.more_restarts.get(ref, 0) for name, count in ({"infra": 0} | self.restarts).items()
            },
            checkpoint=None,
        )

    def jobs(self, *, states: tuple[str, ...]) -> Any:
        assert "RUNNING" in states
        return SimpleNamespace(jobs=[self.job(ref) for ref in ("a", *self.others)])

    def spec(self, ref: str) -> Any:
        return SimpleNamespace(spec={"retry": {"max_restarts": self.budgets}})

    def drilled(self, kind: Kind, rank: int) -> DrillReport:
        self.log.append((kind, rank))
        outcome = self.outcomes.get(kind)
        if isinstance(outcome, BaseException):
            raise outcome
        if (charged := CHARGED_TO.get(kind)) is not None:
            self.restarts[charged] = self.restarts.get(charged, 0) + 1
        return outcome or DrillReport(
            job_id="a",
            drill=kind,
            did="did <it>",
            detection_seconds=0.1,
            recovery_seconds=0.5,
            steps_lost=2,
            intact=True,
        )


class FakeDrill:
    def __init__(self, client: FakeDaemon, ref: str, *, rank: int, seconds: float) -> None:
        self._client, self._rank = client, rank

    def run(self, kind: Kind, *, much: bool) -> DrillReport:
        return self._client.drilled(kind, self._rank)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    monkeypatch.setattr(module, "Drill", FakeDrill)
    return FakeDaemon()


def run(daemon: Any, kinds: list[Kind], *, seconds: float = FOR_EVER, seed: int = 7) -> CampaignReport:
    return Campaign(client=daemon, jobs=["a"], kinds=kinds, seconds=seconds, drill_seconds=0.01, seed=seed).run()


def test_each_budget_of_restarts_keeps_one_and_the_report_says_what_was_left_alone(daemon: FakeDaemon) -> None:
    report = run(daemon, [Kind.RANK, Kind.ACTOR, Kind.HANG])
    assert daemon.restarts == {"infra": 2, "hang": 1}
    assert report.intact
    assert report.ended_because == "no job is left for a drill"
    assert text.left_alone(report) == [
        (
            "left alone: a, rank, actor: infra restarts of a used: 2 of 3, and the last one is kept for the job;"
            " a higher retry.max_restarts.infra allows more"
        ),
        (
            "left alone: a, hang: hang restarts of a used: 1 of 2, and the last one is kept for the job;"
            " a higher retry.max_restarts.hang allows more"
        ),
    ]
    assert text.lines(Console(environ={}), report)[-3:-1] == text.left_alone(report)
    assert "hang restarts of a used: 1 of 2" in text.page(report)
    assert json.loads(json.dumps(report.to_json()))["left_alone"][0] == {
        "job_id": "a",
        "kinds": ["rank", "actor"],
        "reason": {"job_id": "a", "failure_class": "infra", "used": 2, "budget": 3},
    }


def test_the_end_of_ray_is_charged_to_every_job_of_the_campaign(daemon: FakeDaemon) -> None:
    daemon.more_restarts["b"] = 1
    campaign = Campaign(
        client=daemon,  # type: ignore[arg-type]
        jobs=["a", "b"],
        kinds=[Kind.RAY],
        seconds=FOR_EVER,
        drill_seconds=0.01,
        seed=7,
    )
    report = campaign.run()
    assert daemon.log == [(Kind.RAY, daemon.log[0][1])], "b has used two of three then, and a one"
    assert [line.split(":")[1] for line in text.left_alone(report)] == [" a, ray", " b, ray"]
    assert all("infra restarts of b used: 2 of 3" in line for line in text.left_alone(report))


def test_the_end_of_ray_leaves_jobs_of_others_their_last_restart(daemon: FakeDaemon) -> None:
    daemon.others, daemon.more_restarts = ["of-ada", "of-eve"], {"of-eve": 2}
    report = run(daemon, [Kind.RAY, Kind.HANG])
    assert {kind for kind, _ in daemon.log} == {Kind.HANG}
    assert "a, ray: infra restarts of of-eve used: 2 of 3" in text.left_alone(report)[0]


def test_where_nothing_may_be_done_the_report_does_not_call_the_jobs_intact(daemon: FakeDaemon) -> None:
    daemon.restarts = {"infra": 3}
    report = run(daemon, [Kind.RANK])
    assert (report.done, report.to_json()["done"]) == (0, 0)
    assert text.outcome(report).endswith("seed 7: no fault was injected")
    assert "infra restarts of a used: 3 of 3, and none is left" in text.left_alone(report)[0]


def test_a_seed_gives_the_same_drills_again(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.budgets = {"infra": 20, "hang": 20}
    run(daemon, [Kind.RANK, Kind.ACTOR, Kind.HANG])
    again = FakeDaemon(infra=20, hang=20)
    run(again, [Kind.RANK, Kind.ACTOR, Kind.HANG])
    other = FakeDaemon(infra=20, hang=20)
    run(other, [Kind.RANK, Kind.ACTOR, Kind.HANG], seed=8)
    assert daemon.log == again.log != other.log
    assert {rank for _, rank in daemon.log} == {0, 1}


def test_what_a_job_refuses_is_tried_three_times(daemon: FakeDaemon) -> None:
    daemon.outcomes[Kind.AGENT] = RefusedError("another user's process", hint="")
    report = run(daemon, [Kind.AGENT])
    assert [done.refused for done in report.rounds] == ["another user's process"] * 3
    assert (report.intact, report.done) == (True, 0)
    assert text.left_alone(report) == ["left alone: a, agent: refused 3 times in a row"]
    (figures,) = report.figures()
    assert (figures.done, figures.refused, figures.recovery_p50) == (0, 3, None)


@pytest.mark.parametrize(
    "outcome",
    [
        NotRecoveredError("the drill was done, but not seen: the job goes on", hint=""),
        DrillReport(job_id="a", drill="rank", problems=["no checkpoint verifies"]),
    ],
)
def test_a_campaign_ends_with_the_first_defect(daemon: FakeDaemon, outcome: Any) -> None:
    daemon.outcomes[Kind.RANK] = outcome
    report = run(daemon, [Kind.RANK])
    assert len(report.rounds) == 1
    assert not report.intact
    assert report.all_problems()[0].startswith("rank on a: ")
    assert "defect" in report.ended_because


def test_a_job_that_fails_is_a_problem(daemon: FakeDaemon) -> None:
    daemon.state = "FAILED"
    report = run(daemon, [Kind.RANK])
    assert report.rounds == []
    assert report.problems == ["a is FAILED: no restarts are left"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_leaves_a_report(daemon: FakeDaemon, interruption: BaseException) -> None:
    daemon.outcomes[Kind.HANG] = interruption
    report = run(daemon, [Kind.HANG])
    assert report.interrupted
    assert "interrupted" in text.outcome(report)


def test_a_daemon_that_answers_no_more_is_a_problem(daemon: FakeDaemon) -> None:
    daemon.outcomes[Kind.DAEMON] = DaemonUnreachableError("cannot connect", hint="")
    report = run(daemon, [Kind.DAEMON])
    assert "cannot connect" in report.problems[0]


def test_a_campaign_is_over_in_its_time(daemon: FakeDaemon) -> None:
    report = run(daemon, [Kind.RANK], seconds=0.0)
    assert (report.rounds, report.ended_because) == ([], "")
    assert "its time has passed" in text.outcome(report)


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 2.0, 3.0], 0.5, 2.0), ([1.0, 2.0], 0.99, 2.0)],
)
def test_quantiles(values: list[float], share: float, found: float | None) -> None:
    assert quantile(values, share) == found


def test_the_report_is_told_in_text_json_and_html(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(daemon, [Kind.RANK, Kind.HANG])
    lines = text.lines(Console(environ={"COLUMNS": "200"}), report)
    assert "RECOVERED p50" in lines[0]
    assert any(line.startswith("rank") and "500ms" in line for line in lines)
    assert lines[-1].endswith("seed 7: every job is intact")
    told = json.loads(json.dumps(report.to_json()))
    assert told["intact"] is True
    assert told["figures"][0] | {"done": 2, "steps_lost": 4, "recovery_max": 0.5} == told["figures"][0]
    assert told["rounds"][0]["report"]["did"] == "did <it>"
    page = text.page(report)
    assert "did &lt;it&gt;" in page
    assert "<it>" not in page
    assert "http" not in page.replace("<!doctype html>", ""), "nothing is loaded from elsewhere"
    done = dataclasses.replace(report.rounds[0], problem="hurt")
    assert "NOT INTACT" not in text.round_line(report.rounds[0])
    assert "not done: no" in text.round_line(Round(at=0.0, kind=Kind.RAY, job_id="a", rank=0, refused="no"))
    assert "hurt" in "".join(text.page(dataclasses.replace(report, rounds=[done])))


def test_each_kind_says_what_it_does() -> None:
    assert set(WHAT) == set(Kind)
    assert not {Kind.RAY, Kind.FILL_DISK} & set(IN_A_CAMPAIGN)


# -- the command


@pytest.fixture
def job(served: ServedFake) -> JobView:
    found: JobView = served.do(lambda service: service.add(state="RUNNING", user="bob", num_workers=2))
    return found


def test_a_campaign_asks_and_names_the_jobs_of_others(orch: Orch, served: ServedFake, job: JobView) -> None:
    other = served.do(lambda service: service.add("other", state="RUNNING", user="eve"))
    done = orch("drill", job.id, "--campaign", "30m", "--kinds", "rank,daemon")
    assert done.code == 5
    assert f"not confirmed (no terminal): injects rank, daemon into {job.id} (bob) for 30m" in done.err
    assert f"daemon also reaches {other.id} (eve)" in done.err
    assert "eve" not in orch("drill", job.id, "--campaign", "30m", "--kinds", "rank").err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--campaign", "30m", "--kinds", "rank,fire"], 2, "unknown drill 'fire'"),
        (["--campaign", "soon"], 2, "--campaign"),
        (["--campaign", "30m", "--kill", "rank"], 2, "chooses drills and ranks itself"),
        (["--kinds", "rank", "--kill", "rank"], 2, "belong to a campaign"),
        (["--kill", "rank", "--hang"], 2, "one drill at a time"),
        ([], 2, "which drill?"),
    ],
)
def test_lines_that_make_no_sense(orch: Orch, job: JobView, options: list[str], code: int, said: str) -> None:
    done = orch("drill", job.id, *options)
    assert done.code == code
    assert said in done.err


def test_a_campaign_needs_a_running_job(orch: Orch, served: ServedFake) -> None:
    assert "no job of yours is running" in orch("drill", "--campaign", "30m", "--yes").err
    ended = served.do(lambda service: service.add(state="FAILED"))
    assert f"{ended.id} is FAILED" in orch("drill", ended.id, "--campaign", "30m", "--yes").err
    assert orch("drill", "--kill", "rank").code == 2


def test_a_page_that_cannot_be_written_is_told(
    orch: Orch, job: JobView, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Refusing(FakeDrill):
        def run(self, kind: Kind, *, much: bool) -> DrillReport:
            raise RefusedError("not here", hint="")

    monkeypatch.setattr(module, "Drill", Refusing)
    line = ("drill", job.id, "--campaign", "30m", "--kinds", "agent", "--yes", "--seed", "3")
    done = orch(*line, "--html", str(tmp_path / "page.html"))
    assert done.code == 5, done.err
    assert "0 drills" in done.out
    assert "seed 3: no fault was injected" in done.out
    assert "not here" in (tmp_path / "page.html").read_text()
    assert "cannot be written" in orch(*line, "--html", str(tmp_path / "no" / "page.html")).err
