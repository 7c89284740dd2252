"""The screen of orch top: order, filter, keys, widths, and the processes of GPUs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from textual.widgets import DataTable, Static

from orchestrator.api.errors import OrchError
from orchestrator.api.views import FindingView, JobView, ProgressView, RankView
from orchestrator.cli.console import Console
from orchestrator.cli.render.gpus import GpuSummary
from orchestrator.cli.session import Session
from orchestrator.cli.top import cells as model
from orchestrator.cli.top.cells import (
    GAP,
    GPU_COLUMNS,
    JOB_COLUMNS,
    PROCESS_COLUMNS,
    Order,
    TopColumn,
    fitted,
    widths,
)
from orchestrator.cli.top.frames import (
    HISTORY,
    Frame,
    Host,
    Past,
    ProcessLine,
    ProcessTree,
    TopSource,
    Traffic,
)
from orchestrator.cli.top.screen import FittedTable, HelpScreen, TopApp
from orchestrator.gpu.row import GpuOwner, GpuRow
from orchestrator.gpu.sample import Throttle
from orchestrator.gpu.sampler import Health
from tests.support.fake_nvml import FakeNvml
from tests.unit.gpu.support import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


def row(index: int, **changes: Any) -> GpuRow:
    values: dict[str, Any] = {
        "gpu_uuid": f"GPU-{index}",
        "node": "node1",
        "index": index,
        "vendor": "nvidia",
        "model": "H100",
        "sampled_at": 1.0,
        "utilization_ratio": 0.1 * index,
        "power_watts": 500.0 - index,
        "memory_used_bytes": index << 30,
        "memory_total_bytes": 80 << 30,
    }
    return GpuRow(**{**values, **changes})


def job(**changes: Any) -> JobView:
    values: dict[str, Any] = {
        "id": "digits-k3f9q2",
        "name": "digits",
        "user": "ann",
        "uid": 1,
        "queue": "default",
        "priority": 50,
        "state": "RUNNING",
        "reason": "",
        "submitted_at": 0.0,
        "gpus": (
            RankView(rank=0, node="node1", gpu_uuids=("GPU-0",)),
            RankView(rank=1, node="node1", gpu_uuids=("GPU-1",)),
        ),
        "progress": ProgressView(step=10, total_steps=100),
    }
    return JobView(**{**values, **changes})


POOR = {
    "gpus": 2,
    "silent": [],
    "band": "poor",
    "quantities": {"power": {"cv": 0.4}},
}
FOUND = (FindingView(kind="rank_slow", rank=1, sentence="rank 1 is slow", advice="look"),)


def frame(rows: tuple[GpuRow, ...], **changes: Any) -> Frame:
    history = {one.gpu_uuid: (0.1, 0.5, None, 1.0) for one in rows}
    return Frame(**{"at": time.time(), "rows": rows, "history": history, "power_history": history, **changes})


class StillSource:
    """A source with a frame that a test sets."""

    def __init__(self, first: Frame | None) -> None:
        self.frame = first


# ----------------------------------------------------------------------------------------------------------------- model


def test_orders_put_the_biggest_first_and_the_unknown_last() -> None:
    rows = [row(0), row(1), row(2, utilization_ratio=None, power_watts=None, memory_used_bytes=None), row(3)]
    assert [one.index for one in model.ordered(rows, Order.UTILIZATION)] == [3, 1, 0, 2]
    assert [one.index for one in model.ordered(rows, Order.POWER)] == [0, 1, 3, 2]
    assert [one.index for one in model.ordered(rows, Order.MEMORY)] == [3, 1, 0, 2]
    assert [one.index for one in model.ordered(rows, Order.PLACE, reverse=True)] == [3, 2, 1, 0]
    held = [row(0), row(1, job_id="b", rank=0), row(2, job_id="a", rank=1), row(3, job_id="a", rank=0)]
    assert [one.index for one in model.ordered(held, Order.JOB)] == [3, 2, 1, 0]
    hot = [row(0, temperature_celsius=50.0), row(1, temperature_celsius=80.0)]
    assert [one.index for one in model.ordered(hot, Order.TEMPERATURE)] == [1, 0]


def test_filters_take_every_word_anywhere() -> None:
    rows = [row(0), row(1, node="node2", vendor="amd"), row(2, holders=(GpuOwner(job_id="digits-k3f9q2", rank=0),))]
    assert [one.index for one in model.matching(rows, "NODE1 h100")] == [0, 2]
    assert [one.index for one in model.matching(rows, "amd")] == [1]
    assert [one.index for one in model.matching(rows, "digits")] == [2]
    assert [one.index for one in model.matching(rows, "gpu2")] == [2]
    assert model.matching(rows, "nothing") == []
    assert len(model.matching(rows, "  ")) == 3


def test_the_headline_counts_what_matters() -> None:
    rows = (row(0, utilization_ratio=1.0), row(1, utilization_ratio=0.5, health=Health.LOST), row(2, placeable=False))
    text = model.headline(frame(rows, jobs=(job(balance=None),)))
    assert text == "1 node  2 GPUs  75% busy  999 W  1 not answering  1 job"
    assert model.headline(frame((row(0),), origin="no daemon: this machine only")).endswith("this machine only")
    host = Host(cpu_share=0.5, cores=1, load=0.25, memory_used_bytes=1 << 30, memory_total_bytes=4 << 30)
    assert model.host_line(host) == "host: CPU 50% of 1 core  load 0.2  memory 1.0/4.0 GiB"


# ---------------------------------------------------------------------------------------------------------------- screen


def drive(source: Any, script: Any, size: tuple[int, int] = (180, 50)) -> None:
    """Run the screen without a terminal and let `script` press its keys."""

    async def go() -> None:
        app = TopApp(source, interval=0.1)
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)

    asyncio.run(go())


def cells(app: TopApp, name: str) -> list[dict[str, str]]:
    """Return a table's rows by column, as shown on the screen without the padding."""
    table = app.query_one(f"#{name}", DataTable)
    keys = [str(key.value) for key in table.columns]
    return [
        dict(zip(keys, (str(cell).strip() for cell in table.get_row_at(number)), strict=True))
        for number in range(table.row_count)
    ]


def head(app: TopApp) -> str:
    return str(app.query_one("#head", Static).render())


def test_the_screen_shows_gpus_jobs_and_processes() -> None:
    rows = (
        row(
            0,
            throttle=(Throttle.THERMAL,),
            holders=(GpuOwner(job_id="digits-k3f9q2", rank=0),),
            temperature_celsius=66.0,
        ),
        row(1, health=Health.LOST, problem="gone"),
    )
    line = ProcessLine(
        pid=4711, node="node1", gpu=0, gpu_uuid="GPU-0", memory_bytes=5, command="python \x1b[31mtrain.py"
    )
    source = StillSource(frame(rows, jobs=(job(balance=POOR),), processes=(line,), problems=("a note",)))

    async def script(app: TopApp, pilot: Any) -> None:
        await pilot.pause()
        first, second = cells(app, "gpus")
        assert (first["gpu"], first["model"], first["temp"]) == ("0", "H100", "66C")
        assert (first["job"], first["state"]) == ("digits-k3f9q2:0", "thermal")
        assert first["load"].endswith("▁▄ █")
        assert second["state"] == "lost"
        assert cells(app, "jobs")[0]["balance"] == "poor: power CV 40%"
        assert cells(app, "processes")[0]["command"] == "python ?[31mtrain.py", "nothing that steers the terminal"
        notes = str(app.query_one("#notes", Static).render())
        assert "a note" in notes
        assert "GPU 1 of node1: gone" in notes

    drive(source, script)


def test_keys_sort_reverse_hide_and_explain() -> None:
    source = StillSource(frame((row(0), row(1), row(2))))

    async def script(app: TopApp, pilot: Any) -> None:
        await pilot.press("s")
        assert [line["gpu"] for line in cells(app, "gpus")] == ["2", "1", "0"]
        assert "by utilization" in head(app)
        await pilot.press("r")
        assert [line["gpu"] for line in cells(app, "gpus")] == ["0", "1", "2"]
        await pilot.press("p")
        await pilot.press("j")
        assert not app.query_one("#processes").display
        assert not app.query_one("#processes-empty").display
        assert app.query_one("#gpus").display
        assert "hidden: jobs, processes" in head(app)
        await pilot.press("p")
        assert app.query_one("#processes-empty").display
        await pilot.press("escape")
        assert app.query_one("#jobs-empty").display
        assert "hidden" not in head(app)
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)

    drive(source, script)


def test_filtering_while_typing_and_forgetting_it() -> None:
    source = StillSource(frame((row(0), row(1, node="node2"), row(2))))

    async def script(app: TopApp, pilot: Any) -> None:
        await pilot.press("slash", *"node2")
        assert [line["node"] for line in cells(app, "gpus")] == ["node2"]
        assert "(1 of 3)" in head(app)
        await pilot.press("enter")
        assert not app.query_one("#filter").display
        assert len(cells(app, "gpus")) == 1
        await pilot.press("escape")
        assert len(cells(app, "gpus")) == 3
        await pilot.press("slash", *"nothing")
        assert not app.query_one("#gpus").display
        assert "no GPU matches 'nothing'; esc shows all 3" in str(app.query_one("#gpus-empty", Static).render())
        await pilot.press("escape")
        assert app.query_one("#gpus").display

    drive(source, script)


def test_the_picture_follows_holds_and_keeps_the_cursor() -> None:
    source = StillSource(None)

    async def script(app: TopApp, pilot: Any) -> None:
        assert cells(app, "gpus") == []
        source.frame = frame((row(0), row(1), row(2)))
        app.follow()
        await pilot.pause()
        table = app.query_one("#gpus", DataTable)
        await pilot.press("down", "down")
        assert table.cursor_row == 2
        source.frame = frame((row(5), row(1), row(2)))
        app.follow()
        assert [line["gpu"] for line in cells(app, "gpus")] == ["1", "2", "5"]
        assert table.cursor_row == 1, "still on the same GPU"
        await pilot.press("space")
        source.frame = frame((row(9),))
        app.follow()
        assert len(cells(app, "gpus")) == 3, "held"
        assert "held" in head(app)
        await pilot.press("space")
        assert [line["gpu"] for line in cells(app, "gpus")] == ["9"]

    drive(source, script)


# ---------------------------------------------------------------------------------------------------------------- source


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(environ={"ORCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})


def test_the_source_works_without_a_daemon(session: Session, nvml: FakeNvml) -> None:
    nvml[0].processes({os.getpid(): 5 << 30, 2**30: 1})
    with TopSource(session, interval=0.05) as source:
        seen = wait_for(
            lambda: (
                source.frame
                and all(one.sampled_at for one in source.frame.rows)
                and len(source.frame.history[nvml.uuid(0)]) > 3
                and source.frame
            ),
            "a few looks",
        )
    assert seen.origin == "no daemon: this machine only"
    assert seen.host is not None
    assert seen.host.memory_used_bytes <= seen.host.memory_total_bytes
    assert [one.utilization_ratio for one in seen.rows] == [0.5, 0.51]
    assert seen.history[nvml.uuid(0)][-1] == 0.5
    mine = next(line for line in seen.processes if line.pid == os.getpid())
    gone = seen.processes[-1]
    assert (mine.gpu, mine.memory_bytes) == (0, 5 << 30)
    assert mine.utilization is None, "two processes share the GPU: its load cannot be told apart"
    assert mine.gpu_share == pytest.approx(mine.memory_bytes / (seen.rows[0].memory_total_bytes or 0))
    assert "python" in mine.command
    assert mine.seconds is not None
    assert (gone.pid, gone.command) == (2**30, "")


def test_counters_become_rates_and_a_new_beginning_is_no_rate() -> None:
    past = Past()

    def looked(at: float, sent: int, links: int | None) -> Traffic | None:
        past.add((row(0, sampled_at=at, pcie_transmit_bytes=sent, nvlink_receive_bytes=links),))
        return past.traffic.get("GPU-0")

    assert looked(1.0, 1000, 5) is None, "one look has no rate"
    assert looked(3.0, 5000, 5) == Traffic(pcie_sent=2000.0, nvlink_received=0.0)
    assert looked(3.0, 5000, 5) == Traffic(pcie_sent=2000.0, nvlink_received=0.0), "the same sample again"
    assert looked(4.0, 10, None) == Traffic(), "the driver was loaded anew"
    assert looked(5.0, 20, 7) == Traffic(pcie_sent=10.0)


class ComingAndGoing(TopSource):
    """A source with a daemon that a test starts and stops."""

    answer: GpuSummary | Exception = GpuSummary(rows=())

    def _see(self) -> GpuSummary:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_daemon_that_goes_away_is_told_and_one_that_comes_back_too(session: Session, nvml: FakeNvml) -> None:
    assert nvml[0]
    source = ComingAndGoing(session)
    source.answer = GpuSummary(rows=(row(0), row(1)), daemon=True)
    assert (source.look().origin, len(source.look().rows)) == ("", 2)
    source.answer = GpuSummary(rows=())
    seen = source.look()
    assert seen.origin.startswith("no daemon since ")
    assert seen.rows == ()
    assert set(seen.history) == {"GPU-0", "GPU-1"}, "what was seen is kept for when they come back"
    source.answer = OrchError("the daemon takes too long")
    assert "the daemon takes too long" in source.look().problems
    source.answer = GpuSummary(rows=(row(0),), daemon=True)
    assert source.look().origin == ""
    for _ in range(HISTORY):
        source.look()
    assert set(source.look().history) == {"GPU-0"}, "a GPU that is gone for good is forgotten"


def test_top_needs_a_terminal(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.api.errors import BadRequestError
    from orchestrator.cli.commands import gpu

    monkeypatch.setattr(gpu, "Session", lambda: session)
    session.console = Console({}, out=open(os.devnull, "w"))  # noqa: SIM115  # closed below
    with pytest.raises(BadRequestError, match="terminal"):
        gpu.top()
    session.console.out.close()


LOADER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def rank() -> Iterator[int]:
    """Start a process with one child, as a rank with a data loader; yield its process id."""
    with subprocess.Popen([sys.executable, "-c", LOADER], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


def test_children_follow_their_parent_and_ranks_are_named(rank: int) -> None:
    tree = ProcessTree("node1")
    rows = (row(0, processes=({"pid": rank, "memory_bytes": 8 << 30},)),)

    def looked() -> list[ProcessLine]:
        lines = list(tree.lines(rows, {rank: "digits-k3f9q2:0"}))
        return lines if lines[-1].pid != rank and lines[-1].command else []

    lines = wait_for(looked, "the child to be there")
    pids = [line.pid for line in lines]
    assert os.getpid() in pids, "the parent stands above"
    here = pids.index(rank)
    assert pids.index(os.getpid()) < here
    parent, child = lines[here], lines[here + 1]
    assert (parent.owner, parent.gpu, parent.memory_bytes) == ("digits-k3f9q2:0", 0, 8 << 30)
    assert parent.gpu_share == pytest.approx(0.1)
    assert parent.utilization == 0.0, "alone on the GPU: its load is the process's"
    assert (child.gpu, child.owner) == (None, "")
    assert len(child.branch) > len(parent.branch)
    assert child.branch.endswith("└─ ")
    assert child.resident_bytes is not None
    assert child.cpu_percent is not None


def test_a_rank_without_a_gpu_is_shown_and_other_nodes_come_after(rank: int) -> None:
    tree = ProcessTree("node1")
    away = row(3, node="node2", processes=({"pid": rank, "memory_bytes": None},))
    lines = tree.lines((away,), {rank: "cpu-000001:0"})
    here = next(line for line in lines if line.pid == rank and line.node == "node1")
    assert (here.gpu, here.owner) == (None, "cpu-000001:0")
    last = lines[-1]
    assert (last.node, last.gpu, last.command) == ("node2", 3, ""), "another node's process has no host values here"


def test_a_process_on_two_gpus_has_a_line_for_each_and_one_that_ended_has_one() -> None:
    tree = ProcessTree("node1")
    mine = os.getpid()
    rows = tuple(
        row(i, processes=({"pid": mine, "memory_bytes": 1}, {"pid": 2**30, "memory_bytes": 2})) for i in (0, 1)
    )
    lines = tree.lines(rows, {})
    assert [line.gpu for line in lines if line.pid == mine] == [0, 1]
    gone = [line for line in lines if line.pid == 2**30]
    assert [(line.gpu, line.command, line.utilization) for line in gone] == [(0, "", None), (1, "", None)]


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
