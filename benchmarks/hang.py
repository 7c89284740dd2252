"""Measures the time from SIGSTOP of a rank to its detection, and false alarms in healthy jobs.

Ours is seconds from the signal to the event that ends the attempt; ``ours_recovered`` is seconds to the next new step. A peer is watched
for ``--wait`` seconds for any sign of detection: its processes replaced, or its launcher ended. Peers without a sign
are in ``undetected``, with the time that they had: torchrun and Ray Train wait for the time-out of the collective (gloo and NCCL
have half an hour and ten minutes by default).

``false_alarms`` counts the reports and actions of orch about a healthy job that stands still every few seconds (asleep
or computing, without a report) for ``--healthy`` seconds. It has to be 0.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import contenders
from benchmarks.measure import interleave, parser, report, result, summary, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 1_000_000
SECONDS_PER_STEP = 0.05
STEADY_STEPS = 40
DETECT_SECONDS = 120.0
RANK = 1


class UnnoticedError(Exception):
    """A contender showed no sign of detection within its time."""


def _steady(run: contenders.Run) -> None:
    run.first_step_seconds()
    wait_for("steady steps", lambda: run.steps()[-1].number > STEADY_STEPS)


def ours(orch: contenders.Orch, recovered: list[float]) -> float:
    """Return the seconds from SIGSTOP to the event; append those to the next new step to ``recovered``."""
    with orch.submit(STEPS, SECONDS_PER_STEP, workload="reporting.py") as run:
        assert isinstance(run, contenders.OrchRun)
        _steady(run)
        os.kill(contenders.worker_pids(run.ledger)[RANK], signal.SIGSTOP)
        stopped, stopped_at = time.time(), time.monotonic()
        failed = wait_for(
            "the hang is known",
            lambda: [e for e in run.client.events(run.job_id()) if e.kind == "attempt_failed"],
            DETECT_SECONDS,
        )
        step = wait_for(
            "a new step",
            lambda: [s for s in run.steps() if s.at_seconds > stopped_at + 1.0],
            DETECT_SECONDS,
        )
        recovered.append(float(step[0].at_seconds - stopped_at))
        return float(failed[0].at - stopped)


def theirs(start: Callable[[int, float], contenders.Run], wait_seconds: float) -> float:
    """Return the seconds from SIGSTOP until any process of the peer changes. Raises UnnoticedError."""
    with start(STEPS, SECONDS_PER_STEP) as run:
        _steady(run)
        before = contenders.worker_pids(run.ledger)
        os.kill(before[RANK], signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            wait_for(
                "a sign",
                lambda: run.process.poll() is not None or contenders.worker_pids(run.ledger) != before,
                wait_seconds,
            )
        except TimeoutError:
            raise UnnoticedError(f"not noticed within {wait_seconds:g} s") from None
        finally:
            os.kill(before[RANK], signal.SIGCONT)
        return time.monotonic() - stopped_at


def false_alarms(orch: contenders.Orch, seconds: float) -> dict[str, Any]:
    """Count orch's reports and actions about a healthy job in which rank 0 stands still for 4 s every 60 steps."""
    with orch.submit(STEPS, SECONDS_PER_STEP, workload="reporting.py", arguments="60 4.0") as run:
        assert isinstance(run, contenders.OrchRun)
        run.first_step_seconds()
        time.sleep(seconds)
        events = run.client.events(run.job_id())
        steps = len(run.steps())
    alarms = [e.summary for e in events if e.kind == "attempt_failed" or e.body.get("code") in ("hang", "slow")]
    return {"seconds": seconds, "steps": steps, "alarms": len(alarms), "said": alarms}


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=10)
    options.add_argument("--peers", default="torchrun,ray_train", help="which peers, by comma; empty for none")
    options.add_argument("--wait", type=float, default=60.0, help="seconds that a peer is given (default 60)")
    options.add_argument("--healthy", type=float, default=300.0, help="seconds of the healthy run (default 300)")
    arguments = options.parse_args()
    starts = {"torchrun": contenders.torchrun, "ray_train": contenders.ray_train}
    chosen = {name: starts[name] for name in filter(None, arguments.peers.split(","))}
    orch = contenders.Orch()
    recovered: list[float] = []
    try:
        orch.up()
        mine = interleave({"ours": partial(ours, orch, recovered)}, arguments.pairs)
        # A peer that detects nothing takes its whole wait: one run is enough to show that.
        peers = interleave({n: partial(theirs, s, arguments.wait) for n, s in chosen.items()}, 1, warm_up=0)
        healthy = false_alarms(orch, arguments.healthy)
    finally:
        orch.close()
    failures = {**mine.failures, **peers.failures}
    unnoticed = [
        n for n, messages in peers.failures.items() if any(text.startswith("UnnoticedError") for text in messages)
    ]
    found = result(
        "hang",
        "s",
        "lower",
        mine.values["ours"],
        peers.values,
        failures=failures,
        ours_recovered=summary(recovered[-len(mine.values["ours"]) :]),
        undetected={name: {"within_seconds": arguments.wait} for name in unnoticed},
        false_alarms=healthy,
    )
    report(found, arguments.json)


if __name__ == "__main__":
    main()
