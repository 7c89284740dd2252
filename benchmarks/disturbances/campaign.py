"""Campaign in one place: each round disturbs one job, lets it end, and measures the resources held afterwards."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.disturbances.accounts import Rest, at_rest, sitting
from benchmarks.disturbances.disturber import Disturber, Found
from benchmarks.disturbances.places import PLACES
from tests.support.campaign import left_in_ray
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import of_cwd
from tests.support.signals import guard
from tests.support.stack import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from benchmarks.disturbances.places import Place

RANKS: Final = 2
MAX_RESTARTS: Final = 1_000_000


def run(name: str, count: int, seconds: float, seed: int, per_round: int) -> tuple[Found, list[Rest]]:
    """Disturb one place ``count`` times, or until ``seconds`` are over; return the outcome, and the resources held after each round."""
    deadline, found, dice = time.monotonic() + seconds, Found(), random.Random(seed)
    rests: list[Rest] = []
    place = PLACES[name]()
    try:
        place.start()
        while found.recoveries < count and time.monotonic() < deadline and not found.problems:
            _round(place, found, dice, min(count, found.recoveries + per_round), deadline)
            place.stack.client.prune(older_than_seconds=0)
            rests.append(Rest(found.recoveries, at_rest(place)))
            print(f"{found.recoveries} recoveries: {found.problems or 'all is well'}", file=sys.stderr)
    except (AssertionError, OSError) as error:
        found.problems += str(error).splitlines()[:20]
    finally:
        place.close()
    return found, rests


def _round(place: Place, found: Found, dice: random.Random, count: int, deadline: float) -> None:
    """Run one job, disturb it until there were ``count`` recoveries, and let it end."""
    stack = place.stack
    with tempfile.TemporaryDirectory(prefix="orch-soak-") as folder:
        directory, ledger = Path(folder), Ledger(Path(folder) / "ledger")
        job_id = stack.submit(_spec(place, ledger, directory / "over"), directory / "work", train=SCRIPT)
        stack.wait_step(job_id, 2)
        disturber = Disturber(place, ledger, job_id, dice, found)
        while found.recoveries < count and time.monotonic() < deadline and not found.problems:
            disturber.once()
        (directory / "over").touch()
        found.problems += _ends(place, ledger, job_id)


def _spec(place: Place, ledger: Ledger, until: Path) -> str:
    restarts = {"infra": MAX_RESTARTS, "hang": MAX_RESTARTS}
    keys = {"retry": {"max_restarts": restarts, "max_no_progress": MAX_RESTARTS, "backoff": {"max": "1s"}}}
    spec = json.loads(job_spec(ledger, name="soak", ranks=RANKS, until=str(until), spec=keys, **place.options))
    spec["resources"] |= place.resources
    return json.dumps(spec)


def _ends(place: Place, ledger: Ledger, job_id: str) -> list[str]:
    stack = place.stack
    job = stack.wait(job_id)
    problems = [] if job.state == "SUCCEEDED" else [f"the job is {job.state}: {job.reason}"]
    problems += ledger.problems(job_id)
    place.free_of({line.pid for line in ledger.lines(job_id)})
    wait_until("the job's processes are gone", lambda: not of_cwd(stack.settings.paths.jobs), seconds=PATIENCE_SECONDS)
    return problems + left_in_ray(stack)


def one_place(name: str, count: int, seconds: float, seed: int, per_round: int, beside: int) -> dict[str, Any]:
    """Run a sitting in this process."""
    guard()
    began = time.monotonic()
    found, rests = run(name, count, seconds, seed, per_round)
    return sitting(found, rests, time.monotonic() - began, seed, name, beside)
