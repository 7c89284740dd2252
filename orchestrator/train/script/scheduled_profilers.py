"""Finds a torch.profiler with a `schedule` that the script has started: torch's own flag does not show one that waits or warms up."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.profiler import profile

_LOOK_AHEAD: Final = 1000
"""Number of coming steps in which torch's own schedule must do nothing. A script may count several for one step of the loop."""


class ScheduledProfilers:
    """Scheduled profilers that this process started. A call walks over all objects, about 0.1 s, unless the last match still matches."""

    def __init__(self) -> None:
        self._last: weakref.ref[profile] | None = None

    def any_ahead(self) -> bool:
        """Whether a started profiler records, prepares to, or will do so by itself within the coming steps."""
        return self._find(_is_ahead)

    def any_prepared(self) -> bool:
        """Whether a profiler has prepared to record. Ending another profiler now also ends that one, and the process crashes at its end."""
        return self._find(_is_prepared)

    def _find(self, matches: Callable[[profile], bool]) -> bool:
        last = self._last() if self._last is not None else None
        if last is None or not matches(last):
            last = next(filter(matches, _started()), None)
        self._last = None if last is None else weakref.ref(last)
        return last is not None


def _started() -> list[profile]:
    from torch.profiler import profile

    # Not isinstance(): it reads the object's __class__, which runs code of a proxy.
    found = [each for each in gc.get_objects() if profile in type.mro(type(each))]
    return [each for each in found if getattr(each, "step_rec_fn", None) is not None]  # set from start to stop


def _is_prepared(found: profile) -> bool:
    from torch.profiler import ProfilerAction

    return found.step_rec_fn is not None and found.current_action is ProfilerAction.WARMUP


def _is_ahead(found: profile) -> bool:
    from torch.profiler import ProfilerAction, schedule

    if found.step_rec_fn is None:
        return False
    if getattr(found.schedule, "__code__", None) is not schedule(wait=1, warmup=1, active=1).__code__:
        return True  # any other function may count how often it is called
    ahead = range(found.step_num, found.step_num + _LOOK_AHEAD)
    return any(found.schedule(step) is not ProfilerAction.NONE for step in ahead)
