"""Reads from a rank's progress page which collective it has entered last. The content is untrusted: invalid values count as none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.health import Entered
from orchestrator.train.script import progress_layout as layout

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME: Final = re.compile(rb"[a-z_]{1,24}")
_MOST: Final = 2**53


def entered_call(head: bytes, pid: int) -> Entered | None:
    """Return the newest call of process ``pid``, from the page's first bytes; None where no or another process has noted one."""
    if len(head) < layout.HOT.offset:
        return None
    writer, number, group, name, label = layout.ENTERED.unpack_from(head, layout.ENTERED_AT)
    name, label = name.rstrip(b"\0"), label.rstrip(b"\0").decode(errors="replace")
    if (
        writer != pid
        or not 0 < number < _MOST
        or _NAME.fullmatch(name) is None
        or not (label.isprintable() or not label)
    ):
        return None
    counts = {**_counts(head), group: number}
    return Entered(name=name.decode(), number=number, group=group, label=label, counts=counts)


def _counts(head: bytes) -> Mapping[int, int]:
    rows = (
        layout.GROUP.unpack_from(head, layout.GROUPS_AT + place * layout.GROUP.size)
        for place in range(layout.MAX_GROUPS)
    )
    return {group: number for group, number in rows if 0 < number < _MOST}
