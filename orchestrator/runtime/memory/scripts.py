"""What the ranks of a job do, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, for the runtime's purposes. Times are seconds.

    ``seconds`` is how long a rank takes from step 0 to its end; None: until something ends it. An attempt that resumes from
    a checkpoint takes what is left of it. ``save_every`` has rank 0 save a checkpoint that often. ``stop_takes`` is what a
    rank needs from SIGTERM to its end; None: it ignores SIGTERM.
    """

    seconds: float | None = None
    exit_code: int = 0
    save_every: float | None = None
    stop_takes: float | None = 0.0
    stop_exit_code: int = 0
