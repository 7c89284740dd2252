"""`orch matrix`, and a matrix as the JOB of other commands."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.matrix_views import CombinationView, MatrixCellView
from orchestrator.api.views import PlanReply
from orchestrator.cli.commands.submit import plan_lines
from orchestrator.cli.console import Console
from orchestrator.spec.job import parse_jobs
from tests.unit.analysis.runs import write_job
from tests.unit.api.test_matrix_routes import grid, put

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService, ServedFake
    from tests.unit.cli.conftest import Orch


def cell(index: int, lr: float) -> MatrixCellView:
    return MatrixCellView(id="digits-w2pqsy", name="digits", index=index, count=2, values={"lr": lr})


def two_jobs(served: ServedFake, **fields: Any) -> list[Any]:
    def add(service: FakeService) -> list[Any]:
        return [service.add("digits", matrix=cell(n, lr), **fields) for n, lr in enumerate((0.1, 0.01))]

    return served.do(add)  # type: ignore[no-any-return]


def test_the_grid_has_values_states_best_and_time_left(orch: Orch, served: ServedFake) -> None:
    view = grid(
        0, score_attribute="loss", score_order="min", eta_seconds=90.0, max_concurrent=1, fail_fast=True, count=3
    )
    first, second = view.jobs
    rows = (
        replace(first, best=0.25, last=0.5, fraction=0.5, eta_seconds=60.0),
        replace(second, state="PENDING", runs=2),
    )
    served.do(put(replace(view, jobs=rows)))
    lines = orch("matrix", "digits").out.splitlines()
    assert lines[0].startswith("digits-w2pqsy  RUNNING")
    for told in ("1 PENDING, 1 RUNNING", "1 removed", "at most 1 at a time", "fail_fast", "about 1m30s left"):
        assert told in lines[0]
    assert lines[1].split()[:7] == ["LR", "STATE", "BEST", "LOSS", "LAST", "LOSS", "PROGRESS"]
    assert lines[2].split()[:4] == ["0.1", "RUNNING", "0.25", "0.5"]
    assert "50% 1m left" in lines[2]
    assert orch("matrix", "digits", "--json").json["jobs"][0]["best"] == 0.25
    assert orch("status", "digits").out.splitlines()[0] == lines[0]


def test_matrices_are_listed_and_status_has_one_line_for_each(orch: Orch, served: ServedFake) -> None:
    assert orch("matrix").out.startswith("no matrices")
    jobs = two_jobs(served)
    served.do(lambda service: service.set(jobs[0].id, state="RUNNING"))
    served.do(lambda service: service.add("solo"))
    assert orch("matrix").out.splitlines()[1].split() == [
        "digits-w2pqsy",
        "2",
        "1",
        "PENDING,",
        "1",
        "RUNNING",
        "owner",
    ]
    assert orch("matrix", "--json").json[0]["counts"] == {"PENDING": 1, "RUNNING": 1}
    lines = orch("status").out.splitlines()
    assert len(lines) == 3
    assert any(line.split()[:4] == ["digits-w2pqsy", "matrix", "2", "jobs"] for line in lines)


def test_wait_and_dry_runs_take_the_jobs_of_a_matrix(orch: Orch, served: ServedFake) -> None:
    jobs = two_jobs(served)
    view = grid(0)
    rows = tuple(replace(row, job_id=job.id) for row, job in zip(view.jobs, jobs, strict=True))
    served.do(put(replace(view, jobs=rows)))
    shown = orch("cancel", "digits", "--dry-run", "--json").json
    assert [job["job_id"] for job in shown["jobs"]] == [job.id for job in jobs]
    served.do(
        lambda service: [service.set(job.id, state=end) for job, end in zip(jobs, ("SUCCEEDED", "FAILED"), strict=True)]
    )
    done = orch("wait", "digits", "--json")
    assert (done.code, [job["state"] for job in done.json]) == (1, ["SUCCEEDED", "FAILED"])


def test_results_are_by_configuration_over_all_runs(orch: Orch, served: ServedFake, tmp_path: Path) -> None:
    jobs = two_jobs(served, state="SUCCEEDED")
    served.do(put(grid(0, score_attribute="loss", score_order="min")))
    for number, job in enumerate(jobs):
        directory = write_job(
            tmp_path / "jobs" / job.id, metrics=lambda second, n=number: {"loss": 1.0 + n + 1 / (second + 1)}
        )
        served.do(lambda service, job=job, directory=directory: service.set(job.id, log_dir=str(directory / "logs")))
    done = orch("matrix", "digits", "--results", str(tmp_path / "out"))
    assert done.code == 0
    assert "lr=0.1: 1 of 1 runs succeeded" in done.out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "runs",
        "graphs",
        "report.html",
        "summary.txt",
        "summary.json",
        "summary.csv",
    }
    together = orch("matrix", "digits", "--results", str(tmp_path / "out"), "--repeats", "lr", "--json").json
    (only,) = together["configurations"]
    assert (only["runs"], only["quantities"]["loss (best)"]["runs"]) == (2, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("matrix", "nothing"), "there is no matrix 'nothing'"),
        (("matrix", "--watch"), "no matrix was named"),
        (("matrix", "digits", "--repeats", "lr"), "--repeats says how results are put together"),
        (("matrix", "digits", "--repeats", "x", "--results", "out"), "--repeats x is not a parameter"),
        (("matrix", "digits", "--watch", "--results", "out"), "--watch shows no results"),
        (("matrix", "digits", "--results", "/proc/none/out"), "cannot be written"),
        (("submit", "job.yaml", "--start-at", "soon"), "--start-at 'soon' is not a time"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    orch: Orch, served: ServedFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: a\nentrypoint: python t.py\n")
    served.do(put(grid(0)))
    done = orch(*line)
    assert done.code in (2, 3)
    assert words in done.err


def test_hold_and_start_at_are_keys_of_the_job(orch: Orch, served: ServedFake, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\nentrypoint: python t.py\n")
    orch("submit", str(tmp_path / "job.yaml"), "--hold", "--start-at", "2030-01-02T03:04")
    (request,) = served.do(lambda service: service.requests)
    assert request.overrides == ("hold=true", "start_at=2030-01-02T03:04:00+00:00")
    assert orch("hold", "a").code == 0
    assert served.do(lambda service: [job.state for job in service._jobs.values()]) == ["SUSPENDED"]
    assert orch("release", "a").code == 0


def test_a_dry_run_lists_the_combinations(home: Path) -> None:
    one = CombinationView(index=0, name="digits-0-1", values={"lr": 0.1, "deep": True})
    plan = PlanReply(
        name="digits-0-1",
        queue="default",
        starts="now",
        reason="there is room",
        combinations=(one, replace(one, index=1)),
    )
    lines = [line.split() for line in plan_lines(Console({}), plan)]
    assert ["matrix", "2", "jobs,", "the", "first", "as", "shown", "above"] in lines
    assert lines[-1] == ["digits-0-1", "0.1", "true"]


DOCUMENT = (Path(__file__).parents[4] / "docs" / "matrices.md").read_text(encoding="utf-8")


def test_the_examples_of_the_document_are_a_matrix_and_a_search() -> None:
    block, search = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(parse_jobs(block).jobs) == 10
    found = parse_jobs(search)
    assert found.matrix is not None
    assert (len(found.jobs), found.matrix.trials) == (1, 30)


def searched(uid: int, **fields: Any) -> Any:
    view = grid(uid, objectives={"loss": "min", "energy_joules": "min"}, count=5, searching=True, **fields)
    first, second = view.jobs
    rows = (
        replace(first, state="SUCCEEDED", given={"loss": 0.25, "energy_joules": 120.0}, is_best=True),
        replace(second, state="CANCELLED", pruned=True, reason="pruned at step 40: loss was 2.5"),
    )
    return replace(view, jobs=rows)


def test_a_search_shows_its_trials_and_the_best(orch: Orch, served: ServedFake) -> None:
    served.do(put(searched(0, problem="optuna cannot be imported")))
    lines = orch("matrix", "digits").out.splitlines()
    for told in ("1 SUCCEEDED, 1 PRUNED", "2 of 5 trials"):
        assert told in lines[0]
    assert lines[1] == "no further trial: optuna cannot be imported"
    assert lines[2] == "best trials (no other trial is better in every objective):"
    assert lines[3].split()[:4] == ["loss", "0.25,", "energy_joules", "120"]
    assert "lr=0.1" in lines[3]
    assert lines[4].split()[:4] == ["TRIAL", "LR", "STATE", "LOSS"]
    assert lines[5].split()[:5] == ["0", "0.1", "SUCCEEDED", "0.25", "120"]
    assert "PRUNED" in lines[6]
    assert "pruned at step 40" in lines[6]
    assert "paused" not in lines[0]
    served.do(put(searched(0, paused=True)))
    assert "paused: no further trial until `orch resume digits-" in orch("matrix", "digits").out.splitlines()[0]


def test_results_of_a_search_have_its_trials_and_its_front(orch: Orch, served: ServedFake, tmp_path: Path) -> None:
    two_jobs(served, state="SUCCEEDED")
    served.do(put(searched(0)))
    out = tmp_path / "out"
    assert orch("matrix", "digits", "--results", str(out)).code == 0
    assert (out / "trials.csv").read_text().splitlines()[0] == "trial,job,state,lr,loss,energy_joules,best"
    assert ",PRUNED,0.01,,,0" in (out / "trials.csv").read_text()
    assert "best trial 0" in (out / "summary.txt").read_text()
    pictures = {path.name for path in (out / "graphs").iterdir()}
    assert {"pareto_front.png", "objective_loss.png", "objective_energy_joules.png"} <= pictures


def test_waiting_for_a_search_waits_for_its_last_trial_and_pruned_trials_are_no_failures(
    orch: Orch, served: ServedFake
) -> None:
    jobs = two_jobs(served)
    served.do(lambda service: service.set(jobs[0].id, state="SUCCEEDED"))
    pruned = replace(cell(1, 0.01), search=True, pruned=True)
    served.do(lambda service: service.set(jobs[1].id, state="CANCELLED", matrix=pruned))
    view = searched(0)
    rows = tuple(replace(row, job_id=job.id) for row, job in zip(view.jobs, jobs, strict=True))
    served.do(put(replace(view, jobs=rows, searching=False, state="SUCCEEDED")))
    done = orch("wait", "digits")
    assert done.code == 0, done.err
    assert "2 jobs ended: 1 SUCCEEDED, 1 pruned, 0 not" in done.err


def test_the_commands_of_the_document_do_what_they_say(
    orch: Orch, served: ServedFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: digits\nentrypoint: python t.py\n")
    jobs = two_jobs(served, state="SUCCEEDED")
    rows = tuple(replace(row, job_id=job.id) for row, job in zip(grid(0).jobs, jobs, strict=True))
    served.do(put(replace(grid(os.getuid()), jobs=rows)))
    lines = re.findall(r"^    orch (.+)$", DOCUMENT, re.MULTILINE)
    assert len(lines) == 12
    for line in lines:
        done = orch(*shlex.split(line))
        assert done.code == 0, (line, done.err)
