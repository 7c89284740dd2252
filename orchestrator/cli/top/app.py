"""The screen of `orch top`: GPUs, findings, jobs and processes that follow the newest frame, and the keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from orchestrator.cli.console import clean
from orchestrator.cli.top import cells, model
from orchestrator.cli.top.layout import GAP, fitted, widths
from orchestrator.cli.top.model import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual import events
    from textual.binding import BindingType

    from orchestrator.cli.top.cells import Styled
    from orchestrator.cli.top.frame import Frame, FrameSource
    from orchestrator.cli.top.layout import TopColumn
    from orchestrator.gpu.balance.view import GpuRow

    Row = tuple[str, Mapping[str, Styled], Mapping[str, tuple[Callable[[int], str], str]]]

COLUMNS = {"gpus": cells.GPU_COLUMNS, "jobs": cells.JOB_COLUMNS, "processes": cells.PROCESS_COLUMNS}
EMPTY = {
    "gpus": "no GPU found (orch top --simulate-gpus 2 shows what they would look like)",
    "jobs": "no job holds a GPU or is starting",
    "processes": "no process on these GPUs",
}
MOST_FINDINGS = 6
LATE_SECONDS = 5.0
SCROLLBAR = 1

HELP = """\
q  ctrl+c   leave
s           sort by the next column (node, utilization, memory, power, temperature, job)
r           turn the order around
/           filter: words that node, model, job, UUID or state must contain
space       hold the picture still, and let it go on
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
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "app.pop_screen", "Close")]
    CSS = """
    HelpScreen { align: center middle; }
    #help-box { width: 112; max-width: 100%; height: auto; max-height: 100%; border: round $accent; padding: 0 1; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """One box of text."""
        with VerticalScroll(id="help-box"):
            yield Static(Text(self._text))


class TopApp(App[None]):
    """The live view."""

    TITLE = "orch top"
    ENABLE_COMMAND_PALETTE = False
    HELP_TEXT = HELP
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
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("space", "hold", "Hold"),
        Binding("j", "show('jobs')", "Jobs"),
        Binding("p", "show('processes')", "Processes"),
        Binding("question_mark", "help", "Keys"),
        Binding("escape", "everything", show=False),
    ]

    def __init__(self, source: FrameSource, *, interval: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval = interval
        self._shown: Frame | None = None
        self._held = False
        self._hidden: set[str] = set()
        self._widths: dict[str, dict[str, int]] = {}
        self._rows: dict[str, GpuRow] = {}
        self.order = Order.PLACE
        self.reversed = False
        self.words = ""

    def compose(self) -> ComposeResult:
        """Head, filter, tables with what stands in their place when they are empty, notes, keys."""
        yield Static(id="head")
        yield Input(placeholder="words to filter by", id="filter")
        with Vertical(id="body"):
            yield from self._table_and_words("gpus")
            yield Static(id="detail")
            yield Static(id="findings")
            yield from self._table_and_words("jobs")
            yield from self._table_and_words("processes")
            yield Static(id="notes")
        yield Footer()

    def _table_and_words(self, name: str) -> ComposeResult:
        yield DataTable(id=name, cursor_type="row", zebra_stripes=False, cell_padding=0)
        yield Static(id=f"{name}-empty", classes="empty")

    def on_mount(self) -> None:
        """Begin to follow the source."""
        self._table("gpus").focus()
        self._say("#head", Text("looking at the GPUs ..."))
        self.set_interval(min(0.25, self._interval / 2), self.follow)
        self.follow()

    def on_resize(self, event: events.Resize) -> None:
        """Choose the columns for the new width."""
        del event
        self.call_after_refresh(self._draw)

    def _table(self, name: str) -> DataTable[Text]:
        table: DataTable[Text] = self.query_one(f"#{name}", DataTable)
        return table

    def _say(self, where: str, text: Text) -> None:
        self.query_one(where, Static).update(text)

    def follow(self) -> None:
        """Show the newest frame, unless the picture is held or it is shown already."""
        frame = self._source.frame
        if frame is not None and frame is not self._shown and not self._held:
            self._shown = frame
            self._draw()
        elif self._shown is not None and self.late_seconds and not (self._held or isinstance(self.screen, ModalScreen)):
            self._say("#head", self._head(self._shown))

    @property
    def late_seconds(self) -> float:
        """How long the newest frame has been overdue; 0 while they come in time."""
        if self._shown is None:
            return 0.0
        age = time.time() - self._shown.at
        return age if age > LATE_SECONDS + 2 * self._interval else 0.0

    def _draw(self) -> None:
        frame = self._shown
        if frame is None or isinstance(self.screen, ModalScreen):
            return
        rows = model.ordered(model.matching(frame.rows, self.words), self.order, reverse=self.reversed)
        self._rows = {row.gpu_uuid: row for row in rows}
        several = len({row.node for row in frame.rows}) > 1
        self._fill(
            "gpus",
            [
                (row.gpu_uuid, _of_several(cells.gpu_cells(row, frame), several), cells.gpu_drawings(row, frame))
                for row in rows
            ],
        )
        self._fill("jobs", [(line.job.id, cells.job_cells(line), {}) for line in frame.jobs])
        lines = [line for line in frame.processes if not line.gpu_uuid or line.gpu_uuid in self._rows]
        self._fill(
            "processes",
            [
                (f"{line.gpu_uuid}/{line.node}/{line.pid}", _of_several(cells.process_cells(line), several), {})
                for line in lines
            ],
        )
        self._say("#head", self._head(frame))
        self._findings(frame)
        self._detail()
        notes = [*frame.problems, *(f"{cells.gpu_name(row)}: {row.problem}" for row in rows if row.problem)]
        self._say("#notes", Text("\n".join(clean(note) for note in notes)))

    def _head(self, frame: Frame) -> Text:
        text = Text(f"{time.strftime('%H:%M:%S', time.localtime(frame.at))}  {model.headline(frame)}")
        if self.late_seconds:
            text.append(f"  nothing new for {self.late_seconds:.0f} s", "reverse")
        second = [frame.title] if frame.title else []
        if frame.host is not None:
            second.append(model.host_line(frame.host))
        if self.order is not Order.PLACE or self.reversed:
            second.append(f"by {self.order.value}{' (turned)' if self.reversed else ''}")
        text.append("\n" + "  ".join(second), "bright_black")
        if self.words:
            text.append(f"  filter: {clean(self.words)} ({len(self._rows)} of {len(frame.rows)})", "yellow")
        if self._hidden:
            text.append(f"  hidden: {', '.join(sorted(self._hidden))} (esc shows all)", "yellow")
        if self._held:
            text.append("  held", "reverse")
        return text

    def _findings(self, frame: Frame) -> None:
        found = model.findings_of(frame)
        text = Text()
        for severity, line in found[:MOST_FINDINGS]:
            text.append(f"{severity}: ", "bold red" if severity == "critical" else "bold yellow")
            text.append(clean(line) + "\n")
        if len(found) > MOST_FINDINGS:
            text.append(f"and {model.counted(len(found) - MOST_FINDINGS, 'more finding')}: orch status JOB\n")
        text.rstrip()
        shown = self.query_one("#findings", Static)
        shown.display = bool(found)
        shown.update(text)

    def _fill(self, name: str, rows: Sequence[Row]) -> None:
        """Write a table anew in the width of the screen, the cursor staying on the row that it was on."""
        table, empty = self._table(name), self.query_one(f"#{name}-empty", Static)
        visible = name not in self._hidden
        words = self.empty_words(name)
        table.display, empty.display = visible and bool(rows), visible and not rows and bool(words)
        empty.update(Text(words))
        columns = COLUMNS[name]
        needs: dict[str, int] = {}
        for _, shown, drawn in rows:
            needs |= {key: max(len(cell[0]), needs.get(key, 0)) for key, cell in shown.items()}
            needs |= {key: max(1, needs.get(key, 0)) for key in drawn}
        chosen = widths([_grown(column, needs) for column in columns], needs, self.size.width - SCROLLBAR)
        texts = [(key, _texts(columns, chosen, shown, drawn)) for key, shown, drawn in rows]
        keys = [key for key, *_ in rows]
        if self._widths.get(name) == chosen and [str(key.value) for key in table.rows] == keys:
            for key, line in texts:
                for place, text in zip(chosen, line, strict=True):
                    if table.get_cell(key, place) != text:
                        table.update_cell(key, place, text)
            return
        current = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None
        table.clear(columns=True)
        for column in columns:
            if column.key in chosen:
                heading = Text(fitted(column.heading, chosen[column.key], right=column.right))
                table.add_column(heading, key=column.key, width=chosen[column.key] + GAP)
        for key, line in texts:
            table.add_row(*line, key=key)
        self._widths[name] = chosen
        if current in keys:
            table.move_cursor(row=keys.index(str(current)))

    def empty_words(self, name: str) -> str:
        """What stands in the place of a table without rows; nothing when it is empty."""
        if name == "gpus" and self.words and self._shown is not None and self._shown.rows:
            return f"no GPU matches {self.words!r}; esc shows all {len(self._shown.rows)}"
        return EMPTY[name]

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another GPU is under the cursor."""
        if event.data_table.id == "gpus":
            self._detail()

    def _detail(self) -> None:
        table, text = self._table("gpus"), ""
        if table.row_count and self._shown is not None:
            key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
            row = self._rows.get(str(key))
            text = "" if row is None else cells.gpu_detail(row, self._shown)
        self._say("#detail", Text(text))

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
        """Show or hide jobs or processes."""
        self._hidden ^= {name}
        if name in self._hidden and self.focused is self._table(name):
            self._table("gpus").focus()
        self._draw()

    def action_filter(self) -> None:
        """Ask for words to filter by."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_everything(self) -> None:
        """Forget the filter and show what was hidden."""
        field = self.query_one("#filter", Input)
        field.value, field.display, self.words = "", False, ""
        self._hidden.clear()
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
        self.push_screen(HelpScreen(self.HELP_TEXT))


def _of_several(shown: dict[str, Styled], several: bool) -> dict[str, Styled]:
    """Without the node's name where there is only one."""
    return shown if several else {key: cell for key, cell in shown.items() if key != "node"}


def _grown(column: TopColumn, needs: Mapping[str, int]) -> TopColumn:
    """A column that is always shown begins at the width of its widest cell, and grows no further."""
    from dataclasses import replace

    if column.rank or not column.grows:
        return column
    need = needs.get(column.key, 0)
    return replace(column, least=min(need, column.least) if column.least else need, most=need)


def _texts(
    columns: Sequence[TopColumn],
    chosen: Mapping[str, int],
    shown: Mapping[str, Styled],
    drawn: Mapping[str, tuple[Callable[[int], str], str]],
) -> list[Text]:
    texts = []
    for column in columns:
        if column.key not in chosen:
            continue
        width = chosen[column.key]
        if column.key in drawn:
            draw, style = drawn[column.key]
            texts.append(Text(fitted(draw(width), width), style))
        else:
            text, style = shown.get(column.key, ("", ""))
            texts.append(Text(fitted(text, width, right=column.right, cut_end=column.cut_end), style))
    return texts
