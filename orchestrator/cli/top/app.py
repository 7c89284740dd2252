"""Screen of `orch top`: GPUs, findings, jobs and processes of the newest frame, and the keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from orchestrator.cli.top import cells, model, texts
from orchestrator.cli.top.tables import FittedTable
from orchestrator.cli.top.texts import Choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events
    from textual.binding import BindingType

    from orchestrator.cli.top.cells import Row
    from orchestrator.cli.top.frame import Frame, FrameSource
    from orchestrator.gpu.balance.view import GpuRow

COLUMNS = {"gpus": cells.GPU_COLUMNS, "jobs": cells.JOB_COLUMNS, "processes": cells.PROCESS_COLUMNS}
EMPTY = {
    "gpus": "no GPU found (orch top --simulate-gpus 2 shows an example)",
    "jobs": "no job holds a GPU or is starting",
    "processes": "no process on these GPUs",
}
LATE_SECONDS = 5.0
SCROLLBAR = 1
PARTS = "#head, #gpus, #detail, #findings, #jobs, #processes, #notes"

HELP = """\
q  ctrl+c   leave
s           sort by the next column (node, utilization, memory, power, temperature, job)
r           reverse the order
/           filter: words that node, model, job, UUID or state must contain
space       pause and resume the display
tab         move to the next table; arrows and page keys move within one
j  p        hide jobs or processes, and show them again; GPUs always stay
esc         show everything: no filter, nothing hidden
?           these keys

The line below the GPUs tells everything about the one under the cursor. LOAD and WATTS are histories, the
newest on the right: a rank that waits for others shows full utilization and few watts. UTIL of a process is
the GPU's own, where the process has it to itself. BALANCE is the spread (CV) over a job's GPUs: below 5%
excellent, below 10% good, below 20% fair, else poor. A wider terminal shows more columns.
"""


class HelpScreen(ModalScreen[None]):
    """Help with the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "app.pop_screen", "Close")]
    CSS = """
    HelpScreen { align: center middle; }
    #help-box { width: 112; max-width: 100%; height: auto; max-height: 100%; border: round $accent; padding: 0 1; }
    """

    def compose(self) -> ComposeResult:
        """Yield one box of text."""
        with VerticalScroll(id="help-box"):
            yield Static(Text(str(getattr(self.app, "HELP_TEXT", HELP))))


def has_parts(app: App[None]) -> bool:
    """Return whether the widgets exist: not under the help, nor when the program ends and its timers still run."""
    return bool(app.screen_stack) and len(app.screen.query(PARTS)) == PARTS.count("#")


class TopApp(App[None]):
    """The live view."""

    TITLE = "orch top"
    ENABLE_COMMAND_PALETTE = False
    HELP_TEXT = HELP
    SCREENS: ClassVar = {"help": HelpScreen}
    CSS = f"""
    DataTable {{ scrollbar-size: 1 {SCROLLBAR}; overflow-x: hidden; }}
    #head {{ height: auto; background: $panel; padding: 0 1; }}
    #filter {{ display: none; height: 3; }}
    #body {{ height: 1fr; }}
    #gpus {{ height: auto; max-height: 50%; }}
    #detail {{ height: auto; max-height: 3; color: $text-muted; }}
    #findings {{ height: auto; max-height: 30%; display: none; }}
    #jobs {{ height: auto; max-height: 25%; }}
    #processes {{ height: auto; min-height: 2; max-height: 1fr; }}
    .empty {{ display: none; height: 1; color: $text-muted; }}
    #notes {{ color: $warning; height: auto; max-height: 4; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Leave"),
        Binding("s", "order(False)", "Sort"),
        Binding("r", "order(True)", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("space", "hold", "Hold"),
        Binding("j", "show('jobs')", "Jobs"),
        Binding("p", "show('processes')", "Processes"),
        Binding("question_mark", "push_screen('help')", "Keys"),
        Binding("escape", "everything", show=False),
    ]

    def __init__(self, source: FrameSource, *, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._shown: Frame | None = None
        self._rows: dict[str, GpuRow] = {}
        self.choices = Choices()

    def compose(self) -> ComposeResult:
        """Yield head, filter, tables with the texts shown when they are empty, notes, keys."""
        yield Static(id="head")
        yield Input(placeholder="words to filter by", id="filter")
        with Vertical(id="body"):
            yield FittedTable("gpus", COLUMNS["gpus"])
            yield Static(id="gpus-empty", classes="empty")
            yield Static(id="detail")
            yield Static(id="findings")
            yield FittedTable("jobs", COLUMNS["jobs"])
            yield Static(id="jobs-empty", classes="empty")
            yield FittedTable("processes", COLUMNS["processes"])
            yield Static(id="processes-empty", classes="empty")
            yield Static(id="notes")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the source."""
        self.query_one("#gpus").focus()
        self._set_text("#head", Text("reading the GPUs ..."))
        self.set_interval(min(0.25, self._interval / 2), self.follow)
        self.follow()

    def on_resize(self, event: events.Resize) -> None:
        """Choose the columns for the new width."""
        del event
        self.call_after_refresh(self._draw)

    def follow(self) -> None:
        """Show the newest frame, unless the display is paused or the frame is shown already."""
        frame = self._source.frame
        if frame is not None and frame is not self._shown and not self.choices.held:
            self._shown = frame
            self._draw()
        elif self.late_seconds and not self.choices.held:
            self._draw()

    @property
    def late_seconds(self) -> float:
        """Age of the newest frame if the next one is overdue; else 0."""
        if self._shown is None:
            return 0.0
        age = time.time() - self._shown.at
        return age if age > LATE_SECONDS + 2 * self._interval else 0.0

    def _draw(self) -> None:
        frame, choices = self._shown, self.choices
        if frame is None or not has_parts(self):
            return
        rows = model.ordered(model.matching(frame.rows, choices.words), choices.order, reverse=choices.reversed)
        self._rows = {row.gpu_uuid: row for row in rows}
        gpus, jobs, processes = cells.rows_of(frame, rows)
        for name, table_rows in (("gpus", gpus), ("jobs", jobs), ("processes", processes)):
            self._fill(name, table_rows)
        self._set_text("#head", texts.head(frame, choices, shown=len(rows), late_seconds=self.late_seconds))
        found = texts.findings(frame)
        self.query_one("#findings").display = bool(found)
        self._set_text("#findings", found)
        self._detail()
        self._set_text("#notes", texts.notes(frame, rows))

    def _set_text(self, where: str, text: Text) -> None:
        self.query_one(where, Static).update(text)

    def _fill(self, name: str, rows: Sequence[Row]) -> None:
        """Fill a table, or show why it is empty instead."""
        table, empty = self.query_one(f"#{name}", FittedTable), self.query_one(f"#{name}-empty", Static)
        visible, words = name not in self.choices.hidden, self.empty_words(name)
        table.display, empty.display = visible and bool(rows), visible and not rows and bool(words)
        empty.update(Text(words))
        table.fill(rows, self.size.width - SCROLLBAR)

    def empty_words(self, name: str) -> str:
        """Return the text shown instead of a table without rows; nothing is shown for an empty text."""
        words = self.choices.words
        if name == "gpus" and words and self._shown is not None and self._shown.rows:
            return f"no GPU matches {words!r}; esc shows all {len(self._shown.rows)}"
        return EMPTY[name]

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the details of the GPU under the cursor."""
        if event.data_table.id == "gpus" and has_parts(self):
            self._detail()

    def _detail(self) -> None:
        row = self._rows.get(str(self.query_one("#gpus", FittedTable).current))
        self._set_text(
            "#detail", Text("" if row is None or self._shown is None else cells.gpu_detail(row, self._shown))
        )

    def action_order(self, turn: bool) -> None:
        """Sort by the next quantity, or reverse the order."""
        if turn:
            self.choices.reversed = not self.choices.reversed
        else:
            self.choices.order = self.choices.order.next()
        self._draw()

    def action_hold(self) -> None:
        """Pause or resume the display."""
        self.choices.held = not self.choices.held
        self._draw()
        self.follow()

    def action_show(self, name: str) -> None:
        """Show or hide jobs or processes."""
        self.choices.hidden ^= {name}
        if self.focused is self.query_one(f"#{name}"):
            self.query_one("#gpus").focus()
        self._draw()

    def action_filter(self) -> None:
        """Open the input for words to filter by."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_everything(self) -> None:
        """Clear the filter and show hidden tables."""
        field = self.query_one("#filter", Input)
        field.value, field.display, self.choices.words = "", False, ""
        self.choices.hidden.clear()
        self.query_one("#gpus").focus()
        self._draw()

    @on(Input.Changed)
    @on(Input.Submitted)
    def filter_typed(self, event: Input.Changed | Input.Submitted) -> None:
        """Filter while the words are typed; Enter keeps the filter and returns to the GPUs."""
        self.choices.words = event.value
        if isinstance(event, Input.Submitted):
            event.input.display = False
            self.query_one("#gpus").focus()
        self._draw()
