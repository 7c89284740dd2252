"""Advice for a job's own script: its speed-up on more ranks, each with the script's batch.

    throughput(n) / throughput(1) = n * step(1) / step(n)

The script runs unchanged for a few optimizer steps on one rank (``rank/script.py``). Its batch belongs to a rank: more ranks make the
global batch larger. ``orch advise --model`` compares at equal global batch instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.bench.advisor.advisor import MAX_SECONDS, MAX_STEPS, calibrate
from orchestrator.bench.advisor.cost_model import Bucket, Calibration, Prediction, Probe, ProbePoint, predict
from orchestrator.bench.benchmark import look_at
from orchestrator.bench.plan import BenchError, Cell, RankError, check
from orchestrator.bench.processes import RankProcesses, last_line, rank_environ
from orchestrator.bench.statistics import relative_error
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.bench.plan import BenchRequest

MAX_COPIED_BYTES: Final = 500 * 10**6
START_SECONDS: Final = 600.0
_FIRST_BUCKET: Final = 1 << 20
_BUCKET: Final = 25 << 20
_MAX_ANSWER: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A job's entry point as the probe runs it. ``python`` is the interpreter, ``kind`` script or module, ``directory`` its working directory."""

    python: str
    kind: str
    target: str
    args: tuple[str, ...]
    directory: Path
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProbe:
    """Measurements of the script's steps: the probe (its batch is that of one rank, counted as 1), and the device of its parameters."""

    probe: Probe
    device: str


def probe_script(script: Script, log: Path, *, start_seconds: float = START_SECONDS) -> ScriptProbe:
    """Run the script and read its measurements. Raises BenchError for one that fails, makes no step, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="orch-advise-") as scratch:
        work = Path(scratch, "work")
        _copy(script.directory, work)
        answer = _run(script, work, Path(scratch, "checkpoints"), log, start_seconds)
    return read_script_probe(answer)


def _copy(directory: Path, target: Path) -> None:
    """Copy the directory. Raises BenchError where it is too large."""
    if trees.measure(directory, trees.Problems()).bytes > MAX_COPIED_BYTES:
        raise BenchError(
            f"{directory} holds more than {MAX_COPIED_BYTES // 10**6} MB, and the probe runs in a copy of it",
            hint="keep data outside of working_dir and read it by an absolute path",
        )
    problems = trees.Problems()
    trees.copy(directory, target, problems)
    if problems:
        raise BenchError(
            f"{directory} cannot be copied: {problems}", hint="make its files readable, or move them elsewhere"
        )


def _run(script: Script, work: Path, checkpoints: Path, log: Path, start_seconds: float) -> Mapping[str, Any]:
    answers, theirs = os.pipe()
    limits = json.dumps({"most_steps": MAX_STEPS, "most_seconds": MAX_SECONDS})
    command = [script.python, rank_script(), str(theirs), limits]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    environ = {
        **script.environ,
        **alone,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ORCH_CHECKPOINT_DIR": str(checkpoints),
    }
    with os.fdopen(answers, "rb") as pipe:
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, script.kind, script.target, *script.args],
                    cwd=work,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        try:
            code = process.wait(start_seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(
                f"the script made fewer than {MAX_STEPS} optimizer steps within {start_seconds:g}s",
                hint=f"its output is in {log}; try it with less data",
            ) from None
        finally:
            _end(process)
        text = pipe.read(_MAX_ANSWER)
    if not text:
        raise BenchError(
            f"the script ended with {code} before it had made its steps: {last_line(log)}",
            hint=f"its output is in {log}",
        )
    found: Mapping[str, Any] = json.loads(text)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script's session: data loaders are processes of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def rank_script() -> str:
    """Return the path of the program that times the script; it runs by path, as its interpreter may have only torch."""
    return str(Path(__file__).parents[1] / "rank" / "script.py")


def read_script_probe(answer: Mapping[str, Any]) -> ScriptProbe:
    """Build a probe from the script's output. Raises BenchError where it made no step that counts."""
    steps, sizes = list(answer["steps"]), [int(size) for size in answer["gradient_bytes"]]
    if not steps:
        raise BenchError(
            "the script ended before it had made enough optimizer steps to time one",
            hint="give it more data or epochs; steps of optimizers that are not torch.optim's cannot be seen",
        )
    point = ProbePoint(batch=1, step=median(steps), backward=median(answer["backwards"]), error=relative_error(steps))
    probe = Probe(
        parameters=0,
        gradient_bytes=sum(sizes),
        points=(point,),
        wrapper=0.0,
        buckets=buckets_of(sizes),
        steps=len(steps),
        seconds=sum(steps),
    )
    return ScriptProbe(probe=probe, device=str(answer["device"]))


def buckets_of(sizes: Sequence[int]) -> tuple[Bucket, ...]:
    """Return DDP's buckets of parameters of these sizes: filled from the last one on, each ready once its gradients are computed.

    The share of backward that a gradient takes is unknown from outside: it is assumed proportional to its bytes.
    """
    total = sum(sizes)
    found: list[Bucket] = []
    held = done = 0
    for size in reversed(sizes):
        held += size
        done += size
        if held >= (_BUCKET if found else _FIRST_BUCKET):
            found.append(Bucket(ready=done / total, bytes=held))
            held = 0
    if held or not found:
        found.append(Bucket(ready=1.0, bytes=held))
    return tuple(found)


PAYS: Final = 0.5
"""Least efficiency at which more ranks are worth their GPUs: below it, every two ranks do less than one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAdvice:
    """Predictions by ranks, the number to take, and the numbers that this machine cannot be calibrated for.

    ``certain``: the interval of each prediction's efficiency lies on one side of ``PAYS``.
    """

    device: str
    probe: Probe
    calibration: Calibration
    predictions: tuple[Prediction, ...]
    choice: Prediction
    certain: bool
    unknown: tuple[int, ...]

    def efficiency(self, prediction: Prediction) -> float:
        """Return a prediction's throughput per rank, as a share of one rank's."""
        return prediction.throughput.value / self.predictions[0].throughput.value / prediction.cell.ranks

    @property
    def shown(self) -> Prediction:
        """Prediction that explains the choice: its own, or that of the widest gang where more ranks do not pay."""
        widest = self.predictions[-1]
        return widest if widest.cell.ranks > self.choice.cell.ranks else self.choice

    def interval(self, prediction: Prediction) -> list[float] | None:
        """Return the interval of a prediction's speed-up; None for one rank, where it is 1, or without an interval."""
        one, ends = self.predictions[0].throughput.value, prediction.throughput.bounds
        return None if ends is None or prediction.cell.ranks == 1 else [end / one for end in ends]


def run_script_advisor(
    script: Script,
    *,
    ranks: Sequence[int],
    threads: int,
    precision: str,
    logs: Path,
    note: Callable[[str], None],
) -> ScriptAdvice:
    """Probe the script on one rank, calibrate the machine, and predict. Raises BenchError for a script that cannot be timed."""
    environ = rank_environ(script.environ, threads)
    found = probe_script(replace(script, environ=environ), logs / "script.log")
    note(f"probe: {found.probe.steps} optimizer steps of the script in {found.probe.seconds:.2f}s, on {found.device}")
    known, calibration = _calibrated(found.probe, found.device, ranks, precision, environ, logs)
    # All predictions use the same steps of one rank: their error cancels in the ratio.
    exact = replace(found.probe, points=tuple(replace(point, error=0.0) for point in found.probe.points))
    predictions = tuple(predict(Cell(batch=n, ranks=n), exact, calibration) for n in known)
    return advise_script(found.device, found.probe, calibration, predictions, sorted(set(ranks) - set(known)))


def _calibrated(
    probe: Probe, device: str, ranks: Sequence[int], precision: str, environ: Mapping[str, str], logs: Path
) -> tuple[list[int], Calibration]:
    """Return the numbers of ranks that this machine has devices for, including 1, and the calibration for them."""
    try:
        with RankProcesses(logs, environ) as processes:
            processes.start(1)
            (seen,) = processes.ask({"do": "describe"}, 1)
            most = len(seen["gpus"]) if device == "cuda" else max(ranks)
            known = sorted({1, *(n for n in ranks if n <= most)})
            processes.start(known[-1])
            processes.join(known, device)
            return known, calibrate(processes, precision, known, probe)
    except RankError as error:
        raise BenchError(error.message, hint=error.hint) from error


def advise_script(
    device: str, probe: Probe, calibration: Calibration, predictions: tuple[Prediction, ...], unknown: Sequence[int]
) -> ScriptAdvice:
    """Choose the largest number of ranks that is worth its GPUs. The first prediction is that of one rank."""
    one = predictions[0].throughput.value

    def efficiency(prediction: Prediction, throughput: float) -> float:
        return throughput / one / prediction.cell.ranks

    choice = [p for p in predictions if efficiency(p, p.throughput.value) >= PAYS][-1]
    certain = all(
        efficiency(p, p.throughput.low or 0.0) >= PAYS or efficiency(p, p.throughput.high or 0.0) < PAYS
        for p in predictions[1:]
    )
    return ScriptAdvice(
        device=device,
        probe=probe,
        calibration=calibration,
        predictions=predictions,
        choice=choice,
        certain=certain,
        unknown=tuple(unknown),
    )


def script_sentence(advice: ScriptAdvice) -> str:
    """Return the advice with its reason, as a sentence for people."""
    chosen, shown = advice.choice, advice.shown
    megabytes = advice.probe.gradient_bytes / 1e6
    reason = (
        f"on {shown.cell.ranks} ranks, reducing {megabytes:.3g} MB of gradients adds {shown.exposed * 1e3:.3g} ms to"
        f" {shown.compute * 1e3:.3g} ms of computation in each step ({advice.efficiency(shown):.0%} efficiency)"
        if shown.cell.ranks > 1
        else "no other number of ranks could be measured"
    )
    count = chosen.cell.ranks
    what = f"worth {plural(count, 'rank')}: {reason}"
    return (
        what
        if advice.certain
        else f"{what}; I can't tell for certain: measure it with resources.num_workers in job.yaml"
    )


def script_json(advice: ScriptAdvice) -> dict[str, Any]:
    """Return the advice as JSON values, for programs."""
    return {
        "policy": "measured",
        "batch_size_is": "per rank: the script's own",
        "device": advice.device,
        "probe": {
            "steps": advice.probe.steps,
            "seconds": advice.probe.seconds,
            "gradient_bytes": advice.probe.gradient_bytes,
        },
        "ranks": advice.choice.cell.ranks,
        "certain": advice.certain,
        "reason": script_sentence(advice),
        "predictions": [
            {
                "ranks": one.cell.ranks,
                "speed_up": one.throughput.value / advice.predictions[0].throughput.value,
                "speed_up_interval_95": advice.interval(one),
                "efficiency": advice.efficiency(one),
                "step_ms": one.step * 1e3,
                "compute_ms": one.compute * 1e3,
                "communication_ms": one.communication * 1e3,
                "exposed_communication_ms": one.exposed * 1e3,
            }
            for one in advice.predictions
        ],
        "unknown_ranks": list(advice.unknown),
    }


SMALL_MOST_PARAMETERS: Final = 1_000_000
MEDIUM_MOST_PARAMETERS: Final = 5_000_000
LARGE_LEAST_PARAMETERS: Final = 10_000_000
MEDIUM_LEAST_BATCH: Final = 128
LARGE_LEAST_BATCH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdAdvice:
    """Whether several GPUs are used: yes, no, or None where the thresholds recommend a measurement."""

    several: bool | None
    reason: str


def advise_by_thresholds(parameters: int, batch: int) -> ThresholdAdvice:
    """Return the thresholds' advice for a model and a global batch."""
    if parameters < SMALL_MOST_PARAMETERS:
        return ThresholdAdvice(several=False, reason=f"{parameters} parameters: the model is too small")
    if parameters < MEDIUM_MOST_PARAMETERS:
        if batch < MEDIUM_LEAST_BATCH:
            return ThresholdAdvice(several=False, reason=f"a batch of {batch} is too small for {parameters} parameters")
        return ThresholdAdvice(several=None, reason="a medium model may gain from a large batch: measure")
    if parameters < LARGE_LEAST_PARAMETERS:
        return ThresholdAdvice(several=None, reason=f"{parameters} parameters lie between the thresholds: measure")
    if batch < LARGE_LEAST_BATCH:
        return ThresholdAdvice(
            several=False, reason=f"a batch of {batch} is too small: use {LARGE_LEAST_BATCH} or more"
        )
    return ThresholdAdvice(several=True, reason=f"{parameters} parameters gain from several GPUs")


def run_thresholds(
    request: BenchRequest, *, environ: Mapping[str, str], logs: Path
) -> tuple[int, dict[int, ThresholdAdvice]]:
    """Return the parameter count, and the advice by global batch. Raises BenchError for a model that cannot be made."""
    check(request)
    with RankProcesses(logs, rank_environ(environ, request.threads)) as ranks:
        parameters = look_at(ranks, request).parameters
    return parameters, {batch: advise_by_thresholds(parameters, batch) for batch in sorted(request.batch_sizes)}
