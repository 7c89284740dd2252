"""Advice for a job's own script: its speed-up on more ranks, each with the script's batch.

    throughput(n) / throughput(1) = n * step(1) / step(n)

The script's batch belongs to a rank: more ranks make the global batch larger. ``orch advise --model`` compares at equal global batch instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.bench.advisor.advisor import calibrate
from orchestrator.bench.advisor.cost_model import Calibration, Prediction, Probe, predict
from orchestrator.bench.advisor.script_probe import Script, probe_script
from orchestrator.bench.errors import BenchError, RankError
from orchestrator.bench.plan import Cell
from orchestrator.bench.processes import RankProcesses, rank_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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
        return prediction.throughput.mean / self.predictions[0].throughput.mean / prediction.cell.ranks

    @property
    def shown(self) -> Prediction:
        """Prediction that explains the choice: its own, or that of the widest gang where more ranks do not pay."""
        widest = self.predictions[-1]
        return widest if widest.cell.ranks > self.choice.cell.ranks else self.choice

    def interval(self, prediction: Prediction) -> list[float] | None:
        """Return the interval of a prediction's speed-up; None for one rank, where it is 1, or without an interval."""
        one, ends = self.predictions[0].throughput.mean, prediction.throughput.as_json()
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
    one = predictions[0].throughput.mean

    def efficiency(prediction: Prediction, throughput: float) -> float:
        return throughput / one / prediction.cell.ranks

    choice = [p for p in predictions if efficiency(p, p.throughput.mean) >= PAYS][-1]
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
    what = f"worth {count} rank{'s' * (count != 1)}: {reason}"
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
                "speed_up": one.throughput.mean / advice.predictions[0].throughput.mean,
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
