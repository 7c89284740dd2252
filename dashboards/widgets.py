"""Panels and boards: grafanalib builds them; what it lacks or writes in an old form is added or replaced here.

grafanalib 0.7 writes schema version 12, with panel options that Grafana has removed. `finish` keeps the keys of the
current schema, adds the options that the type of each panel requires, and gives every panel its id. The tests check the
result against Grafana's own published types. The modules of the boards decide which panels there are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from grafanalib import core as g
from grafanalib._gen import DashboardEncoder

from orchestrator.core import thresholds as d

SCHEMA_VERSION: Final = 39
"""Schema version of Grafana 11; newer versions of Grafana read and migrate it."""
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
TAG: Final = "orch"

Json = dict[str, Any]

OPEN_JOB: Final = "/d/orch-job?var-job_id={job}&var-datasource=${{datasource}}&${{__url_time_range}}"
"""Address of a job's own board, for data links."""
JOB_OF_SERIES: Final = {"title": "Job board", "url": OPEN_JOB.format(job="${__field.labels.job_id}")}
JOB_OF_ROW: Final = {"title": "Job board", "url": OPEN_JOB.format(job="${__data.fields.Job}")}

DIAGNOSIS: Final = {
    "title": "What it means and what to do",
    "url": "${docs}/diagnosis.md#${__value.raw}",
    "targetBlank": True,
}
"""Link to the documentation's section on a kind of finding, at the address in the variable docs."""

BAND_COLORS: Final = ("green", "yellow", "orange", "red")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Format of displayed values: unit, bounds, colours at limits, texts for numbers."""

    unit: str = "short"
    decimals: int | None = None
    low: float | None = None
    high: float | None = None
    limits: tuple[tuple[float, str], ...] = ()
    base: str = "green"
    words: tuple[tuple[int, str, str], ...] = ()
    overrides: tuple[Json, ...] = ()


PLAIN: Final = Look()
RATIO: Final = Look(unit="percentunit", low=0, high=1)
SECONDS: Final = Look(unit="s", low=0)
WATTS: Final = Look(unit="watt", low=0)
BYTES: Final = Look(unit="bytes", low=0)
GPUS: Final = Look(unit="short", low=0)
CV: Final = Look(
    unit="percentunit", low=0, limits=tuple(zip(d.BALANCE_BANDS, ("yellow", "orange", "red"), strict=True))
)
"""The bands of balance: excellent, good, fair, poor."""
SHARE: Final = Look(unit="percentunit", low=0, base="red", limits=((0.5, "orange"), (0.8, "green")))
NONE_IS_GOOD: Final = Look(unit="short", low=0, limits=((1, "red"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL query and the legend of its series; `now` makes it an instant query, for the newest value only."""

    expr: str
    legend: str = ""
    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A row of the board and its panels, which are laid out from left to right."""

    title: str
    panels: tuple[g.Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Definition of a board, from which `to_json` makes the JSON."""

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]
    variables: tuple[g.Template, ...]
    annotations: tuple[Json, ...] = field(default=())


def _targets(queries: tuple[Query, ...], *, table: bool = False) -> list[g.Target]:
    return [
        g.Target(
            expr=query.expr,
            legendFormat=query.legend or "__auto",
            refId=chr(ord("A") + i),
            instant=query.now or table,
            format="table" if table else "time_series",
            datasource=SOURCE,
        )
        for i, query in enumerate(queries)
    ]


def _look(look: Look, missing: str, custom: Json | None = None, queries: tuple[Query, ...] = ()) -> Json:
    steps = [{"color": look.base, "value": None}, *({"color": color, "value": at} for at, color in look.limits)]
    mappings = [
        {"type": "value", "options": {str(value): {"text": text, "color": color, "index": value}}}
        for value, text, color in look.words
    ]
    defaults: Json = {
        "unit": look.unit,
        "noValue": missing,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if look.limits or look.words else "palette-classic"},
        "mappings": mappings,
        "custom": custom or {},
    }
    if queries and all("{{job_id}}" in query.legend for query in queries):
        defaults["links"] = [JOB_OF_SERIES]
    for key, value in (("decimals", look.decimals), ("min", look.low), ("max", look.high)):
        if value is not None:
            defaults[key] = value
    return {"defaults": defaults, "overrides": list(look.overrides)}


_CURRENT: Final = "current form"


def _current(field_config: Json, options: Json) -> Json:
    """Return the parts that grafanalib would write in an old form, under a key from which `finish` takes them."""
    return {_CURRENT: {"fieldConfig": field_config, "options": options}}


def _common(title: str, text: str, width: int, height: int) -> Json:
    return {
        "title": title,
        "description": text,
        "dataSource": SOURCE,
        "gridPos": g.GridPos(h=height, w=width, x=0, y=0),
        "maxDataPoints": None,
        "editable": False,
    }


def lines(
    title: str,
    text: str,
    *queries: Query,
    missing: str,
    look: Look = PLAIN,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    bands: bool = False,
) -> g.Panel:
    """Return a panel of lines in colours of their own; `bands` fills the background at the look's limits."""
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "area" if bands else "off"},
    }
    shown = _look(look, missing, custom, queries)
    shown["defaults"]["color"] = {"mode": "palette-classic"}
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return g.TimeSeries(
        **_common(title, text, width, height),
        targets=_targets(queries),
        extraJson=_current(shown, options),
    )


def number(
    title: str,
    text: str,
    *queries: Query,
    missing: str,
    look: Look = PLAIN,
    width: int = 4,
    height: int = 4,
    graph: bool = True,
) -> g.Panel:
    """Return a panel of one large number; `graph` shows its recent values behind it."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "auto",
        "textMode": "auto",
        "colorMode": "value",
        "graphMode": "area" if graph else "none",
        "justifyMode": "auto",
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "wideLayout": True,
    }
    return g.Stat(
        **_common(title, text, width, height),
        targets=_targets(queries),
        thresholds=[],
        extraJson=_current(_look(look, missing, None, queries), options),
    )


def bars(
    title: str,
    text: str,
    *queries: Query,
    missing: str,
    look: Look = PLAIN,
    width: int = 12,
    height: int = 8,
) -> g.Panel:
    """Return a panel of bars, with the newest value of every series."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "gradient",
        "valueMode": "color",
        "namePlacement": "auto",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 300,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
    }
    return g.BarGauge(
        **_common(title, text, width, height),
        targets=_targets(queries),
        extraJson=_current(_look(look, missing, None, queries), options),
    )


def table(
    title: str,
    text: str,
    *queries: Query,
    missing: str,
    columns: dict[str, str],
    looks: dict[str, Look] | None = None,
    width: int = 24,
    height: int = 8,
    sort: str = "",
) -> g.Panel:
    """Return a table of the newest values, as rows. `columns` maps the shown fields to headings, in order."""
    overrides = []
    for heading, look in (looks or {}).items():
        made = _look(look, missing)["defaults"]
        properties = [{"id": "unit", "value": made["unit"]}, {"id": "thresholds", "value": made["thresholds"]}]
        if look.limits:
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
        if look.words:
            properties.append({"id": "mappings", "value": made["mappings"]})
        overrides.append({"matcher": {"id": "byName", "options": heading}, "properties": properties})
    for heading, link in (("Job", JOB_OF_ROW), ("Finding", DIAGNOSIS)):
        if heading in columns.values():
            links = {"id": "links", "value": [link]}
            overrides.append({"matcher": {"id": "byName", "options": heading}, "properties": [links]})
    shown = _look(
        PLAIN, missing, {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "inspect": False}
    )
    shown["overrides"] = overrides
    wanted = list(columns)
    organize = {
        "indexByName": {name: i for i, name in enumerate(wanted)},
        "renameByName": {name: heading for name, heading in columns.items() if name != heading},
        "includeByName": dict.fromkeys(wanted, True),
        "excludeByName": {},
    }
    options = {
        "frameIndex": 0,
        "showHeader": True,
        "cellHeight": "sm",
        "sortBy": [{"displayName": sort, "desc": True}] if sort else [],
    }
    return g.Table(
        **_common(title, text, width, height),
        targets=_targets(queries, table=True),
        transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
        extraJson=_current(shown, options),
    )


def states(
    title: str, text: str, *queries: Query, missing: str, look: Look, width: int = 24, height: int = 6
) -> g.Panel:
    """Return a panel of states over time."""
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return g.StateTimeline(
        **_common(title, text, width, height),
        targets=_targets(queries),
        extraJson=_current(_look(look, missing, {"lineWidth": 0, "fillOpacity": 70}, queries), options),
    )


def heatmap(
    title: str, text: str, query: Query, *, missing: str, look: Look, width: int = 24, height: int = 9
) -> g.Panel:
    """Return a panel of values as colours, one row per series, over time. grafanalib has only its old form."""
    options = {
        "calculate": False,
        "rowsFrame": {"layout": "auto"},
        "cellGap": 1,
        "showValue": "never",
        "selectionMode": "x",
        "color": {
            "mode": "scheme",
            "scheme": "RdYlGn",
            "reverse": False,
            "steps": 64,
            "exponent": 0.5,
            "fill": "dark-orange",
            "scale": "linear",
            "min": look.low,
            "max": look.high,
        },
        "cellValues": {"unit": look.unit},
        "yAxis": {"axisPlacement": "left", "reverse": False},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    hidden = {"hideFrom": {"tooltip": False, "viz": False, "legend": False}}
    return g.Heatmap(
        **_common(title, text, width, height),
        targets=_targets((query,)),
        extraJson=_current(_look(look, missing, hidden), options),
    )


def words(title: str, content: str, *, width: int = 24, height: int = 4) -> g.Panel:
    """Return a panel of Markdown text."""
    return g.Text(
        **{**_common(title, "What this board shows, and where to go from here.", width, height), "dataSource": None},
        content=content,
        mode="markdown",
        extraJson=_current({"defaults": {}, "overrides": []}, {"mode": "markdown", "content": content}),
    )


def source_variable() -> g.Template:
    """Return the variable that selects the Prometheus of all panels."""
    return g.Template(name="datasource", label="Data Source", type="datasource", query="prometheus", refresh=2)


def variable(name: str, label: str, query: str, *, all_value: str = ".+") -> g.Template:
    """Return a variable that selects one or more values, all of them by default."""
    return g.Template(
        name=name,
        label=label,
        query=query,
        dataSource=SOURCE,
        includeAll=True,
        multi=True,
        allValue=all_value,
        refresh=2,  # when the time range changes: it then offers the jobs of that time
        sort=1,
        default="$__all",
    )


def text_variable(name: str, label: str, value: str) -> g.Template:
    """Return a variable with a text field at the top of the board."""
    return g.Template(name=name, label=label, type="textbox", query=value)


def event_annotation(name: str, expr: str, color: str) -> Json:
    """Return an annotation that marks the times that its series have as values (in milliseconds)."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "step": "15s",
        "titleFormat": name,
        "textFormat": "{{job_id}}",
        "tagKeys": "event,job_id",
        "useValueForTime": True,
    }


def finding_annotation(expr: str) -> Json:
    """Return an annotation that marks the time in which a finding was open: its series exists for that time."""
    return {
        "name": "Findings",
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "dark-red",
        "expr": expr,
        "step": "15s",
        "titleFormat": "{{kind}}",
        "textFormat": "{{job_id}} rank {{rank}} {{node}} {{gpu_uuid}}",
        "tagKeys": "kind,job_id",
        "useValueForTime": False,
    }


def to_json(board: Board) -> Json:
    """Return the board as JSON in Grafana's current schema."""
    raw = g.Dashboard(
        title=board.title,
        uid=board.uid,
        description=board.description,
        editable=False,
        tags=[TAG],
        panels=[g.RowPanel(title=s.title, panels=list(s.panels), collapsed=True) for s in board.sections],
        templating=g.Templating(list=list(board.variables)),
        annotations=g.Annotations(list=list(board.annotations)),
        links=[g.DashboardLink(title="orch", tags=[TAG], asDropdown=False, includeVars=True, keepTime=True)],
        time=g.Time("now-3h", "now"),
        refresh="30s",
        sharedCrosshair=True,
        schemaVersion=SCHEMA_VERSION,
        timezone="browser",
    )
    return finish(json.loads(json.dumps(raw, cls=DashboardEncoder)))


_DASHBOARD_KEYS: Final = (
    "annotations", "description", "editable", "links", "refresh", "schemaVersion", "tags", "templating", "time",
    "timezone", "title", "uid",
)  # fmt: skip
_PANEL_KEYS: Final = (
    "type", "title", "description", "datasource", "gridPos", "targets", "transformations",
)  # fmt: skip
_VARIABLE_KEYS: Final = (
    "name", "label", "type", "query", "datasource", "hide", "includeAll", "multi", "allValue", "refresh", "sort",
)  # fmt: skip


def finish(raw: Json) -> Json:
    """Convert a dashboard of grafanalib to the current schema: known keys only, sections laid out, ids assigned."""
    board = {key: raw[key] for key in _DASHBOARD_KEYS}
    board["graphTooltip"] = 1
    board["fiscalYearStartMonth"] = 0
    board["timepicker"] = {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m", "15m", "1h"]}
    board["templating"] = {"list": [_finish_variable(v) for v in raw["templating"]["list"]]}
    board["annotations"] = {"list": [_BUILT_IN_ANNOTATION, *raw["annotations"]["list"]]}
    board["panels"] = _lay_out(raw["panels"])
    return board


_BUILT_IN_ANNOTATION: Final[Json] = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}


def _finish_variable(raw: Json) -> Json:
    variable = {key: raw[key] for key in _VARIABLE_KEYS if raw.get(key) is not None}
    if raw["type"] == "query":
        variable["definition"] = raw["query"]
        variable["query"] = {
            "qryType": 5,
            "query": raw["query"],
            "refId": "PrometheusVariableQueryEditor-VariableQuery",
        }
        variable["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
        variable["options"] = []
    elif raw["type"] == "textbox":
        for key in ("allValue", "includeAll", "multi", "sort", "refresh", "datasource"):
            variable.pop(key, None)
        variable["current"] = {"text": raw["query"], "value": raw["query"]}
        variable["options"] = []
    else:
        variable.pop("allValue", None)
        variable["current"] = {}
        variable["options"] = []
    return variable


def _lay_out(rows: list[Json]) -> list[Json]:
    """Open the rows and place panels from left to right below them; a panel that no longer fits begins a new line."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "type": "row",
                "title": row["title"],
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "panels": [],
            }
        )
        y += 1
        x = tallest = 0
        for raw in row["panels"]:
            panel = _finish_panel(raw)
            place = panel["gridPos"]
            if x + place["w"] > 24:
                x, y, tallest = 0, y + tallest, 0
            place["x"], place["y"] = x, y
            x += place["w"]
            tallest = max(tallest, place["h"])
            panels.append(panel)
        y += tallest
    for i, panel in enumerate(panels, start=1):
        panel["id"] = i
    return panels


def _finish_panel(raw: Json) -> Json:
    panel = {key: raw[key] for key in _PANEL_KEYS if raw.get(key) not in (None, [], {})}
    if "targets" in panel:
        panel["targets"] = [_finish_target(target) for target in panel["targets"]]
    panel |= raw[_CURRENT]
    return panel


def _finish_target(raw: Json) -> Json:
    return {
        "refId": raw["refId"],
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": raw["expr"],
        "legendFormat": raw["legendFormat"],
        "format": raw["format"],
        "instant": raw["instant"],
        "range": not raw["instant"],
    }
