"""Measures submissions a second, and no-op jobs from the first submission to the last end, beside Debian's Slurm.

``python -m benchmarks.submit_throughput [--pairs N] [--submissions N] [--jobs N] [--slots N] [--json FILE]``, as root, with slurm-wlm and
munge installed. Slurm is started in a folder of its own, with its defaults and again tuned as its high-throughput guide says; all
three daemons stay up and the rounds interleave. A client is a process that submits one job after another:

- ``api``: a Python process with ``orchestrator.api.client.Client``, one request for each job;
- ``api_together``: the same with ``submit_together``: one request for all of its jobs, at most 256 each;
- ``cli``: a shell that starts ``orch submit job.yaml`` for each job;
- ``sbatch`` and ``sbatch_tuned``: a shell that starts ``sbatch noop.sh`` for each job.

Every job is the same script, which does nothing. No job starts while submissions are counted: the nodes are cordoned and drained.
``ours`` and the ratios to its peers are submissions a second of ``api`` from ``--clients`` processes. ``one_client`` has the same from one,
``end_to_end`` jobs a second from the first of ``--jobs`` submissions to the end of the last one, with ``--slots`` jobs at a time on either side.
With two slots Slurm runs two jobs a second at best: it looks for jobs to start once a second, whatever is tuned. Slurm by default takes
over a second for each, so it gets fewer (``--default-jobs``). The sizes are chosen for less than eight minutes on two idle
cores; ``--jobs 1000 --default-jobs 1000 --rounds 1`` gives the rates of 1,000 jobs, and takes half an hour or more. An answer of orch means that the job is on disk (fsync); slurmctld answers first and writes its state some seconds later.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks import contenders
from benchmarks.measure import Arms, interleave, parser, ratio, report, result, summary, wait_for
from benchmarks.peers.slurm import TUNING, Slurm, why_not
from benchmarks.processor import Use, use_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TARGETS: Final = {"submissions_ratio": 10.0, "end_to_end_ratio": 1.0}
LIVE: Final = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING")
POLL_SECONDS: Final = 0.1
END_SECONDS: Final = 1800.0
SCRIPT: Final = "#!/bin/sh\nexit 0\n"
WAIT: Final = "echo ready; read -r go; i=0; while [ $i -lt {count} ]; do {command} || exit 1; i=$((i+1)); done"
API_CLIENT: Final = """
import sys
from orchestrator.api.client import Client
import orchestrator.api.views  # of the first answer, as of a client that has been there before
client, count, path = Client(), int(sys.argv[1]), sys.argv[2]
text = open(path).read()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(count):
    assert client.submit_text(text, source=path).created
"""

TOGETHER: Final = """
import sys
from orchestrator.api.client import Client
import orchestrator.api.views
client, count, path = Client(), int(sys.argv[1]), sys.argv[2]
text = open(path).read()
print("ready", flush=True)
sys.stdin.readline()
assert all(reply.created for reply in client.submit_together([text] * count, source=path))
"""


class Clients:
    """Processes that each submit ``count`` jobs on a signal; ``command`` makes a command line from the count."""

    def __init__(self, command: Callable[[int], Sequence[str]], environ: Mapping[str, str], directory: Path) -> None:
        self._command, self._environ, self._directory = command, dict(environ), directory

    def submit(self, clients: int, count: int) -> float:
        """Start the submissions; return the seconds from then to the end of the last process."""
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(self._process(count)) for _ in range(clients)]
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n", "a client did not start"
            began = time.perf_counter()
            for process in started:
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.close()
            codes = [process.wait() for process in started]
            seconds = time.perf_counter() - began
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {clients} clients failed")
        return seconds

    def _process(self, count: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(count),
            env=self._environ,
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


class OrchSide:
    """A daemon of its own, with a node of ``slots`` slots for the no-op job."""

    def __init__(self, slots: int) -> None:
        self.orch = contenders.Orch()
        self.client = self.orch.client
        try:
            self._begin(slots)
        except BaseException:  # also a signal: the daemon and its head would stay
            self.orch.close()
            raise

    def _begin(self, slots: int) -> None:
        self.orch.up()
        home = self.orch.home
        (home / "noop.sh").write_text(SCRIPT)
        self.yaml = home / "job.yaml"
        cpus = sum(node.cpus_total for node in self.client.nodes()) / slots
        self.yaml.write_text(
            f"version: 1\nname: noop\nentrypoint: sh {home}/noop.sh\nworking_dir: null\n"
            f"resources: {{num_workers: 1, resources_per_worker: {{gpu: 0, cpu: {cpus:g}}}}}\n"
        )
        environ, program = self.orch.environ, str(contenders.BIN / "orch")
        self.api = Clients(
            lambda count: [sys.executable, "-c", API_CLIENT, str(count), str(self.yaml)],
            environ,
            home,
        )
        self.together = Clients(
            lambda count: [sys.executable, "-c", TOGETHER, str(count), str(self.yaml)],
            environ,
            home,
        )
        self.cli = Clients(
            lambda count: ["sh", "-c", WAIT.format(count=count, command=f"{program} submit {self.yaml} > /dev/null")],
            environ,
            home,
        )

    def hold(self, *, on: bool) -> None:
        """Let no job start, or let jobs start again."""
        for node in self.client.nodes():
            self.client.node_action(node.id, "cordon" if on else "uncordon")

    def queued(self) -> int:
        """Return 1 while a job has not ended, else 0: the first one of the list is enough."""
        return len(self.client.jobs(states=LIVE, limit=1).jobs)

    def clear(self) -> None:
        """Cancel every job."""
        for job in self.client.jobs(states=LIVE).jobs:
            self.client.cancel(job.id)
        wait_for("no job is left", lambda: not self.queued())

    def failed(self) -> int:
        """Return the number of jobs that failed."""
        return len(self.client.jobs(states=("FAILED",)).jobs)

    def processor(self) -> float:
        """Return the processor seconds of the daemon so far."""
        used: Use = use_of(self.client.health().pid)
        return used.nanoseconds / 1e9


class SlurmSide:
    """A Slurm, and its clients."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.script = slurm.home / "noop.sh"
        self.script.write_text(SCRIPT)
        sbatch = f"sbatch --quiet --output=/dev/null {self.script}"
        self.clients = Clients(
            lambda count: ["sh", "-c", WAIT.format(count=count, command=sbatch)], slurm.environ, slurm.home
        )


def main() -> None:
    """Measure and report."""
    made = parser("submissions a second and no-op jobs end to end, beside Slurm", 4)
    made.add_argument("--clients", type=int, default=32)
    made.add_argument("--submissions", type=int, default=128, help="in a round of --clients; a quarter from one client")
    made.add_argument("--jobs", type=int, default=64, help="no-op jobs of an end-to-end round; 0: none")
    made.add_argument("--default-jobs", type=int, default=32, help="the same for Slurm by default; 0: as many")
    made.add_argument("--rounds", type=int, default=3, help="end-to-end rounds")
    made.add_argument("--slots", type=int, default=2, help="no-op jobs at a time")
    options = made.parse_args()
    if reason := why_not():
        sys.exit(f"no Slurm to compare with: {reason}")
    with contextlib.ExitStack() as stack:
        orch = OrchSide(options.slots)
        stack.callback(orch.orch.close)
        plain = SlurmSide(stack.enter_context(Slurm(cpus=options.slots)))
        tuned = SlurmSide(stack.enter_context(Slurm(TUNING, cpus=options.slots)))
        report(measure(orch, plain, tuned, options), options.json)


def measure(orch: OrchSide, plain: SlurmSide, tuned: SlurmSide, options: Any) -> dict[str, Any]:
    """Measure submissions and jobs end to end."""
    clients, count = options.clients, options.submissions // options.clients
    orch.hold(on=True)
    plain.slurm.drain()
    tuned.slurm.drain()
    many = interleave(_rates(orch, plain, tuned, clients, count), options.pairs)
    one = interleave(_rates(orch, plain, tuned, 1, options.submissions // 4), options.pairs)
    orch.hold(on=False)
    plain.slurm.resume()
    tuned.slurm.resume()
    ends, processor = _ends(orch, plain, tuned, options) if options.jobs else (Arms(), [])
    values = dict(many.values)
    return result(
        "submit_throughput",
        "1/s",
        "higher",
        values.pop("api"),
        values,
        targets=TARGETS,
        one_client=summaries(one, "api"),
        end_to_end=summaries(ends, "orch"),
        daemon_seconds_per_job=summary(processor) if processor else None,
        failures={"clients": many.failures, "one_client": one.failures, "end_to_end": ends.failures},
        clients=clients,
        submissions=options.submissions,
        jobs=options.jobs,
        slots=options.slots,
        slurm={"version": plain.slurm.version(), "tuning": dict(TUNING)},
    )


def _rates(
    orch: OrchSide, plain: SlurmSide, tuned: SlurmSide, clients: int, count: int
) -> dict[str, Callable[[], float]]:
    def rate(submitting: Clients, clear: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            try:
                return clients * count / submitting.submit(clients, count)
            finally:
                clear()

        return run

    return {
        "api": rate(orch.api, orch.clear),
        "api_together": rate(orch.together, orch.clear),
        "cli": rate(orch.cli, orch.clear),
        "sbatch": rate(plain.clients, plain.slurm.clear),
        "sbatch_tuned": rate(tuned.clients, tuned.slurm.clear),
    }


def _ends(orch: OrchSide, plain: SlurmSide, tuned: SlurmSide, options: Any) -> tuple[Arms, list[float]]:
    """Return jobs a second end to end, and the daemon's processor time of each job."""
    processor: list[float] = []

    def rate(submitting: Clients, queued: Callable[[], int], jobs: int) -> Callable[[], float]:
        each: int = jobs // options.clients

        def run() -> float:
            began = time.perf_counter()
            submitting.submit(options.clients, each)
            wait_for("the last job ends", lambda: _none_left(queued), END_SECONDS)
            return float(each * options.clients / (time.perf_counter() - began))

        return run

    def ours() -> float:
        failed, used = orch.failed(), orch.processor()
        found = rate(orch.api, orch.queued, options.jobs)()
        processor.append((orch.processor() - used) / options.jobs)
        if orch.failed() > failed:
            raise RuntimeError(f"{orch.failed() - failed} jobs failed")
        return found

    return interleave(
        {
            "orch": ours,
            "slurm": rate(plain.clients, plain.slurm.queued, options.default_jobs or options.jobs),
            "slurm_tuned": rate(tuned.clients, tuned.slurm.queued, options.jobs),
        },
        options.rounds,
        warm_up=0,
    ), processor


def _none_left(queued: Callable[[], int]) -> bool:
    time.sleep(POLL_SECONDS)
    return not queued()


def summaries(arms: Arms, ours: str) -> dict[str, Any]:
    """Return the summary of each arm, and ours as a ratio to the others."""
    found: dict[str, Any] = {name: summary(values) for name, values in arms.values.items() if values}
    mine = arms.values.get(ours, [])
    peers = {name: values for name, values in arms.values.items() if name != ours and values}
    return found | {"ratio": {name: ratio(mine, values) for name, values in peers.items()} if mine else {}}


if __name__ == "__main__":
    main()
