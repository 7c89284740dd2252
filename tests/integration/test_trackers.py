"""Jobs' records in the real trackers, offline or local: every point once, whatever ends the process that writes them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.trackers import journal
from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.gpu.recording.job_record import COLUMNS
from tests.support.stack import PATIENCE_SECONDS

JOB = "digits-abc234"
START = 1_700_000_000
Rows = list[tuple[int, dict[str, float]]]


def report(job: Path, steps: range) -> None:
    with (job / "metrics.jsonl").open("a") as file:
        for step in steps:
            body = {"at": START + step, "attempt": 1 + (step >= 10), "step": step, "max_step": step, "total_steps": 30}
            body |= {"epoch": 0.1, "phase": "train", "samples": step, "tokens": None, "step_seconds": 0.5}
            file.write(json.dumps({**body, "metrics": {"loss": 1 / (step + 1), "diverged": None}}) + "\n")


def sample(job: Path) -> None:
    (job / "telemetry").mkdir()
    for gpu in range(2):
        rows = [f"{START + i},{0.9 - 0.3 * gpu},{(gpu + 1) * 2**30},300,,60,,,1\n" for i in range(20)]
        path = job / "telemetry" / f"telemetry-GPU-{gpu}.csv"
        path.write_text(",".join(COLUMNS) + "\n" + "".join(rows))


class Process:
    """The process that the daemon starts, with the daemon's end of its input."""

    def __init__(self, home: Path, tracker: str, **environ: str) -> None:
        self.job = home / "jobs" / JOB
        self.journal = journal.path_of(self.job, tracker)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.analysis.trackers.process", str(self.job), tracker],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "WANDB_MODE": "offline", "HOME": str(home), **environ},
        )
        facts = {"job_id": JOB, "name": "digits", "group": "sweep", "folder": str(home / "trackers")}
        self.tell(json.dumps({**facts, "tags": ["team=a"], "config": {"lr": 0.1}}))

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def until(self, holds: Callable[[journal.Journal], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(journal.load(self.journal)):
            assert self._process.poll() is None, journal.load(self.journal).problem
            assert time.monotonic() < deadline, journal.load(self.journal)
            time.sleep(0.05)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()


def tensorboard_rows(home: Path) -> Rows:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (path,) = (home / "trackers" / "tensorboard" / JOB).glob("events.*")
    events = [event for event in LegacyEventFileLoader(str(path)).Load() if event.HasField("summary")]
    return [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events]


def asked(script: str, home: Path) -> Any:
    """Run a script in its own process and return the JSON it prints: the libraries' warnings are errors in tests."""
    environ = {**os.environ, "TRACKIO_DIR": str(home / "trackers" / "trackio")}
    command = [sys.executable, "-c", script, str(home)]
    out = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def trackio_rows(home: Path) -> Rows:
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
        f"print(json.dumps(S.get_logs('orch', {JOB!r}), default=str))"
    )
    return [(row["step"], row) for row in asked(script, home)]


MLFLOW = """
import json, pathlib, sys
from mlflow.tracking import MlflowClient
folder = pathlib.Path(sys.argv[1], "trackers", "mlflow")
client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db", registry_uri=folder.as_uri())
(run,) = client.search_runs([client.get_experiment_by_name("orch").experiment_id])
points = [(m.timestamp, m.step, name, m.value) for name in run.data.metrics for m in client.get_metric_history(run.info.run_id, name)]
print(json.dumps([run.info.status, run.data.params, run.data.tags, points]))
"""


def mlflow_rows(home: Path) -> Rows:
    status, params, tags, points = asked(MLFLOW, home)
    assert (status, params["lr"], tags["orch.job_id"], tags["team"]) == ("FINISHED", "0.1", JOB, "a")
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for timestamp, step, name, value in points:
        found = rows.setdefault((timestamp, step), {})
        assert name not in found
        found[name] = value
    return [(step, values) for (_, step), values in sorted(rows.items())]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a run's file: a log in LevelDB's format, in blocks of 32 KiB, after 7 bytes of its own."""
    at, body = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # the whole record, its last piece
            yield body
            body = b""


def wandb_rows(home: Path) -> Rows:
    """Return the rows of all files of the run. A later one may repeat a row of an earlier one, under its step."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: dict[int, tuple[int, dict[str, float]]] = {}
    for path in sorted((home / "trackers" / "wandb" / "wandb").glob(f"offline-run-*-{JOB}/run-{JOB}.wandb")):
        for body in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(body)
            if record.WhichOneof("record_type") == "history":
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                row = {name: value for name, value in values.items() if name != "_runtime"}
                number = record.history.step.num
                assert rows.setdefault(number, (values["step"], row)) == (values["step"], row)
    return list(rows.values())


READ: dict[str, Callable[[Path], Rows]] = {
    "tensorboard": tensorboard_rows,
    "trackio": trackio_rows,
    "mlflow": mlflow_rows,
    "wandb": wandb_rows,
}


def home_of(tmp_path: Path, tracker: str) -> Path:
    for module in TRACKERS[tracker].packages:
        pytest.importorskip(module)
    (tmp_path / "jobs" / JOB).mkdir(parents=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "tracker",
    ["tensorboard", *(pytest.param(name, marks=pytest.mark.rare) for name in sorted(READ.keys() - {"tensorboard"}))],
)
def test_every_point_is_there_once_although_the_process_was_killed(tmp_path: Path, tracker: str) -> None:
    home = home_of(tmp_path, tracker)
    job = home / "jobs" / JOB
    report(job, range(10))
    sample(job)
    first = Process(home, tracker)
    first.until(lambda state: state.points >= 12)
    first.kill()
    report(job, range(10, 20))
    second = Process(home, tracker)
    second.until(lambda state: state.points >= 22)
    second.close_input()  # the daemon has died
    second.wait()
    report(job, range(20, 30))
    third = Process(home, tracker)
    third.tell("end SUCCEEDED")
    assert third.wait() == 0
    state = journal.load(journal.path_of(job, tracker))
    assert (state.finished, state.pending, state.points, state.problem) == (True, (), 32, "")

    rows = READ[tracker](home)
    losses = Counter(step for step, values in rows if "loss" in values)
    assert losses == dict.fromkeys(range(30), 1)
    assert all(values["loss"] == pytest.approx(1 / (step + 1)) for step, values in rows if "loss" in values)
    gpus = [values for _, values in rows if "gpu_total_memory" in values]
    assert [values["gpu_total_memory"] for values in gpus] == [3072.0, 3072.0]
    assert [values["gpu_load_balance_cv"] for values in gpus] == pytest.approx([20.0, 20.0])
    assert gpus[0].keys() >= {"gpu_0_memory", "gpu_1_memory", "gpu_avg_utilization", "gpu_0_power"}


@pytest.mark.rare
@pytest.mark.parametrize("tracker", ["tensorboard"])
def test_a_process_whose_daemon_has_died_ends_at_once(tmp_path: Path, tracker: str) -> None:
    home = home_of(tmp_path, tracker)
    process = Process(home, tracker)
    process.until(lambda state: bool(state.where))
    process.close_input()
    assert process.wait() == -signal.SIGKILL


def test_what_a_tracker_says_is_wrong_is_in_the_journal(tmp_path: Path) -> None:
    home = home_of(tmp_path, "mlflow")
    report(home / "jobs" / JOB, range(3))
    process = Process(home, "mlflow", MLFLOW_TRACKING_URI="nonsense://host/x")
    assert process.wait() == 1
    state = journal.load(process.journal)
    assert "nonsense" in state.problem
    assert not state.finished


HANGING = """
import sys, threading
from orchestrator.analysis.trackers import process

class Hanging:
    where, facts = "nowhere", {}
    def __init__(self, facts): pass
    def missing(self, points): return points
    def write(self, points): return threading.Event().wait() if points else None
    def kept(self): return None

sys.exit(process.main(sys.argv[1:], runs={"wandb": ("__main__", "Hanging")}, answer_seconds=1.0))
"""


@pytest.mark.rare
def test_a_tracker_that_does_not_answer_ends_its_process_and_loses_nothing(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / JOB
    job.mkdir(parents=True)
    report(job, range(3))
    facts = {"job_id": JOB, "name": "digits", "group": "", "folder": str(tmp_path), "tags": [], "config": {}}
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(job), "wandb"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(facts) + "\n")
    process.stdin.flush()
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    process.stdin.close()
    state = journal.load(journal.path_of(job, "wandb"))
    assert [point.step for point in state.pending] == [0, 1, 2]
    assert state.problem == "it did not answer for 1 s"


@pytest.mark.rare
def test_every_tracker_has_a_run_of_its_own() -> None:
    from orchestrator.analysis.trackers.process import RUNS

    assert RUNS.keys() == TRACKERS.keys() == READ.keys()
    assert all(importlib.util.find_spec(module) is not None for module, _ in RUNS.values())
