"""Screens of `orch top` and `orch replay`: tables, the lines around them, and the keys."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from orchestrator.cli.console import clean
from orchestrator.cli.top import cells
from orchestrator.cli.top.cells import GAP, Order, fitted, widths
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from textual import events
    from textual.binding import BindingType

    from orchestrator.cli.top.cells import Row, Styled, TopColumn
    from orchestrator.cli.top.frames import Frame, FrameSource
    from orchestrator.cli.top.player import Player
    from orchestrator.gpu.row import GpuRow


MAX_FINDINGS = 6


@dataclass(slots=True)
class Choices:
    """Choices made by keys: order, filter, hidden tables, whether the display is paused."""

    order: Order = Order.PLACE
    reversed: bool = False
    words: str = ""
    held: bool = False
    hidden: set[str] = field(default_factory=set)


def head(frame: Frame, choices: Choices, *, shown: int, late_seconds: float) -> Text:
    """Return two lines: the cluster, then the host and the choices. `shown` is the number of GPUs that match."""
    text = Text(f"{time.strftime('%H:%M:%S', time.localtime(frame.at))}  {cells.headline(frame)}")
    if late_seconds:
        text.append(f"  nothing new for {late_seconds:.0f} s", "reverse")
    second = [frame.title] if frame.title else []
    if frame.host is not None:
        second.append(cells.host_line(frame.host))
    if choices.order is not Order.PLACE or choices.reversed:
        second.append(f"by {choices.order.value}{' (turned)' if choices.reversed else ''}")
    text.append("\n" + "  ".join(second), "bright_black")
    if choices.words:
        text.append(f"  filter: {clean(choices.words)} ({shown} of {len(frame.rows)})", "yellow")
    if choices.hidden:
        text.append(f"  hidden: {', '.join(sorted(choices.hidden))} (esc shows all)", "yellow")
    if choices.held:
        text.append("  held", "reverse")
    return text


def findings(frame: Frame) -> Text:
    """Return the open findings, the severity as a word before each; empty without any."""
    found = cells.findings_of(frame)
    text = Text()
    for severity, line in found[:MAX_FINDINGS]:
        text.append(f"{severity}: ", "bold red" if severity == "critical" else "bold yellow")
        text.append(clean(line) + "\n")
    if len(found) > MAX_FINDINGS:
        text.append(f"and {plural(len(found) - MAX_FINDINGS, 'more finding')}: orch status JOB\n")
    text.rstrip()
    return text


def notes(frame: Frame, rows: Iterable[GpuRow]) -> Text:
    """Return the problems of the reading and of the GPUs that are shown."""
    lines = [*frame.problems, *(f"{cells.gpu_name(row)}: {row.problem}" for row in rows if row.problem)]
    return Text("\n".join(clean(note) for note in lines))


class FittedTable(DataTable[Text]):
    """Table of rows by key; the cursor stays on its row when rows are added, removed or reordered."""

    def __init__(self, name: str, columns: Sequence[TopColumn]) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=False, cell_padding=0)
        self._all = columns
        self.chosen: dict[str, int] = {}

    @property
    def current(self) -> str | None:
        """Key of the row under the cursor; None without rows."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def fill(self, rows: Sequence[Row], width: int) -> None:
        """Show these rows in this width."""
        needs: dict[str, int] = {}
        for _, shown, drawn in rows:
            needs |= {key: max(len(cell[0]), needs.get(key, 0)) for key, cell in shown.items()}
            needs |= {key: max(1, needs.get(key, 0)) for key in drawn}
        chosen = widths([_natural(column, needs) for column in self._all], needs, width)
        texts = [(key, self._texts(chosen, shown, drawn)) for key, shown, drawn in rows]
        keys = [key for key, _ in texts]
        if self.chosen == chosen and [str(key.value) for key in self.rows] == keys:
            for key, line in texts:
                for place, text in zip(chosen, line, strict=True):
                    if self.get_cell(key, place) != text:
                        self.update_cell(key, place, text)
            return
        current = self.current
        self.clear(columns=True)
        for column in self._all:
            if column.key in chosen:
                heading = Text(fitted(column.heading, chosen[column.key], right=column.right))
                self.add_column(heading, key=column.key, width=chosen[column.key] + GAP)
        for key, line in texts:
            self.add_row(*line, key=key)
        self.chosen = chosen
        if current in keys:
            self.move_cursor(row=keys.index(str(current)))

    def _texts(
        self,
        chosen: Mapping[str, int],
        shown: Mapping[str, Styled],
        drawn: Mapping[str, tuple[Callable[[int], str], str]],
    ) -> list[Text]:
        texts = []
        for column in self._all:
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


def _natural(column: TopColumn, needs: Mapping[str, int]) -> TopColumn:
    """Return the column; if always shown and growing, limit it to the width of its widest cell."""
    if column.rank or not column.grows:
        return column
    need = needs.get(column.key, 0)
    return replace(column, least=min(need, column.least) if column.least else need, most=need)


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
        rows = cells.ordered(cells.matching(frame.rows, choices.words), choices.order, reverse=choices.reversed)
        self._rows = {row.gpu_uuid: row for row in rows}
        gpus, jobs, processes = cells.rows_of(frame, rows)
        for name, table_rows in (("gpus", gpus), ("jobs", jobs), ("processes", processes)):
            self._fill(name, table_rows)
        self._set_text("#head", head(frame, choices, shown=len(rows), late_seconds=self.late_seconds))
        found = findings(frame)
        self.query_one("#findings").display = bool(found)
        self._set_text("#findings", found)
        self._detail()
        self._set_text("#notes", notes(frame, rows))

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


SKIP_SECONDS = 10.0
FAR_SECONDS = 60.0

KEYS = """\
space       pause, and play; at the end, play again
+  -        faster, slower
.  ,        one sample on, one back (pauses)
right left  ten seconds on, ten seconds back; ] and [ a minute
0  $        to the beginning, to the end

"""


class ReplayApp(TopApp):
    """Screen that plays a recording."""

    TITLE = "orch replay"
    HELP_TEXT = KEYS + "\n".join(line for line in HELP.splitlines() if not line.startswith("space"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "play", "Play", priority=True),
        Binding("plus", "faster(1)", "Faster"),
        Binding("minus", "faster(-1)", "Slower"),
        Binding("full_stop", "step(1)", "Step"),
        Binding("comma", "step(-1)", show=False),
        Binding("right", f"skip({SKIP_SECONDS})", show=False, priority=True),
        Binding("left", f"skip({-SKIP_SECONDS})", show=False, priority=True),
        Binding("right_square_bracket", f"skip({FAR_SECONDS})", show=False),
        Binding("left_square_bracket", f"skip({-FAR_SECONDS})", show=False),
        Binding("0", "seek(0)", show=False),
        Binding("dollar_sign", "end", "End"),
    ]

    def __init__(self, player: Player) -> None:
        super().__init__(player, interval=0.2)
        self._player = player

    @property
    def late_seconds(self) -> float:
        """Always 0: a recording is never late."""
        return 0.0

    def empty_words(self, name: str) -> str:
        """Return the text for GPUs only: a recording has no jobs or processes."""
        return super().empty_words(name) if name == "gpus" else ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable space and arrows while the filter is typed."""
        del parameters
        typing = self.focused is not None and self.focused.id == "filter"
        return not (typing and action in {"play", "skip"})

    def action_play(self) -> None:
        """Pause or play."""
        self._player.toggle()
        self.follow()

    def action_faster(self, direction: int) -> None:
        """Change the speed."""
        self._player.faster(direction)
        self.follow()

    def action_step(self, direction: int) -> None:
        """Go to the next or the previous sample."""
        self._player.step(direction)
        self.follow()

    def action_skip(self, seconds: float) -> None:
        """Go forward, or back for negative ``seconds``."""
        self._player.skip(seconds)
        self.follow()

    def action_seek(self, position: float) -> None:
        """Go to a position."""
        self._player.seek(position)
        self.follow()

    def action_end(self) -> None:
        """Go to the end."""
        self._player.seek(self._player.end)
        self.follow()
