"""Kills the daemon a thousand times at random moments while users submit, pause, resume and cancel jobs that crash.

The campaign of ``tests/faults/test_daemon_kills.py`` at length, on simulated GPUs that the jobs compete for. After every
kill the store is read as the killed daemon left it: every row equals the fold of its events, no GPU is held twice, attempts
are numbered without a gap and at most one is live. After every round of kills each accepted job is there once and ended as
it should, after as many attempts as it should; the ledgers that the jobs write themselves show one launch of each attempt,
no two alive at once, and steps without a gap; and nothing is left in Ray or of processes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import measure
from tests.support.campaign import Campaign, kill_daemon_at_random
from tests.support.ledger import Ledger
from tests.support.stack import Stack

GPUS = 3  # four drivers, some with gangs of two: there is always a job that waits
STARTING_SECONDS = 1.2
READY_SECONDS = 0.3


def one_round(stack: Stack, kills: int, dice: random.Random, found: dict[str, Any], times: list[float]) -> None:
    """Kill the daemon ``kills`` times, then check the accounts. Raises AssertionError with every broken promise."""
    with tempfile.TemporaryDirectory(prefix="orch-soak-") as place:
        directory = Path(place)
        campaign = Campaign(
            stack=stack, ledger=Ledger(directory / "ledger"), directory=directory, dice=dice, gpus=1, steps=20
        )
        clock = time.monotonic()

        def killed() -> None:
            nonlocal clock
            times.append(time.monotonic() - clock)
            clock = time.monotonic()
            found["kills"] += 1

        stack.kill_daemon()
        with campaign:
            try:
                found["states"].update(
                    kill_daemon_at_random(
                        campaign, kills, starting=STARTING_SECONDS, ready=READY_SECONDS, on_kill=killed
                    )
                )
            finally:
                stack.up()
        campaign.verify()
        found["jobs"] += len(campaign.outcomes)
        found["kinds"].update(outcome.kind for outcome in campaign.outcomes)
        found["attempts"] += sum(outcome.job.attempt for outcome in campaign.outcomes)
    stack.client.prune(older_than_seconds=0)


def campaign_of(kills: int, per_round: int, seed: int) -> tuple[dict[str, Any], list[float], list[str]]:
    """Run all rounds on one home; return the counts, the seconds between kills, and the problems."""
    found: dict[str, Any] = {"kills": 0, "jobs": 0, "attempts": 0, "states": Counter(), "kinds": Counter()}
    times: list[float] = []
    problems: list[str] = []
    dice = random.Random(seed)
    stack = Stack(simulate_gpus=GPUS)
    try:
        stack.up()
        while found["kills"] < kills and not problems:
            try:
                one_round(stack, min(per_round, kills - found["kills"]), dice, found, times)
            except (AssertionError, OSError) as error:
                problems += str(error).splitlines()
            print(f"{found['kills']} kills, {found['jobs']} jobs: {problems or 'all is well'}", file=sys.stderr)
    finally:
        stack.close()
    return found, times, problems


def main() -> int:
    """Run and report; return exit code 1 when a promise was broken. The report has the seed that repeats it."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--per-round", type=int, default=100, help="kills between two accounts (default 100)")
    options.add_argument("--seed", type=int, default=20_261_121)
    chosen = options.parse_args()
    began = time.monotonic()
    found, times, problems = campaign_of(chosen.kills, chosen.per_round, chosen.seed)
    measure.report(
        {
            "measure": "soak",
            "unit": "promises broken",
            "better": "lower",
            "ours": {"median": len(problems), "n": found["kills"], **found},
            "peers": {},
            "ratio": {},
            "target": "none",
            "met": not problems and found["kills"] == chosen.kills,
            "problems": problems,
            "seconds_between_kills": measure.summary(times) if times else None,
            "seconds": round(time.monotonic() - began, 1),
            "seed": chosen.seed,
            "machine": measure.machine(),
            "commit": measure.commit(),
            "date": time.strftime("%Y-%m-%d"),
        },
        chosen.json,
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
