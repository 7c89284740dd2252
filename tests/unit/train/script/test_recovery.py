"""A run that is killed again and again ends exactly as one that is not, and sees every sample once per epoch."""

import json
import os
import random
import signal
import subprocess
import time

import pytest

from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from tests.support import warm
from tests.support.pages import BothSides
from tests.support.stack import PATIENCE_SECONDS

SCRIPT = """
import json, random, sys, time
from orchestrator.train import context

ctx = context()
random.seed(7)
state = {"weights": [0.0] * 50, "order": [], "seen": 0}
found = ctx.load()
if found is not None:
    state = found.state
    random.setstate(state["random"])
start = 0 if found is None else found.step
print(json.dumps({"start": start, "path": None if found is None else found.path}), flush=True)
ledger = open("ledger", "a")
for step in range(start + 1, 301):
    if not state["order"]:
        state["order"] = random.sample(range(20), 20)
    sample = state["order"].pop()
    weights = state["weights"]
    weights[sample] += random.gauss(0, 1) * (weights[(sample * 7) % 50] + 1)
    state["seen"] += 1
    time.sleep(0.0005)
    ctx.report(step=step, total_steps=300, loss=weights[0])
    ledger.write(json.dumps([step, sample]) + "\\n")
    ledger.flush()
    state["random"] = random.getstate()
    ctx.save(state, step=step)
print(json.dumps([state["weights"], state["seen"]]), flush=True)  # also where the kill came after the last save
"""


def attempt(folder, number, *, snapshots=True):
    page = BothSides.create(folder / "page")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.getcwd(),
        "ORCH_JOB_ID": "j",
        "ORCH_ATTEMPT": str(number),
        "ORCH_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "ORCH_PROGRESS_PATH": str(folder / "page"),
    }
    if snapshots:
        environ["ORCH_SNAPSHOT_DIR"] = str(folder / "snapshots")
    return warm.Warm(SCRIPT, cwd=folder, env=environ, stdout=subprocess.PIPE), page


def finish(process, page):
    output = process.communicate(PATIENCE_SECONDS)[0].splitlines()
    page.close()
    return process.returncode, [json.loads(line) for line in output]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    code, output = finish(*attempt(tmp_path_factory.mktemp("undisturbed"), 1))
    assert code == 0
    return output[-1]


@pytest.mark.parametrize("snapshots", [True, pytest.param(False, marks=pytest.mark.rare)])
def test_a_killed_run_ends_bit_identical_and_loses_at_most_one_step(tmp_path, undisturbed, snapshots):
    chance = random.Random(11)
    persister = SnapshotPersister(
        tmp_path / "snapshots",
        rank=0,
        settings=StoreSettings(root=str(tmp_path / "checkpoints")),
        interval_seconds=0.05,
    )
    persister.start()
    kills, reached, before = 0, 0, 0
    try:
        for number in range(1, 40):
            process, page = attempt(tmp_path, number, snapshots=snapshots)
            target = reached + chance.randrange(20, 80)
            while process.poll() is None and (page.read().max_step or 0) < target:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            reached = max(reached, page.read().max_step or 0)
            code, output = finish(process, page)
            if number > 1:
                assert (
                    before - output[0]["start"] <= 1
                )  # the highest step reported before the kill was saved, or the one before
                assert (output[0]["path"] == "memory") == snapshots
            before = reached
            kills += code == -signal.SIGKILL
            if code == 0:
                break
    finally:
        persister.close()
    assert kills >= 3
    assert output[-1] == undisturbed
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    final = dict(lines)  # of a repeated step, the last run counts
    assert sorted(final) == list(range(1, 301))
    for epoch in range(15):
        assert sorted(final[step] for step in range(epoch * 20 + 1, epoch * 20 + 21)) == list(range(20))
    assert len(lines) - 300 <= kills  # at most one step repeated per kill
