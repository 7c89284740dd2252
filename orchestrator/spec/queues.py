"""The configured queues of an installation: a table that is checked as a whole, with every error at once.

``ORCH_QUEUES`` holds it as text, a queue after the other: ``lab guaranteed=8 maximum=16; vision parent=lab weight=2``.
Standard library only: the settings read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_GPUS: Final = 1_000_000
MAX_WEIGHT: Final = 1_000_000
MAX_QUEUES: Final = 1000
MAX_LEVELS: Final = 8
DEFAULT_QUEUE: Final = "default"
"""The queue of a job that names none. It exists whether it is configured or not."""
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?")
_WHOLE = re.compile(r"[0-9]{1,7}")
_NUMBER = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A queue. Its ``guaranteed`` GPUs are served before others borrow; ``maximum`` is never exceeded, None: no limit.

    Free GPUs beyond the guarantees are shared between queues of one ``parent`` ("" for top-level queues) by ``weight``.
    """

    name: str
    parent: str = ""
    guaranteed: int = 0
    maximum: int | None = None
    weight: float = 1.0


def parse_queues(text: str) -> tuple[QueueSpec, ...]:
    """Parse a table. Raises ValueError with every error in it."""
    problems: list[str] = []
    found = [_parse_one(part.split(), problems) for part in text.split(";") if part.strip()]
    queues = tuple(queue for queue in found if queue is not None)
    problems += queue_problems(queues)
    if problems:
        raise ValueError("; ".join(problems))
    return queues


def _parse_one(words: list[str], problems: list[str]) -> QueueSpec | None:
    queue = QueueSpec(name=words[0])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("parent", "guaranteed", "maximum", "weight"):
            problems.append(f"queue {words[0]!r}: {word!r} is not parent=, guaranteed=, maximum= or weight=")
        elif key == "parent":
            queue = replace(queue, parent=value)
        elif key == "weight":
            if not _NUMBER.fullmatch(value):
                problems.append(f"queue {words[0]!r}: weight={value} is not a number")
            else:
                queue = replace(queue, weight=float(value))
        elif not _WHOLE.fullmatch(value):
            problems.append(f"queue {words[0]!r}: {key}={value} is not a whole number of GPUs")
        elif key == "guaranteed":
            queue = replace(queue, guaranteed=int(value))
        else:
            queue = replace(queue, maximum=int(value))
    return queue


def queue_problems(queues: Sequence[QueueSpec]) -> list[str]:
    """Return the errors of a table, one text each; none when it is valid."""
    problems = [f"more than {MAX_QUEUES} queues"] if len(queues) > MAX_QUEUES else []
    known: dict[str, QueueSpec] = {}
    for queue in queues:
        if queue.name in known:
            problems.append(f"queue {queue.name!r} is there twice")
        known[queue.name] = queue
        problems += _own_problems(queue)
    for queue in known.values():
        if queue.parent and queue.parent not in known:
            problems.append(f"queue {queue.name!r}: its parent {queue.parent!r} is not a queue")
        elif len(path := _path(queue, known)) > MAX_LEVELS:
            problems.append(f"queue {queue.name!r}: more than {MAX_LEVELS} levels, or a parent below itself: {path}")
    return problems or _sum_problems(known)


def _own_problems(queue: QueueSpec) -> list[str]:
    label = f"queue {queue.name!r}"
    problems = []
    if not _NAME.fullmatch(queue.name):
        problems.append(f"{label}: a name has lower-case letters, digits and dashes, at most 50")
    if not 0 <= queue.guaranteed <= MAX_GPUS:
        problems.append(f"{label}: guaranteed={queue.guaranteed} is not from 0 to {MAX_GPUS}")
    if queue.maximum is not None and not 0 <= queue.maximum <= MAX_GPUS:
        problems.append(f"{label}: maximum={queue.maximum} is not from 0 to {MAX_GPUS}")
    if queue.maximum is not None and queue.guaranteed > queue.maximum:
        problems.append(f"{label}: guaranteed={queue.guaranteed} is more than maximum={queue.maximum}")
    if not 0 < queue.weight <= MAX_WEIGHT:
        problems.append(f"{label}: weight={queue.weight:g} is not above 0 and at most {MAX_WEIGHT}")
    return problems


def _path(queue: QueueSpec, known: dict[str, QueueSpec]) -> str | list[str]:
    names = [queue.name]
    parent = known.get(queue.parent)
    while parent is not None and len(names) <= MAX_LEVELS:
        names.append(parent.name)
        parent = known.get(parent.parent)
    return names


def _sum_problems(known: dict[str, QueueSpec]) -> list[str]:
    problems = []
    for queue in known.values():
        below = [child for child in known.values() if child.parent == queue.name]
        promised = sum(guarantee(child, known.values()) for child in below)
        if promised > (inf if queue.maximum is None else queue.maximum):
            problems.append(
                f"queue {queue.name!r}: the queues below it are guaranteed {promised} GPUs, more than its"
                f" maximum={queue.maximum}"
            )
        if queue.name == DEFAULT_QUEUE and below:
            problems.append(f"queue {DEFAULT_QUEUE!r} takes the jobs that name none: no queue can be below it")
    return problems


def guarantee(queue: QueueSpec, queues: Iterable[QueueSpec]) -> int:
    """Return the GPUs guaranteed to a queue: its own number, or the sum of its children's where that is more."""
    table = list(queues)
    return max(queue.guaranteed, sum(guarantee(child, table) for child in table if child.parent == queue.name))
