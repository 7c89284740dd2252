"""`orch top` at 80, 120 and 160 columns: the cells that identify a row are whole, and more width shows more."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets import Static

from orchestrator.cli.top.cells import GAP, GPU_COLUMNS, JOB_COLUMNS, PROCESS_COLUMNS, TopColumn, fitted, widths
from orchestrator.cli.top.frames import Frame, ProcessLine, Traffic
from orchestrator.cli.top.screen import FittedTable, TopApp
from orchestrator.gpu.row import GpuOwner
from orchestrator.gpu.sample import Throttle
from orchestrator.gpu.sampler import Health
from tests.unit.gpu.test_top import FOUND, POOR, StillSource, frame, job, row

LONG_JOB = "pretrain-a-large-7b-k3f9q2"


def busy_frame(gpus: int, nodes: int = 1) -> Frame:
    """Return a frame with every GPU held, hot, with traffic, one throttled for the longest reason and one lost."""
    rows = [
        row(
            index,
            node=f"node{index % nodes}",
            model="NVIDIA H100 80GB HBM3",
            utilization_ratio=1.0,
            memory_used_bytes=79 << 30,
            power_watts=699.0,
            power_limit_watts=700.0,
            temperature_celsius=88.0,
            sm_clock_hertz=1.98e9,
            holders=(GpuOwner(job_id=LONG_JOB, rank=index),),
            throttle=(Throttle.HARDWARE_SLOWDOWN, Throttle.POWER_CAP) if index == 0 else (),
            health=Health.LOST if index == 1 else Health.OK,
        )
        for index in range(gpus)
    ]
    traffic = {one.gpu_uuid: Traffic(pcie_sent=1.2e9, pcie_received=3e8, nvlink_sent=4e10) for one in rows}
    processes = tuple(
        ProcessLine(pid=4_194_000 + one.index, node=one.node, gpu=one.index, gpu_uuid=one.gpu_uuid, command="python x")
        for one in rows
    )
    lines = (job(id=LONG_JOB, findings=FOUND, balance=POOR),)
    return frame(tuple(rows), traffic=traffic, processes=processes, jobs=lines, title="")


def screen(app: TopApp) -> list[str]:
    """Return the screen's lines as a terminal shows them."""
    width = app.size.width
    return ["".join(segment.text for segment in strip)[:width] for strip in app.screen._compositor.render_strips()]


def shot(shown: Frame, size: tuple[int, int], keys: tuple[str, ...] = ()) -> list[str]:
    """Return the lines on a screen of this size."""
    seen: list[str] = []

    async def go() -> None:
        app = TopApp(StillSource(shown), interval=0.2)
        async with app.run_test(size=size) as pilot:
            await pilot.press(*keys)
            await pilot.pause()
            seen.extend(screen(app))

    asyncio.run(go())
    return seen


@pytest.mark.parametrize(("width", "gpus"), [(80, 16), (120, 2), (160, 8)])
def test_load_job_and_state_are_never_cut(width: int, gpus: int) -> None:
    lines = shot(busy_frame(gpus), (width, 60))
    for index in range(gpus):
        line = next(line for line in lines if f"{LONG_JOB}:{index} " in line and "100%" in line)
        state = "hardware_slowdown +1" if index == 0 else "lost" if index == 1 else "ok"
        assert line.rstrip().endswith(state), line
    assert any(line.startswith(LONG_JOB) and "RUNNING" in line for line in lines)
    assert any("warning: " in line for line in lines)
    assert any("rank 1 is slow" in line for line in lines)
    assert "2 GPUs" in lines[0] or f"{gpus} GPUs" in lines[0]


def test_more_width_shows_more() -> None:
    headings = {
        width: next(line for line in shot(busy_frame(2), (width, 40)) if line.startswith("GPU"))
        for width in (80, 120, 160)
    }
    assert "MEMORY" in headings[80]
    assert "PCIE" not in headings[80]
    assert "PCIE OUT/IN" in headings[120]
    assert {"NVLINK", "OUT/IN", "LOAD", "CLOCK"} <= set(headings[160].split())


def test_what_has_no_room_in_the_table_stands_below_it() -> None:
    text = " ".join(shot(busy_frame(2), (80, 30)))
    assert "PCIe out/in 1.2G/300.0M B/s" in text
    assert "SM 1980 MHz" in text


def test_several_nodes_are_named_and_one_is_not() -> None:
    assert not any("NODE" in line for line in shot(busy_frame(2), (120, 40)))
    lines = shot(busy_frame(4, nodes=2), (120, 40))
    assert any(line.startswith("NODE") for line in lines)
    assert any(line.startswith("node1") for line in lines)


def test_the_columns_follow_a_resize_and_the_cursor_stays() -> None:
    async def go() -> None:
        app = TopApp(StillSource(busy_frame(8)), interval=0.2)
        async with app.run_test(size=(160, 40)) as pilot:
            table = app.query_one("#gpus", FittedTable)
            await pilot.press("down", "down")
            wide = set(table.chosen)
            await pilot.resize_terminal(80, 24)
            await pilot.pause()
            assert set(table.chosen) < wide
            assert table.cursor_row == 2
            assert "GPU 2 of node0" in str(app.query_one("#detail", Static).render())
            await pilot.resize_terminal(160, 40)
            await pilot.pause()
            assert set(table.chosen) == wide

    asyncio.run(go())


# ---------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("columns", [GPU_COLUMNS, JOB_COLUMNS, PROCESS_COLUMNS])
@pytest.mark.parametrize("width", [60, 80, 97, 120, 160, 300])
def test_columns_fit_the_width(columns: tuple[TopColumn, ...], width: int) -> None:
    needs = {column.key: max(4, column.least) for column in columns}
    chosen = widths(columns, needs, width)
    assert sum(chosen.values()) + GAP * len(chosen) <= width
    assert {column.key for column in columns if column.rank == 0} <= set(chosen)
    assert list(chosen) == [column.key for column in columns if column.key in chosen]


def test_a_column_with_nothing_to_show_is_left_out_and_only_growing_ones_are_narrowed() -> None:
    columns = (
        TopColumn(key="id", heading="ID", grows=True, least=30, most=30),
        TopColumn(key="state", heading="STATE"),
        TopColumn(key="extra", heading="EXTRA", rank=1),
    )
    assert widths(columns, {"id": 30, "state": 9}, 80) == {"id": 30, "state": 9}
    assert widths(columns, {"id": 30, "state": 9, "extra": 5}, 40) == {"id": 29, "state": 9}
    assert widths(columns, {"id": 30, "state": 9}, 20)["state"] == 9


def test_texts_are_fitted_and_a_long_one_loses_its_middle_or_its_end() -> None:
    assert fitted("ab", 4) == "ab   "
    assert fitted("ab", 4, right=True) == "  ab "
    assert fitted("a-long-name-k3f9q2", 9) == "a-lo…f9q2 "
    assert fitted("a long command", 7, cut_end=True) == "a long… "
    assert fitted("abc", 1) == "… "
