"""Training scripts as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, for the runtime's purposes. Times are seconds.

    ``seconds`` is how long a rank takes from step 0 to its end; None: until it is ended. A resumed attempt takes the
    rest. ``save_every`` is the interval of rank 0's saves. ``stop_takes`` is the time from SIGTERM to a rank's end;
    None: it ignores SIGTERM. Its outputs take ``collect_seconds`` to be copied home; 0: it has none.
    """

    seconds: float | None = None
    exit_code: int = 0
    save_every: float | None = None
    stop_takes: float | None = 0.0
    stop_exit_code: int = 0
    collect_seconds: float = 0.0
