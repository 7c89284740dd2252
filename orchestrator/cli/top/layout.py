"""Chooses the columns of a table of `orch top` for a width, and their widths; texts that identify a row are never cut.

A column of rank 0 takes the width of its widest cell. The others follow in the order of their rank as long as they fit;
the remaining width goes to the columns that grow: bars, histories, names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GAP = 1
"""Blank characters after each column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumn:
    """A column: its key and heading, and its part in the distribution of the width.

    `rank` 0 is always shown, in the width of its widest cell; higher ranks follow if there is room. `grows` takes the
    remaining width, up to `most`; `least` is the least width of such a column. A text that is longer than its column
    loses its middle, or, with `cut_end`, its end.
    """

    key: str
    heading: str
    rank: int = 0
    right: bool = False
    grows: bool = False
    least: int = 0
    most: int = 0
    cut_end: bool = False


def widths(columns: Sequence[TopColumn], needs: Mapping[str, int], width: int) -> dict[str, int]:
    """Return the chosen columns with their widths, in the order of `columns`.

    `needs` is the width of each column's widest cell; a column without an entry is empty and is left out, unless
    its rank is 0.
    """
    chosen: dict[str, int] = {}
    left = width
    for column in sorted(columns, key=lambda one: one.rank):
        if column.rank and column.key not in needs:
            continue
        wanted = max(column.least if column.grows else needs.get(column.key, 0), len(column.heading))
        if column.rank and wanted + GAP > left:
            continue
        chosen[column.key] = wanted
        left -= wanted + GAP
    for column in sorted((one for one in columns if one.grows and one.key in chosen), key=lambda one: one.rank):
        more = max(0, min(left, column.most - chosen[column.key]))
        chosen[column.key] += more
        left -= more
    if left < 0:
        _narrow(columns, chosen, -left)
    return {column.key: chosen[column.key] for column in columns if column.key in chosen}


def _narrow(columns: Sequence[TopColumn], chosen: dict[str, int], over: int) -> None:
    """Take the excess width from the columns that grow; no other column may be cut."""
    for column in reversed(columns):
        if column.grows and column.key in chosen:
            less = min(over, max(0, chosen[column.key] - len(column.heading)))
            chosen[column.key] -= less
            over -= less


def fitted(text: str, width: int, *, right: bool = False, cut_end: bool = False) -> str:
    """Return the text in exactly this width, with the gap after it; the middle or end of a longer text is left out."""
    if len(text) > width:
        kept = max(0, width - 1)
        tail = 0 if cut_end else kept // 2
        text = (text[: kept - tail] + "…" + (text[-tail:] if tail else ""))[:width]
    return (text.rjust(width) if right else text.ljust(width)) + " " * GAP
