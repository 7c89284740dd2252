"""Finds the best value of a metric that each job has reported, from new lines of its ``metrics.jsonl``."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.daemon.jobs.metrics_file import values_since

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEPT_JOBS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Reported:
    """The best and the last value so far, and how far the file was read."""

    best: float | None = None
    last: float | None = None
    offset: int = 0


class BestValues:
    """Reads each line of a file once. For one thread at a time."""

    def __init__(self, path_of: Callable[[str], Path], kept: int = KEPT_JOBS) -> None:
        self._path_of = path_of
        self._kept = kept
        self._known: OrderedDict[tuple[str, str], Reported] = OrderedDict()

    def of(self, job_id: str, metric: str, *, highest: bool) -> Reported:
        """Return what the job has reported; nothing where it has no file, or one that is not orch's."""
        stop_if_abandoned()
        key = (job_id, metric)
        path = self._path_of(job_id)
        known = self._known.get(key)
        if known is None:  # a long run's file was rotated: the older lines come first
            known = self._read(path.with_name(f"{path.name}.1"), metric, Reported(), highest=highest)
            known = Reported(known.best, known.last)
        self._known[key] = found = self._read(path, metric, known, highest=highest)
        self._known.move_to_end(key)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
        return found

    @staticmethod
    def _read(path: Path, metric: str, known: Reported, *, highest: bool) -> Reported:
        try:
            values, offset = values_since(path, metric, known.offset)
        except OSError:
            return known
        if not values:
            return Reported(known.best, known.last, offset)
        choose = max if highest else min
        return Reported(choose(values if known.best is None else [known.best, *values]), values[-1], offset)
