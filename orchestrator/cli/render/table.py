"""Tables and bars in plain text: aligned, coloured by cell, narrowed by leaving out the least important columns.

Not rich's: its import takes longer than most commands, and its tables only cut cells where a terminal is narrow.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from orchestrator.cli.console import clean, clip, display_width
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.cli.console import Console, Glyphs
    from orchestrator.cli.session import Session


GAP = 2
Item = TypeVar("Item")
Styles = tuple[str, ...]


class Cell(NamedTuple):
    """A text and its styles."""

    text: str
    styles: Styles = ()


class Column(NamedTuple, Generic[Item]):
    """A column: its title, and what it shows of an item: a cell, or a value as text in ``styles``; None is empty.

    ``weight`` is its importance (the lowest is left out first), ``right`` aligns numbers. A column that may ``shrink``
    is clipped, down to ``least`` characters, before any other is left out.
    """

    title: str
    value: Callable[[Item], Any]
    weight: int = 100
    right: bool = False
    shrink: bool = False
    least: int = 12
    styles: Styles = ()

    def cell(self, item: Item) -> Cell:
        """Return the item's cell, on one line and without control characters, which a text of another user may have."""
        value = self.value(item)
        text, styles = value if isinstance(value, Cell) else ("" if value is None else str(value), self.styles)
        return Cell(clean(text), styles)


def render_table(console: Console, columns: Sequence[Column[Item]], items: Sequence[Item]) -> list[str]:
    """Return the table's lines, the head first; none without items. Empty columns are left out."""
    if not items:
        return []
    rows = [[column.cell(item) for column in columns] for item in items]
    titles = [Cell(clean(column.title), ("dim",)) for column in columns]
    shown = [i for i in range(len(columns)) if any(row[i].text for row in rows)]
    widths = {i: max(display_width(row[i].text) for row in (titles, *rows)) for i in shown}
    shown, widths = _fit(columns, shown, widths, console.width)
    return [_line(console, row, columns, shown, widths) for row in (titles, *rows)]


def _fit(
    columns: Sequence[Column[Item]], shown: list[int], widths: dict[int, int], room: int
) -> tuple[list[int], dict[int, int]]:
    while True:
        excess = sum(widths[i] for i in shown) + GAP * (len(shown) - 1) - room
        elastic = next((i for i in shown if columns[i].shrink), None)
        if excess <= 0:
            return shown, widths
        if elastic is not None and widths[elastic] - excess >= columns[elastic].least:
            return shown, {**widths, elastic: widths[elastic] - excess}
        if len(shown) == 1:
            return shown, {shown[0]: max(1, room)}
        dropped = min(shown, key=lambda i: columns[i].weight)
        shown = [i for i in shown if i != dropped]


def _line(
    console: Console,
    cells: Sequence[Cell],
    columns: Sequence[Column[Item]],
    shown: Sequence[int],
    widths: dict[int, int],
) -> str:
    parts = []
    for i in shown:
        text = clip(cells[i].text, widths[i], console.glyphs.ellipsis)
        padding = " " * (widths[i] - display_width(text))
        painted = console.style(text, *cells[i].styles) if text else text
        parts.append(padding + painted if columns[i].right else painted + padding)
    return (" " * GAP).join(parts).rstrip()


def bar(fraction: float, width: int, glyphs: Glyphs) -> str:
    """Return a progress bar of ``width`` columns."""
    filled = min(max(fraction, 0.0), 1.0) * width
    text = glyphs.full * int(filled)
    steps = len(glyphs.parts) + 1
    if glyphs.parts and (part := int((filled - int(filled)) * steps)):
        text += glyphs.parts[part - 1]
    return text + glyphs.empty * (width - len(text))


class Bar:
    """Progress on one line of a terminal; prints nothing if standard error is none."""

    def __init__(self, session: Session, total: int) -> None:
        self._shown = sys.stderr.isatty() and not session.console.quiet
        self._session, self._total, self._done, self._name = session, total, 0, ""

    def show(self, name: str) -> None:
        """Show the name of the file that is transferred next."""
        self._name = name
        self.add(0)

    def add(self, count: int) -> None:
        """Add ``count`` transferred bytes."""
        self.at(self._done + count, self._name)

    def at(self, done: int, name: str) -> None:
        """Set the transferred bytes, and the name of the present file."""
        self._done, self._name = done, name
        if self._shown:
            share = min(1.0, self._done / self._total) if self._total else 1.0
            text = f"{share:4.0%} of {size(self._total)}  {clean(self._name)}"
            sys.stderr.write(f"\r\x1b[K{text[: max(20, min(self._session.console.width, 200) - 1)]}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
