"""The screen of `orch top`: three tables that follow the newest frame, and the keys to move among them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from orchestrator.cli.console import clean
from orchestrator.cli.render.gpu_view import BAND_STYLES, memory, percent, power, state_cell
from orchestrator.cli.top import model
from orchestrator.cli.top.model import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType

    from orchestrator.cli.top.source import Frame, JobLine, TopSource
    from orchestrator.gpu.balance.view import GpuRow

GPU_COLUMNS = (
    "NODE",
    "GPU",
    "MODEL",
    "TEMP",
    "POWER",
    "MEMORY",
    "",
    "UTIL",
    "",
    "UTILIZATION",
    "WATTS",
    "JOB",
    "STATE",
)
JOB_COLUMNS = ("JOB", "STATE", "GPUS", "PROGRESS", "BALANCE", "WHY")
PROCESS_COLUMNS = ("PID", "USER", "NODE", "GPU", "GPU MEM", "CPU", "MEM", "TIME", "COMMAND")
GRAPH_WIDTH, BAR_WIDTH = 30, 10

HELP = """\
q  ctrl+c   leave
s           sort by the next column (node, utilization, memory, power, temperature, job)
r           turn the order around
/           filter: words that node, model, job, UUID or state must contain; Esc ends it
space       hold the picture still, and let it go on
tab         move to the next table; arrows and page keys move within one
j  p        show or hide jobs and processes
?           these keys

UTILIZATION and WATTS are histories, the newest on the right. A rank that waits for others shows full
utilization and few watts: so does the real thing. BALANCE is the spread (CV) over a job's GPUs:
below 5% excellent, below 10% good, below 20% fair, else poor.
"""


class HelpScreen(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "app.pop_screen", "Close")]
    CSS = (
        "HelpScreen { align: center middle; } #help { width: 104; height: auto; border: round $accent; padding: 1 2; }"
    )

    def compose(self) -> ComposeResult:
        """One box of text."""
        yield Static(HELP, id="help")


class TopApp(App[None]):
    """The live view."""

    TITLE = "orch top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; background: $panel; padding: 0 1; }
    #filter { display: none; height: 3; }
    #gpus { height: auto; max-height: 60%; }
    #jobs, #processes { height: auto; max-height: 14; margin-top: 1; }
    #notes { color: $warning; height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Leave"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("space", "hold", "Hold"),
        Binding("j", "show('jobs')", "Jobs"),
        Binding("p", "show('processes')", "Processes"),
        Binding("question_mark", "help", "Keys"),
        Binding("escape", "unfilter", show=False),
    ]

    def __init__(self, source: TopSource, *, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._shown: Frame | None = None
        self._held = False
        self.order = Order.PLACE
        self.reversed = False
        self.words = ""

    def compose(self) -> ComposeResult:
        """Head, filter, three tables, notes, keys."""
        yield Static(id="head")
        yield Input(placeholder="words to filter by", id="filter")
        with VerticalScroll():
            for name in ("gpus", "jobs", "processes"):
                yield DataTable(id=name, cursor_type="row", zebra_stripes=False)
            yield Static(id="notes")
        yield Footer()

    def on_mount(self) -> None:
        """Give the tables their columns and begin to follow the source."""
        for name, columns in (("gpus", GPU_COLUMNS), ("jobs", JOB_COLUMNS), ("processes", PROCESS_COLUMNS)):
            table = self._table(name)
            for number, column in enumerate(columns):
                table.add_column(column, key=f"{name}{number}")
        self._table("gpus").focus()
        self.set_interval(min(0.25, self._interval / 2), self.follow)
        self.follow()

    def _table(self, name: str) -> DataTable[Text]:
        table: DataTable[Text] = self.query_one(f"#{name}", DataTable)
        return table

    def follow(self) -> None:
        """Show the newest frame, unless the picture is held or it is shown already."""
        frame = self._source.frame
        if frame is not None and frame is not self._shown and not self._held:
            self._shown = frame
            self._draw()

    def _draw(self) -> None:
        frame = self._shown
        if frame is None:
            return
        rows = model.ordered(model.matching(frame.rows, self.words), self.order, reverse=self.reversed)
        self._fill("gpus", [(row.gpu_uuid, self._gpu_cells(row, frame)) for row in rows])
        self._fill("jobs", [(line.job.id, _job_texts(line)) for line in frame.jobs])
        shown = {row.gpu_uuid for row in rows}
        self._fill(
            "processes",
            [
                (f"{line.gpu_uuid}/{line.pid}", [Text(clean(cell)) for cell in model.process_cells(line)])
                for line in frame.processes
                if line.gpu_uuid in shown
            ],
        )
        self.query_one("#head", Static).update(self._head(frame, len(rows)))
        notes = [*frame.problems, *(f"GPU {row.index} of {row.node}: {row.problem}" for row in rows if row.problem)]
        self.query_one("#notes", Static).update(Text("\n".join(clean(note) for note in notes)))

    def _head(self, frame: Frame, shown: int) -> Text:
        text = Text(f"{time.strftime('%H:%M:%S', time.localtime(frame.at))}  {model.headline(frame)}")
        text.append(f"  sorted by {self.order.value}{' (turned)' if self.reversed else ''}", "bright_black")
        if self.words:
            text.append(f"  filter: {clean(self.words)} ({shown} of {len(frame.rows)})", "yellow")
        if self._held:
            text.append("  held", "reverse")
        return text

    def _fill(self, name: str, rows: Sequence[tuple[str, Sequence[Text]]]) -> None:
        """Write a table anew, the cursor staying on the row that it was on."""
        table = self._table(name)
        keys = [key for key, _ in rows]
        current = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None
        if [str(key.value) for key in table.rows] == keys:
            for key, cells in rows:
                for column, cell in zip(table.columns, cells, strict=True):
                    table.update_cell(key, column, cell, update_width=True)
            return
        table.clear()
        for key, cells in rows:
            table.add_row(*cells, key=key)
        if current in keys:
            table.move_cursor(row=keys.index(str(current)))

    def _gpu_cells(self, row: GpuRow, frame: Frame) -> list[Text]:
        share = model.memory_share(row)
        limit = row.power_limit_watts or max((w for w in frame.power_history.get(row.gpu_uuid, ()) if w), default=1.0)
        load = model.load_colour(row.utilization_ratio)
        fill = model.fill_colour(share)
        state = state_cell(row)
        held = ", ".join(f"{holder.job}:{holder.rank}" for holder in row.holders)
        celsius = "" if row.temperature_celsius is None else f"{row.temperature_celsius:.0f}C"
        return [
            Text(clean(row.node)),
            Text(str(row.index), justify="right"),
            Text(clean(row.model)),
            Text(celsius, model.heat_colour(row.temperature_celsius), justify="right"),
            Text(power(row), justify="right"),
            Text(memory(row), fill, justify="right"),
            Text(model.bar(share, BAR_WIDTH), fill),
            Text(percent(row.utilization_ratio), load, justify="right"),
            Text(model.bar(row.utilization_ratio, BAR_WIDTH), load),
            Text(model.graph(frame.history.get(row.gpu_uuid, ()), GRAPH_WIDTH), load),
            Text(model.graph(frame.power_history.get(row.gpu_uuid, ()), GRAPH_WIDTH // 2, limit), "cyan"),
            Text(clean(held)),
            Text(state.text, " ".join(style for style in state.styles if style != "dim")),
        ]

    def action_sort(self) -> None:
        """Sort by the next quantity."""
        self.order = self.order.next()
        self._draw()

    def action_reverse(self) -> None:
        """Turn the order around."""
        self.reversed = not self.reversed
        self._draw()

    def action_hold(self) -> None:
        """Hold the picture, or let it go on."""
        self._held = not self._held
        self._draw()
        self.follow()

    def action_show(self, name: str) -> None:
        """Show or hide a table."""
        table = self._table(name)
        table.display = not table.display

    def action_filter(self) -> None:
        """Ask for words to filter by."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_unfilter(self) -> None:
        """Forget the filter."""
        field = self.query_one("#filter", Input)
        field.value, field.display, self.words = "", False, ""
        self._table("gpus").focus()
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the words are typed."""
        self.words = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and go back to the GPUs."""
        event.input.display = False
        self._table("gpus").focus()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())


def _job_texts(line: JobLine) -> list[Text]:
    cells = model.job_cells(line)
    band = str((line.balance or {}).get("band") or "")
    style = " ".join(BAND_STYLES.get(band, ()))
    return [*(Text(clean(cell)) for cell in cells[:4]), Text(clean(cells[4]), style), Text(clean(cells[5]))]
