"""Dashboards and rules: generated, complete, and without references to things that do not exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dashboards import build, lint, rules
from dashboards.widgets import SCHEMA_VERSION, to_json
from orchestrator import catalogue
from tests.support.trees import tree_of

BOARDS = {board.uid: to_json(board) for board in build.BOARDS}
METRICS = {metric.name: metric for metric in catalogue.METRICS}
RECORDED = {record.name for record in rules.RECORDS}
FROM_PROMETHEUS = {"up", "ALERTS"}
NAME = re.compile(r"(?<![\w:$\"])(?:[a-z_]+(?:_[a-z_]+)*:[a-z0-9_:]+|orch_[a-z0-9_]+|up|ALERTS)(?![\w:\"])")

# Metrics that are shown nowhere, each for a reason.
NOT_SHOWN: set[str] = set()


def names_in(expr: str) -> set[str]:
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expr)))


def family(name: str) -> str:
    """Return the metric to which a series of a histogram belongs; other names are returned unchanged."""
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    return base if base in METRICS and METRICS[base].type == "histogram" else name


ALL_QUERIES = [(uid, where, expr) for uid, board in BOARDS.items() for where, expr in lint.queries(board)]
ALL_RULES = [(record.name, record.expr) for record in rules.RECORDS] + [(a.name, a.expr) for a in rules.ALERTS]


def test_what_is_checked_in_is_what_the_sources_make() -> None:
    assert build.differences() == []


def test_sources_take_names_from_the_catalogue_alone() -> None:
    """A metric's name is written once, in the catalogue; the sources use its constant."""
    allowed = {"orchestrator", "orchestrator.catalogue", "orchestrator.core", "orchestrator.core.states"}
    for path in Path(build.__file__).parent.glob("*.py"):
        tree = tree_of(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orchestrator"):
                assert node.module in allowed, path.name
                assert node.module != "orchestrator" or [alias.name for alias in node.names] == ["catalogue"]
                assert node.module != "orchestrator.core" or [alias.name for alias in node.names] == ["thresholds"]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in METRICS:
                pytest.fail(f"{path.name} writes {node.value} instead of taking it from the catalogue")


EXPRESSIONS = [expr for *_, expr in ALL_QUERIES] + [expr for _, expr in ALL_RULES]


def test_queries_and_rules_ask_for_metrics_that_exist() -> None:
    for expr in EXPRESSIONS:
        found = {family(name) for name in names_in(expr)}
        assert found, expr
        assert found <= METRICS.keys() | RECORDED | FROM_PROMETHEUS, expr


def test_selectors_use_labels_that_their_metric_has() -> None:
    for expr in EXPRESSIONS:
        for name, inside in re.findall(r"\b(orch_[a-z0-9_]+)\{([^}]*)\}", expr):
            metric = METRICS[family(name)]
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', inside)))
            assert used <= set(metric.labels) | {"le"}, expr


def test_every_metric_of_the_catalogue_is_shown_or_watched() -> None:
    used = {family(name) for expr in EXPRESSIONS for name in names_in(expr)}
    assert set(METRICS) - used == NOT_SHOWN


@pytest.mark.parametrize("uid", BOARDS)
def test_the_linter_is_content(uid: str) -> None:
    assert lint.lint(BOARDS[uid]) == []


@pytest.mark.parametrize("uid", BOARDS)
def test_boards_are_current_linked_and_fixed(uid: str) -> None:
    board = BOARDS[uid]
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert board["uid"] == uid
    assert "id" not in board
    assert board["links"][0]["type"] == "dashboards"
    assert set(board["links"][0]["tags"]) <= set(board["tags"])
    text = json.dumps(board)
    assert not re.search(r'"(graph|singlestat|table-old|displayMode": "lcd)"', text)
    assert text.count("null") == sum(len(list(_thresholds(panel))) for panel in board["panels"])


def _thresholds(panel: dict[str, Any]) -> list[Any]:
    text = json.dumps(panel)
    return re.findall(r'"value": null', text)


@pytest.mark.parametrize("uid", ["orch-job", "orch-gpu-balance"])
def test_runs_leave_marks_at_the_time_of_their_events(uid: str) -> None:
    marks = [a for a in BOARDS[uid]["annotations"]["list"] if a.get("useValueForTime")]
    assert [a["name"] for a in marks] == ["Start", "Checkpoint", "Failure", "Recovery", "Preemption"]
    for mark in marks:
        assert mark["useValueForTime"]
        assert "* 1000" in mark["expr"], "Grafana wants milliseconds"


@pytest.mark.parametrize("uid", BOARDS)
def test_findings_stand_first_and_are_marked(uid: str) -> None:
    first_panel = next(iter(lint.panels(BOARDS[uid])))
    assert first_panel["title"] == "Findings"
    assert catalogue.FINDING.name in first_panel["targets"][0]["expr"]
    marks = [a for a in BOARDS[uid]["annotations"]["list"] if a["name"] == "Findings"]
    assert len(marks) == 1
    assert marks[0]["expr"] == first_panel["targets"][0]["expr"]


@pytest.mark.parametrize("uid", BOARDS)
def test_jobs_link_to_their_board(uid: str) -> None:
    linked = 0
    for panel in lint.panels(BOARDS[uid]):
        legends = [target["legendFormat"] for target in panel.get("targets", ())]
        config = panel["fieldConfig"]
        rows = [o for o in config["overrides"] if o["matcher"]["options"] == "Job"]
        if panel["type"] == "table":
            headings = panel["transformations"][1]["options"]["renameByName"].values()
            assert bool(rows) == ("Job" in headings), panel["title"]
            linked += bool(rows)
        elif panel["type"] != "heatmap" and legends and all("{{job_id}}" in legend for legend in legends):
            assert config["defaults"]["links"][0]["url"].startswith("/d/orch-job?var-job_id="), panel["title"]
            linked += 1
    assert linked > 1


def test_the_gpus_of_a_job_are_named_by_rank() -> None:
    panels = {panel["title"]: panel for panel in lint.panels(BOARDS["orch-job"])}
    for title in ("Utilization", "Memory in use", "Power", "Temperature"):
        assert panels[title]["targets"][0]["legendFormat"].startswith("{{job_id}} rank {{rank}}")


@pytest.mark.parametrize("uid", ["orch-cluster", "orch-job"])
def test_cost_is_at_the_prices_of_the_board_and_absent_without_any(uid: str) -> None:
    variables = {one["name"]: one for one in BOARDS[uid]["templating"]["list"]}
    for name in ("price_gpu_hour", "price_kwh"):
        assert (variables[name]["type"], variables[name]["query"]) == ("textbox", "0")
    cost = next(panel for panel in lint.panels(BOARDS[uid]) if panel["title"] == "Cost in this time range")
    expr = cost["targets"][0]["expr"]
    assert "* $price_gpu_hour" in expr
    assert "* $price_kwh" in expr
    assert expr.endswith("and on () (vector($price_gpu_hour + $price_kwh) > 0)")
    assert "Set a price" in cost["fieldConfig"]["defaults"]["noValue"]


def test_findings_link_to_their_section_of_the_documentation() -> None:
    for board in BOARDS.values():
        panel = next(iter(lint.panels(board)))
        finding = next(o for o in panel["fieldConfig"]["overrides"] if o["matcher"]["options"] == "Finding")
        assert finding["properties"][0]["value"][0]["url"] == "${docs}/diagnosis.md#${__value.raw}"


def test_states_are_words() -> None:
    hang = next(panel for panel in lint.panels(BOARDS["orch-job"]) if panel["title"] == "Hang suspected")
    words = [o["text"] for m in hang["fieldConfig"]["defaults"]["mappings"] for o in m["options"].values()]
    assert words == ["no", "suspected"]


def test_the_cv_has_its_bands() -> None:
    for panel in lint.panels(BOARDS["orch-gpu-balance"]):
        if panel["title"] == "CV over time":
            steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            assert [step["value"] for step in steps] == [None, 0.05, 0.10, 0.20]
            return
    pytest.fail("there is no panel CV over time")


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    folder = build.ROOT / "docs/runbooks"
    pages = {path.stem for path in folder.glob("*.md")} - {"README"}
    assert pages == {alert.name for alert in rules.ALERTS}
    for alert in rules.ALERTS:
        text = (folder / f"{alert.name}.md").read_text(encoding="utf-8")
        for heading in (f"# {alert.name}", "## What it means", "## How to see it", "## What to do"):
            assert heading in text, (alert.name, heading)


def test_alerts_link_to_their_page_wherever_the_pages_are() -> None:
    document = rules.document(runbooks="https://example.org/runbooks")
    links = [r["annotations"]["runbook_url"] for g in document["groups"] for r in g["rules"] if "alert" in r]
    assert f"https://example.org/runbooks/{rules.ALERTS[0].name}.md" in links
    assert len(set(links)) == len(rules.ALERTS)
