"""Facts with values that an honest rank never writes: wrong types, numbers out of range, very long texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from tests.support.records import replace

if TYPE_CHECKING:
    import random

    from orchestrator.core.job.record import Job

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    2**70,
    1e300,
    -1e300,
    float("inf"),
    float("nan"),
    "",
    "x" * (2**20 + 1),
    "\ud800",
    "\x1b[2J",
    b"\0",
    [1],
    (),
    ((1,),),
    {},
    {"a": float("inf")},
    object,
)
OWN = frozenset({"job_id", "attempt", "gang", "at", "cause", "rank"})
"""Fields that the daemon fills in, not the rank."""


def hostile(job: Job, now: float, dice: random.Random) -> tuple[ev.Event, str]:
    """Return a fact of the job with one wrong value, and a description of that value."""
    fact = dice.choice(_facts(job, now))
    inner = fact.exit if isinstance(fact, ev.RankExited) else fact
    field = dice.choice([name for name in inner.__struct_fields__ if name not in OWN])
    value = dice.choice(VALUES[4:] if field == "exit_code" else VALUES)  # 0 is a valid exit code
    wrong = replace(inner, **{field: value})
    name = f"{field}={value!r:.40}"
    return (replace(fact, exit=wrong) if isinstance(fact, ev.RankExited) else wrong), name


def _facts(job: Job, now: float) -> list[Any]:
    at = {"job_id": job.id, "at": now}
    attempt = job.attempt_number
    ended = ev.Exit(rank=job.num_workers, exit_code=1, signal=None, at=now)
    return [
        ev.RankExited(**at, attempt=attempt - 1, exit=ended),
        ev.RankExited(**at, attempt=attempt, exit=replace(ended, rank=0)),
        ev.CheckpointSaved(**at, attempt=attempt, step=1, path=""),
        ev.FirstStep(**at, attempt=attempt, step=1, step_at=now, steps_lost=0),
    ]
