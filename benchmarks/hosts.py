"""Repeated faults of whole hosts and of the network between them, under a job with ranks on two of three hosts.

Each host is a set of namespaces of this machine with a network, a process table, a clock and disks of its own (``tests/support/hosts``). A
host loses its power, stands still, is cut off in both directions or in one, has a full disk or a bad network; the daemon is killed. After
each the job must make a new step; its ledger shows that no attempt ran beside another and that no step was left out.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import measure
from tests.support.hosts.cluster import SHARED, HostCluster
from tests.support.hosts.hosts import Hosts, Plan, why_not
from tests.support.hosts.ledger import SharedLedger
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.hosts.hosts import Host

RANKS: Final = 2
UPTIME_SECONDS: Final = 5000
AHEAD_SECONDS: Final = 300.0
SHORT_SECONDS: Final = (0.5, 4.0)
LONG_SECONDS: Final = (4.0, 30.0)
MAX_RESTARTS: Final = 1_000_000
BAD_NETWORKS: Final[tuple[dict[str, float], ...]] = (
    {"delay": 0.2},
    {"delay": 0.05, "jitter": 0.2},
    {"loss": 0.1},
    {"delay": 0.1, "jitter": 0.1, "loss": 0.05, "duplicate": 0.05},
)
KINDS: Final = (
    "power cut",
    "host stands still",
    "cut off",
    "hears and is not heard",
    "is heard and does not hear",
    "bad network",
    "disk is full",
    "daemon killed",
)


@dataclass(slots=True)
class Found:
    """Faults so far, and the duration of each recovery, by the kind of fault."""

    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class HostFaults:
    """Injects faults into hosts 2 and 3 of a cluster. Host 1 has Ray's head and the daemon."""

    cluster: HostCluster
    ledger: SharedLedger
    job_id: str
    dice: random.Random
    found: Found

    def kinds(self) -> dict[str, Callable[[Host], None]]:
        """Return a function for each of ``KINDS``, which returns when its cause is over or the host is back."""
        faults: tuple[Callable[[Host], None], ...] = (
            self._power_cut,
            self._stands_still,
            self._cut_off,
            lambda host: self._one_way(host, self.cluster.head),
            lambda host: self._one_way(self.cluster.head, host),
            self._bad_network,
            self._disk_is_full,
            self._daemon_killed,
        )
        return dict(zip(KINDS, faults, strict=True))

    def once(self, kind: str) -> None:
        """Inject one fault while all hosts are ready, and wait for the recovery from it."""
        for each in self.cluster.hosts.hosts:
            self._back(each)
        host = self.cluster.hosts[self.dice.choice([2, 3])]
        began = time.monotonic()
        self.kinds()[kind](host)
        over, step = time.monotonic(), self.ledger.last_step(self.job_id)
        self.found.faults[kind] += 1
        wait_until(f"a new step after: {kind}", lambda: self.ledger.last_step(self.job_id) > step, interval=0.1)
        self.found.seconds[kind].append(time.monotonic() - over)
        print(
            f"{kind}: {over - began:.1f} s, recovered in {time.monotonic() - over:.1f} s", file=sys.stderr, flush=True
        )

    def _pause(self, seconds: tuple[float, float]) -> None:
        time.sleep(self.dice.uniform(*seconds))

    def _power_cut(self, host: Host) -> None:
        host.kill()
        self._pause(SHORT_SECONDS)
        host.boot()
        self.cluster.start_ray(host)

    def _stands_still(self, host: Host) -> None:
        host.freeze()
        self._pause(LONG_SECONDS)
        host.thaw()
        self._back(host)

    def _cut_off(self, host: Host) -> None:
        self.cluster.hosts.part(host)
        self._pause(LONG_SECONDS)
        self.cluster.hosts.everywhere()
        self._back(host)

    def _one_way(self, source: Host, target: Host) -> None:
        self.cluster.hosts.link(source, target, cut=True)
        self._pause(LONG_SECONDS)
        self.cluster.hosts.everywhere()
        self._back(source if target is self.cluster.head else target)

    def _bad_network(self, host: Host) -> None:
        link = self.dice.choice(BAD_NETWORKS)
        for other in self.cluster.hosts.hosts:
            if other is not host:
                self.cluster.hosts.between(host, other, **link)
        self._pause(LONG_SECONDS)
        self.cluster.hosts.everywhere()
        self._back(host)

    def _disk_is_full(self, host: Host) -> None:
        host.run("sh", "-c", "cat /dev/zero > ballast", check=False)
        self._pause(SHORT_SECONDS)
        host.run("rm", "-f", "ballast")

    def _daemon_killed(self, _: Host) -> None:
        self.cluster.kill_daemon()
        self.cluster.up()

    def _back(self, host: Host) -> None:
        """Wait until the host is ready. Ray never takes back a node that it has given up: start such a node again."""

        def settled() -> bool:
            if self.cluster.is_down(host):
                self.cluster.rejoin(host)
                return True
            return bool(self.cluster.nodes()[host.name]["state"] == "READY")

        wait_until(f"{host.name} is ready, or was given up", settled, interval=0.5)


def run(count: int, seconds: float, seed: int, only: Sequence[str] = ()) -> Found:
    """Inject ``count`` faults, or as many as there is time for, each kind (of ``only``, where given) equally often."""
    deadline, dice, found = time.monotonic() + seconds, random.Random(seed), Found()
    hosts = Hosts([Plan(), Plan(uptime=UPTIME_SECONDS), Plan(clock=AHEAD_SECONDS)], seed=seed)
    cluster = HostCluster(hosts)
    try:
        ledger = SharedLedger(cluster)
        job_id = ledger.submit("hosts", ranks=RANKS, spec=_spec(), seconds=0.05)
        wait_until("it saves", lambda: ledger.last_step(job_id) >= 6)
        faults = HostFaults(cluster, ledger, job_id, dice, found)
        kinds: list[str] = []
        while sum(found.faults.values()) < count and time.monotonic() < deadline:
            every = [kind for kind in sorted(faults.kinds()) if not only or kind in only]
            kinds = kinds or dice.sample(every, len(every))
            faults.once(kinds.pop())
        ledger.done("hosts")
        job = cluster.wait_ended(job_id)
        found.problems += [] if job["state"] == "SUCCEEDED" else [f"the job is {job['state']}: {job['reason']}"]
        found.problems += ledger.problems(job_id)
    except (AssertionError, OSError) as error:
        found.problems += str(error).splitlines()[:40]
    finally:
        cluster.close()
    return found


def _spec() -> dict[str, Any]:
    restarts = {"infra": MAX_RESTARTS, "hang": MAX_RESTARTS}
    return {
        "resources": {
            "num_workers": RANKS,
            "resources_per_worker": {"gpu": 0, "cpu": 1},
            "placement_strategy": "SPREAD",
            "nodes": ["host2", "host3"],
        },
        "retry": {"max_restarts": restarts, "max_no_progress": MAX_RESTARTS, "backoff": {"max": "1s"}},
        "checkpoint": {"storage_path": f"{SHARED}/checkpoints"},
    }


def main() -> int:
    """Run and report; return exit code 1 when a promise was broken. The report has the seed that repeats it."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--seconds", type=float, default=float("inf"), help="end after this time (default: never)")
    options.add_argument("--seed", type=int, default=20_261_124)
    options.add_argument("--kind", action="append", default=[], choices=KINDS, help="this kind only; may be repeated")
    chosen = options.parse_args()
    if reason := why_not():
        print(f"this machine cannot have several hosts: {reason}", file=sys.stderr)
        return 1
    began = time.monotonic()
    found = run(chosen.faults, chosen.seconds, chosen.seed, chosen.kind)
    total = sum(found.faults.values())
    measure.report(
        {
            "measure": "hosts",
            "unit": "promises broken",
            "better": "lower",
            "ours": {"median": len(found.problems), "n": total},
            "peers": {},
            "ratio": {},
            "target": "none",
            "met": not found.problems and total > 0,
            "problems": found.problems,
            "by_fault": dict(found.faults.most_common()),
            "recovery_seconds": {name: measure.summary(times) for name, times in sorted(found.seconds.items())},
            "seconds": round(time.monotonic() - began, 1),
            "seed": chosen.seed,
            "machine": measure.machine(),
            "commit": measure.commit(),
            "date": time.strftime("%Y-%m-%d"),
        },
        chosen.json,
    )
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
