"""A table of `orch top` that fits its columns to a width."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import DataTable

from orchestrator.cli.top.layout import GAP, fitted, widths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.cli.top.cells import Row, Styled
    from orchestrator.cli.top.layout import TopColumn


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
