"""Kills, stops, freezes and terminations of everything that a job stands on, singly and in pairs, again and again.

Victims are a rank's training process, its keeper, its actor, the fork servers, the node's agent, the daemon, the raylet and Ray's control
store. After each disturbance the job must make a new step; what it writes itself shows that no attempt ran beside another and that no step
was left out. In the end it succeeds, and nothing is left. Memory, open files, processes, and bytes in `/dev/shm`, in `/tmp` and below the home are
measured at rest after each round: what they have grown by is told per thousand recoveries.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks import measure
from orchestrator.api.errors import DaemonStoppingError, OrchError
from tests.support.campaign import left_in_ray
from tests.support.ledger import SCRIPT, Ledger, job_spec
from tests.support.processes import actor_pids, node_agents, of_cwd, parent
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS: Final = 2
PER_ROUND: Final = 100  # disturbances of one job
PAIRS: Final = 0.3  # so many of the disturbances hit two things at once
MOST_RESTARTS: Final = 1_000_000
FROZEN_SECONDS: Final = (0.1, 2.0)
SIGNALS: Final = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
ENDS_THE_ATTEMPT: Final = frozenset({"rank", "actor", "raylet"})
"""What an attempt does not survive, however it is ended: a step of the attempt that was hit is no recovery."""
STOPPED_FOR_GOOD: Final = frozenset({"rank"})
"""What is found when it is stopped and never goes on; the others are only frozen for a while."""


@dataclass(slots=True)
class Found:
    """What has happened, and how long each recovery took, by what was done."""

    disturbances: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    passed_over: int = 0
    recoveries: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Disturber:
    """Disturbs a job of ``stack`` that runs until it is told to end."""

    stack: Stack
    ledger: Ledger
    job_id: str
    dice: random.Random
    found: Found = field(default_factory=Found)

    def victims(self) -> dict[str, Callable[[], int]]:
        """How the process of each kind is found; 0 where there is none this moment."""
        return {
            "rank": self._rank,
            "keeper": lambda: parent(self._rank()),
            "actor": lambda: self.dice.choice(actor_pids(self.stack, self.job_id)),
            "fork server": self._fork_server,
            "agent": lambda: next(iter(node_agents(self.stack)), 0),
            "daemon": self.stack.daemon_pid,
            "raylet": lambda: self.stack.head_pids()["raylet"],
            "control store": lambda: self.stack.head_pids()["gcs_server"],
        }

    def _rank(self) -> int:
        return self.dice.choice([pid for pid in self.stack.pids(self.job_id) if pid] or [0])

    def _fork_server(self) -> int:
        named = (p.pid for p in self.stack.processes() if _is_fork_server(p))
        return next(named, 0)

    def once(self) -> None:
        """One disturbance, and the recovery from it."""
        attempt = self.stack.job(self.job_id).attempt
        kinds = self.dice.sample(sorted(self.victims()), 2 if self.dice.random() < PAIRS else 1)
        done, frozen, ended, daemon = [], [], False, 0
        for kind in kinds:
            how = self.dice.choice(sorted(SIGNALS) if kind in STOPPED_FOR_GOOD else ["freeze", "kill", "terminate"])
            pid = self._hit(kind, SIGNALS[how])
            if pid:
                done.append(f"{how} {kind}")
                ended |= how != "freeze" and kind in ENDS_THE_ATTEMPT
                daemon = pid if how != "freeze" and kind == "daemon" else daemon
                frozen += [pid] if how == "freeze" else []
        if not done:
            self.found.passed_over += 1
            return
        step, began = self.ledger.last_step(self.job_id), time.monotonic()
        if frozen:
            time.sleep(self.dice.uniform(*FROZEN_SECONDS))
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        name = " and ".join(sorted(done))
        self.found.disturbances[name] += 1
        self._recovered(step, attempt + ended, daemon)
        self.found.seconds[name].append(time.monotonic() - began)
        self.found.recoveries += 1

    def _hit(self, kind: str, number: signal.Signals) -> int:
        """The process that was hit; 0 where it is just not there: it recovers from something."""
        try:
            pid = self.victims()[kind]()
            if pid:
                os.kill(pid, number)
        except (ProcessLookupError, psutil.Error, KeyError, IndexError, OSError):
            return 0
        except OrchError:  # the daemon, which tells where the others are, was hit first
            return 0
        return pid

    def _recovered(self, step: int, attempt: int, daemon: int) -> None:
        """Wait until a daemon other than this one answers, and the job runs in this attempt or a later one and has made a step that it had not."""

        def back() -> bool:
            try:
                if self.stack.daemon_pid() == daemon:
                    return False
                job = self.stack.job(self.job_id)
            except DaemonStoppingError:  # it was terminated, and ends in order
                return False
            except OrchError:
                self.stack.up()
                return False
            return job.state == "RUNNING" and job.attempt >= attempt and self.ledger.last_step(self.job_id) > step

        wait_until("a new step", back, interval=0.1)


def _is_fork_server(process: psutil.Process) -> bool:
    try:
        return any("forkserver" in part for part in process.cmdline())
    except psutil.Error:
        return False


def at_rest(stack: Stack) -> dict[str, float]:
    """What orch and Ray hold now: processes, their memory and open files, and bytes where they write."""
    held: Counter[str] = Counter()
    for process in stack.processes():
        with contextlib.suppress(psutil.Error):
            held["memory_bytes"] += process.memory_info().rss
            held["open_files"] += process.num_fds()
            held["processes"] += 1
    shared = Path("/dev/shm").glob(f"orch-{os.getuid()}-*")
    held["shm_bytes"] = sum(map(_bytes_below, shared))
    held["tmp_bytes"] = _bytes_below(stack.node_root)
    held["home_bytes"] = _bytes_below(stack.home)
    return dict(held)


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total


def growth(held: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float] | None:
    """By how much each has grown per thousand recoveries since the first round, which warms everything up; None after one round."""
    if len(held) < 2:
        return None
    (first, before), (last, after) = held[0], held[-1]
    return {name: round((after.get(name, 0) - value) / (last - first) * 1000, 1) for name, value in before.items()}


def run(count: int, seconds: float, seed: int, per_round: int) -> tuple[Found, list[tuple[int, dict[str, float]]]]:
    """So many disturbances, or as many as there is time for: what was found, and what was held after each round of them."""
    deadline, found, dice = time.monotonic() + seconds, Found(), random.Random(seed)
    held: list[tuple[int, dict[str, float]]] = []
    stack = Stack()
    try:
        stack.up()
        while found.recoveries < count and time.monotonic() < deadline and not found.problems:
            _round(stack, found, dice, min(count, found.recoveries + per_round), deadline)
            stack.client.prune(older_than_seconds=0)
            held.append((found.recoveries, at_rest(stack)))
            print(f"{found.recoveries} recoveries: {found.problems or 'all is well'}", file=sys.stderr)
    except (AssertionError, OSError) as error:
        found.problems += str(error).splitlines()[:20]
    finally:
        stack.close()
    return found, held


def _round(stack: Stack, found: Found, dice: random.Random, count: int, deadline: float) -> None:
    """One job, which is disturbed until there were ``count`` recoveries, and then ends."""
    with tempfile.TemporaryDirectory(prefix="orch-soak-") as place:
        directory, ledger = Path(place), Ledger(Path(place) / "ledger")
        restarts = {"infra": MOST_RESTARTS, "hang": MOST_RESTARTS}
        keys = {"retry": {"max_restarts": restarts, "max_no_progress": MOST_RESTARTS, "backoff": {"max": "1s"}}}
        spec = job_spec(ledger, name="soak", ranks=RANKS, until=str(directory / "over"), spec=keys)
        job_id = stack.submit(spec, directory / "work", train=SCRIPT)
        stack.wait_step(job_id, 2)
        disturber = Disturber(stack, ledger, job_id, dice, found)
        while found.recoveries < count and time.monotonic() < deadline and not found.problems:
            disturber.once()
        (directory / "over").touch()
        found.problems += _ends(stack, ledger, job_id)


def _ends(stack: Stack, ledger: Ledger, job_id: str) -> list[str]:
    job = stack.wait(job_id)
    problems = [] if job.state == "SUCCEEDED" else [f"the job is {job.state}: {job.reason}"]
    problems += ledger.problems(job_id)
    wait_until("the job's processes are gone", lambda: not of_cwd(stack.settings.paths.jobs), seconds=PATIENCE_SECONDS)
    return problems + left_in_ray(stack)


def sitting(found: Found, held: Sequence[tuple[int, dict[str, float]]], seconds: float, seed: int) -> dict[str, Any]:
    """One call's part of the result."""
    return {
        "recoveries": found.recoveries,
        "passed_over": found.passed_over,
        "problems": found.problems,
        "by_disturbance": dict(found.disturbances.most_common()),
        "recovery_seconds": {name: measure.summary(times) for name, times in sorted(found.seconds.items())},
        "growth_per_thousand": growth(held),
        "held": held[-1][1] if held else None,
        "seconds": round(seconds, 1),
        "seed": seed,
        "machine": measure.machine(),
        "commit": measure.commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def whole(sittings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of all calls; its machine is that of the last."""
    problems = [problem for each in sittings for problem in each["problems"]]
    recoveries = sum(each["recoveries"] for each in sittings)
    kinds: Counter[str] = sum((Counter(each["by_disturbance"]) for each in sittings), Counter())
    return {
        "measure": "disturbances",
        "unit": "promises broken",
        "better": "lower",
        "ours": {
            "median": len(problems),
            "n": recoveries,
            "passed_over": sum(each["passed_over"] for each in sittings),
        },
        "peers": {},
        "ratio": {},
        "target": "none",
        "met": not problems and recoveries > 0,
        "by_disturbance": dict(kinds.most_common()),
        "sittings": list(sittings),
        **{key: sittings[-1][key] for key in ("machine", "commit", "date")},
    }


def main() -> int:
    """Run and report; exit code 1 when a promise was broken, with the seed that repeats it."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument("--disturbances", type=int, default=10_000, help="of this call and of FILE (default: 10000)")
    options.add_argument("--before", type=Path, metavar="FILE", help="a result that this call goes on from")
    options.add_argument("--seconds", type=float, default=float("inf"), help="end after so long (default: never)")
    options.add_argument("--per-round", type=int, default=PER_ROUND, help="disturbances of one job (default: 100)")
    options.add_argument("--seed", type=int, default=20_261_124, help="of the first call; each later one adds 1")
    chosen = options.parse_args()
    before = json.loads(chosen.before.read_text(encoding="utf-8"))["sittings"] if chosen.before else []
    left = chosen.disturbances - sum(each["recoveries"] for each in before)
    if left <= 0:
        print(f"{chosen.before} has {chosen.disturbances - left} recoveries already: ask for more with --disturbances")
        return 0
    began, seed = time.monotonic(), chosen.seed + len(before)
    found, held = run(left, chosen.seconds, seed, chosen.per_round)
    measure.report(whole([*before, sitting(found, held, time.monotonic() - began, seed)]), chosen.json)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
