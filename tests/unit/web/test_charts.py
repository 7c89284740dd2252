"""Charts: scales, lines with breaks, bands, parts by address; and how often records are read for them."""

from __future__ import annotations

import pytest

from orchestrator.api.curve_views import ChartView, CurvesView, CurveView
from orchestrator.api.errors import BadRequestError
from orchestrator.web.charts import (
    Axis,
    Window,
    charts_html,
    drawing,
    nice_scale,
    window_of,
)
from tests.unit.web.conftest import Browser

AXIS = Axis(begin=0.0, end=100.0, kind="step")


def curve(*values: float | None, label: str = "GPU 0", spread: float = 0.0) -> CurveView:
    return CurveView(
        label=label,
        x=tuple(10.0 * n for n in range(len(values))),
        values=values,
        lows=tuple(None if v is None else v - spread for v in values),
        highs=tuple(None if v is None else v + spread for v in values),
    )


def chart(*curves: CurveView, name: str = "loss", unit: str = "") -> ChartView:
    return ChartView(name=name, unit=unit, curves=curves)


def test_a_line_is_broken_where_a_value_is_not_finite_or_nothing_was_recorded() -> None:
    (line,) = drawing(chart(curve(0.0, 50.0, None, 100.0), name="GPU load", unit="%"), AXIS).lines
    assert line.path == "M0 100.0h1L100 50.0M300 0.0h1"
    assert (line.xs, line.values, line.last) == ("0 100 200 300", "0|50|not finite|100", "100")
    far = CurveView(label="x", x=(0.0, 1.0, 2.0, 90.0), values=(1.0, 1.0, 1.0, 1.0))
    (line,) = drawing(chart(far), AXIS).lines
    assert line.path.count("M") == 2


def test_a_chart_says_in_words_what_it_shows() -> None:
    description = drawing(chart(curve(3.0, 1.0, 2.0), name="GPU power", unit="W"), AXIS).description
    assert description == "GPU power in W, 0 to 100. GPU 0: last 2, least 1, most 3"
    assert "nothing finite" in drawing(chart(curve(None)), AXIS).description


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [
        (0.0, 65.4, (0.0, 80.0)),
        (0.0, 410.0, (0.0, 500.0)),
        (0.25, 2.6, (0.0, 3.0)),
        (0.0, 0.066, (0.0, 0.08)),
        (7.0, 7.1, (7.0, 7.1)),
    ],
)
def test_scales_have_round_ends(low: float, high: float, scale: tuple[float, float]) -> None:
    assert nice_scale(low, high) == pytest.approx(scale)


@pytest.mark.parametrize(
    "query", [{"from": "x"}, {"from": "nan"}, {"to": "inf"}, {"from": "-1"}, {"from": "5", "to": "5"}, {"to": "1e300"}]
)
def test_a_part_that_is_none_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(BadRequestError):
        window_of(query)


def test_without_records_there_is_a_sentence() -> None:
    assert "Nothing was recorded." in charts_html([], (0.0, 0.0), Window(), "/jobs/a")
    assert "Nothing was recorded in this part" in charts_html([], (0.0, 9.0), Window(1.0, 2.0), "/jobs/a")


def test_a_job_page_shows_charts_of_the_part_that_its_address_names(browser: Browser) -> None:
    job = browser.service.add(state="RUNNING")
    browser.service.recorded[job.id] = CurvesView(
        job_id=job.id, begin=0.0, end=100.0, charts=(chart(curve(0.5, 0.25)),), sampled=True
    )
    text = browser.get(f"/jobs/{job.id}?from=10&to=20").text
    assert f'data-live="/live/jobs/{job.id}?from=10&amp;to=20"' in text
    assert 'data-y="0.5|0.25"' in text
    assert "evenly spread samples" in text
    assert browser.get(f"/jobs/{job.id}?from=x").status == 400


def test_a_metric_that_counts_bytes_is_drawn_in_the_unit_of_its_largest_value() -> None:
    curve = CurveView(
        label="rank 0",
        x=(0.0, 1.0),
        values=(1 * 2.0**30, 3 * 2.0**30),
        lows=(None, 3 * 2.0**30),
        highs=(None, 3 * 2.0**30),
    )
    drawn = drawing(chart(curve, name="memory_reserved_bytes"), Axis(begin=0.0, end=1.0))
    assert (drawn.unit, drawn.bottom, drawn.middle, drawn.top) == ("GiB", "1", "2", "3")
    assert drawn.lines[0].last == "3"
    small = CurveView(label="rank 0", x=(0.0,), values=(None,))
    assert drawing(chart(small, name="io_bytes"), Axis(begin=0.0, end=1.0)).unit == "B"
