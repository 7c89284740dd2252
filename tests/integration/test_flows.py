"""The files of three flows are those that docs/architecture.md lists, as a tracer sees them in every process.

The processes start with `tests/support/flow_tracer` on PYTHONPATH. A script closes the window of its flow in its first line, so nothing later counts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.flows import BESIDE, DEATH, SAMPLE, SUBMIT, listed
from tests.support.stack import Stack, wait_until

pytestmark = pytest.mark.rare

ROOT = Path(__file__).parents[2]
TRACER = ROOT / "tests" / "support" / "flow_tracer" / "sitecustomize.py"

SPEC = """
version: 1
name: flow
entrypoint: python train.py
resources: {num_workers: 2, resources_per_worker: {gpu: 1, cpu: 0.1}}
"""
SCRIPT = """
import os, time
if os.environ["RANK"] == "1":
    with open(%r, "r+b") as window:
        window.write(bytes(1))
time.sleep(3600)
"""

DRIVERS = "gpu/drivers/"
ROUNDS = 30

NO_CODE_RUNS = {"catalogue.py", "dashboards/rules.py"}
"""Files of the third flow whose tables are read when they are imported, or by Prometheus."""

BESIDE_THE_SAMPLE = {
    "gpu/drivers/inventory.py": "which GPUs there are",
    "gpu/proc.py": "the processes of a simulated GPU",
    "gpu/recording/job_record.py": "the samples' record in the job's directory",
}


class Tracer:
    """Its folder is on PYTHONPATH of the traced processes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "marked").mkdir()
        (place / "root").write_text(str(ROOT / "orchestrator"))
        self.window = place / "window"
        self.window.write_bytes(bytes(1))
        shutil.copy(TRACER, place)

    def open(self, number: int) -> None:
        """Record under this number from now on; 0: record nothing."""
        with self.window.open("r+b") as file:
            file.write(bytes([number]))

    def closed(self) -> bool:
        """Whether a script has closed the window."""
        return self.window.read_bytes() == bytes(1)

    def seen(self, number: int) -> dict[str, list[str]]:
        """Return the files that took part in a window, each with the calls that led to it first, innermost first."""
        found: dict[str, list[str]] = {}
        for line in (self.place / "seen").read_text().splitlines():
            record = json.loads(line)
            if record["window"] == number:
                for file in record["files"]:
                    found.setdefault(file, record["calls"][:6])
        return found


@pytest.fixture(scope="module")
def flows() -> Iterator[Mapping[str, Mapping[str, list[str]]]]:
    """Run the three flows; yield what took part in each."""
    place = Path(tempfile.mkdtemp(prefix="flows-"))
    tracer = Tracer(place)
    search = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    stack = Stack(simulate_gpus=2, environ={"PYTHONPATH": search})
    work = place / "work"
    work.mkdir()
    (work / "job.yaml").write_text(SPEC)
    (work / "train.py").write_text(SCRIPT % str(tracer.window))
    try:
        stack.up()
        # The flows begin with a warm daemon, which remembers the texts and commands that it has read.
        first = stack.submit(SPEC.replace("flow", "first").replace("train", "first"), place / "first", first="")
        assert stack.wait(first).state == "SUCCEEDED"

        tracer.open(1)
        done = stack.orch("submit", "job.yaml", cwd=work)
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.strip()
        wait_until("rank 1 runs its first line", tracer.closed)

        victim = stack.pids(job_id)[1]
        tracer.open(2)
        os.kill(victim, signal.SIGKILL)
        wait_until("rank 1 runs its first line again", tracer.closed)

        stack.wait_state(job_id, "RUNNING")
        tracer.open(3)
        _follow_samples(stack, tracer, job_id)
        tracer.open(0)
        yield {name: tracer.seen(number) for number, name in enumerate((SUBMIT, DEATH, SAMPLE), 1)}
    finally:
        stack.close()
        shutil.rmtree(place)


def _follow_samples(stack: Stack, tracer: Tracer, job_id: str) -> None:
    """Show the job until its samples have come through all files, or often enough for the test to say which were not reached."""
    url = f"http://{stack.client.health().read_address}/metrics"
    for _ in range(ROUNDS):
        assert httpx.get(url).status_code == 200
        assert stack.orch("status", job_id).returncode == 0
        assert stack.orch("status").returncode == 0
        if not _not_reached(tracer.seen(3)):
            return
        time.sleep(1.0)  # a round of the daemon takes two seconds


def _not_reached(seen: Mapping[str, object]) -> list[str]:
    """Return the files of the third flow that did not take part; one driver is enough."""
    absent = listed(SAMPLE) - NO_CODE_RUNS - seen.keys()
    return sorted(file for file in absent if not file.startswith(DRIVERS) or "gpu/drivers/simulated.py" in absent)


@pytest.mark.parametrize("flow", [SUBMIT, DEATH])
def test_exactly_the_files_take_part_that_the_page_lists(
    flows: Mapping[str, Mapping[str, list[str]]], flow: str
) -> None:
    seen, names = flows[flow], listed(flow)
    beside = tuple(listed(BESIDE))
    others = {file: calls for file, calls in seen.items() if file not in names and not file.startswith(beside)}
    assert others == {}, "add to the flow in docs/architecture.md, or, if nothing waits for it, to what runs beside it"
    assert sorted(names - seen.keys()) == [], "does not take part any more"


def test_a_sample_passes_the_files_that_the_page_lists_and_no_other_of_the_gpus(
    flows: Mapping[str, Mapping[str, list[str]]],
) -> None:
    """Of the other packages, some work of the daemon always runs beside it."""
    seen = flows[SAMPLE]
    assert _not_reached(seen) == []
    of_gpus = {file for file in seen if file.startswith(("gpu/", "runtime/exporters/"))}
    assert of_gpus - BESIDE_THE_SAMPLE.keys() <= listed(SAMPLE)
