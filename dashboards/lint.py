"""Rules of Grafana's public dashboard linter, for the boards of orch, in Python.

The linter is a Go program that is not in the registries that this project installs from; its rules are implemented here
under the same names, so that a report reads the same. EXCLUSIONS has the reason for each rule that the boards do not
follow. The syntax of queries is not checked here: promtool checks it in the tests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Json = dict[str, Any]

UNITS: Final = frozenset(
    ["short", "none", "percentunit", "s", "watt", "kwatth", "bytes", "joule", "celsius", "hertz", "Bps", "ops", "dateTimeAsIso"]
)  # fmt: skip
"""Grafana's names of the units that our boards use; before you add one, check that it is in Grafana's list."""

EXCLUSIONS: Final = {
    "template-job-rule": "series are distinguished by job_id, gpu_uuid and node; the scrape job is the same for all",
    "template-instance-rule": "an instance is an exporter's address; boards select nodes and GPUs; rules drop instance",
    "target-job-rule": "as template-job-rule: recorded series have no label job",
    "target-instance-rule": "as template-instance-rule: recorded series have no label instance",
}
"""Rules of the public linter that our boards do not follow, and why."""

_GRAPHS: Final = ("timeseries", "stat", "bargauge", "gauge", "heatmap")


def panels(board: Json) -> Iterator[Json]:
    """Yield every panel of the board that is not a row, including those inside rows."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(board: Json) -> Iterator[tuple[str, str]]:
    """Yield (panel or annotation, PromQL) for every query."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        if "expr" in annotation:
            yield f"annotation {annotation['name']}", annotation["expr"]


def _template_datasource(board: Json) -> Iterator[str]:
    sources = [v for v in board["templating"]["list"] if v["type"] == "datasource"]
    if [(v["name"], v["label"]) for v in sources] != [("datasource", "Data Source")]:
        yield "there must be exactly one data source variable, named datasource and labelled Data Source"


def _template_on_time_change_reload(board: Json) -> Iterator[str]:
    for v in board["templating"]["list"]:
        if v["type"] == "query" and v["refresh"] != 2:
            yield f"variable {v['name']} is not refreshed when the time range changes"


def _template_label_promql(board: Json) -> Iterator[str]:
    for v in board["templating"]["list"]:
        if v["type"] != "query":
            continue
        if not re.fullmatch(r"label_values\((?:.+, )?[a-z_]+\)", v["query"]["query"]):
            yield f"variable {v['name']} is not a label_values query"
        if not (v["includeAll"] and v["multi"] and v["allValue"] in (".+", ".*")):
            yield f"variable {v['name']} does not work with All"


def _panel_datasource(board: Json) -> Iterator[str]:
    for panel in panels(board):
        sources = [panel.get("datasource"), *(target["datasource"] for target in panel.get("targets", ()))]
        if panel["type"] != "text" and any(
            source != {"type": "prometheus", "uid": "${datasource}"} for source in sources
        ):
            yield f"panel {panel['title']} does not use the chosen data source"


def _panel_title_description(board: Json) -> Iterator[str]:
    for panel in panels(board):
        if not (panel.get("title") and panel.get("description")):
            yield f"panel {panel['id']} ({panel.get('title')}) lacks a title or a description"


def _panel_units(board: Json) -> Iterator[str]:
    for panel in panels(board):
        if panel["type"] in _GRAPHS and panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield f"panel {panel['title']} has a unit that is not in UNITS"


def _panel_no_targets(board: Json) -> Iterator[str]:
    for panel in panels(board):
        if panel["type"] != "text" and not panel.get("targets"):
            yield f"panel {panel['title']} has no query"


def _target_rate_interval(board: Json) -> Iterator[str]:
    for where, expr in queries(board):
        for found in re.findall(r"\bi?rate\([^\[]*\[([^\]]*)\]", expr):
            if found != "$__rate_interval":
                yield f"{where}: rate over [{found}] and not over [$__rate_interval]"


def _target_counter_agg(board: Json) -> Iterator[str]:
    for where, expr in queries(board):
        for found in re.finditer(r"\b\w+_total\b", expr):
            if not re.search(r"\b(i?rate|increase)\($", expr[: found.start()]):
                yield f"{where}: counter {found[0]} is not under rate or increase"


def _target_variables(board: Json) -> Iterator[str]:
    known = {v["name"] for v in board["templating"]["list"]} | {"__rate_interval", "__range", "__range_s", "__interval"}
    used: set[str] = set()
    for where, expr in queries(board):
        names = set(re.findall(r"\$\{?(\w+)", expr))
        used |= names
        for name in sorted(names - known):
            yield f"{where}: there is no variable {name}"
    for v in board["templating"]["list"]:
        if v["type"] == "query" and v["name"] not in used:
            yield f"variable {v['name']} is used in no query"


def _no_data(board: Json) -> Iterator[str]:
    for panel in panels(board):
        if panel["type"] != "text" and len(panel["fieldConfig"]["defaults"].get("noValue", "")) < 12:
            yield f"panel {panel['title']} does not say what is missing when it has no data"


def _layout(board: Json) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    ids: set[int] = set()
    for panel in board["panels"]:
        if panel["id"] in ids:
            yield f"id {panel['id']} is used twice"
        ids.add(panel["id"])
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            yield f"panel {panel['title']} extends past the right edge"
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            if cell in taken:
                yield f"panels {taken[cell]} and {panel['title']} overlap"
                return
            taken[cell] = panel["title"]


def _range(board: Json) -> Iterator[str]:
    for panel in panels(board):
        for target in panel.get("targets", ()):
            if re.search(r"\$__range\b", target["expr"]) and not target["instant"]:
                yield f"panel {panel['title']} evaluates $__range at each point of time; make its query instant"


def _uneditable(board: Json) -> Iterator[str]:
    if board["editable"]:
        yield "the board can be edited, and the next upgrade would undo what was edited"


RULES: Final[dict[str, Callable[[Json], Iterator[str]]]] = {
    "template-datasource-rule": _template_datasource,
    "template-on-time-change-reload-rule": _template_on_time_change_reload,
    "template-label-promql-rule": _template_label_promql,
    "panel-datasource-rule": _panel_datasource,
    "panel-title-description-rule": _panel_title_description,
    "panel-units-rule": _panel_units,
    "panel-no-targets-rule": _panel_no_targets,
    "target-rate-interval-rule": _target_rate_interval,
    "target-counter-agg-rule": _target_counter_agg,
    "uneditable-dashboard": _uneditable,
    "orch-variables": _target_variables,
    "orch-no-data": _no_data,
    "orch-layout": _layout,
    "orch-range": _range,
}
"""Rules by name; those that begin with orch- are not in the public linter."""


def lint(board: Json) -> list[str]:
    """Return the violations of the board as `rule: sentence`, empty when there are none."""
    return [f"{name}: {sentence}" for name, rule in RULES.items() for sentence in rule(board)]
