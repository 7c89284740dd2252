"""Text and JSON of the advisor's answer: predictions, a sentence per batch size, and the batch from which ranks pay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.bench.advisor.advice import MOST_PAYING_BATCH, advice_json, efficiency, paying_batch, sentence
from orchestrator.bench.advisor.script_advice import script_sentence
from orchestrator.cli.render.table import Cell, Column, render_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.bench.advisor.advisor import AdvisorOutcome
    from orchestrator.bench.advisor.script_advice import ScriptAdvice
    from orchestrator.bench.advisor.thresholds import ThresholdAdvice
    from orchestrator.cli.console import Console

COLUMNS = (
    Column("GLOBAL BATCH", right=True),
    Column("PER RANK", right=True, weight=50),
    Column("RANKS", right=True),
    Column("PREDICTED SAMPLES/S", right=True),
    Column("95 %", weight=70),
    Column("EFFICIENCY", right=True, weight=80),
    Column("COMPUTE", right=True, weight=40),
    Column("EXPOSED", right=True, weight=60),
)


def advice_lines(console: Console, outcome: AdvisorOutcome) -> list[str]:
    """Return the advice as lines for people."""
    rows = []
    for advice in outcome.advice:
        for one in advice.predictions:
            share = efficiency(one, advice.single)
            low, high = one.throughput.low or 0.0, one.throughput.high or 0.0
            rows.append(
                (
                    Cell(str(advice.batch)),
                    Cell(str(one.cell.per_rank)),
                    Cell(str(one.cell.ranks)),
                    Cell(f"{one.throughput.mean:.0f}"),
                    Cell(f"{low:.0f}-{high:.0f}", ("dim",)),
                    Cell("" if share is None else f"{share:.0%}"),
                    Cell(f"{one.compute * 1e3:.2f}ms"),
                    Cell(f"{one.exposed * 1e3:.2f}ms" if one.cell.ranks > 1 else ""),
                )
            )
    return [*render_table(console, COLUMNS, rows), *_sentences(outcome)]


def _sentences(outcome: AdvisorOutcome) -> Iterator[str]:
    for advice in outcome.advice:
        yield sentence(advice, outcome.probe)
    for ranks in sorted(outcome.calibration.links):
        batch = paying_batch(ranks, outcome.probe, outcome.calibration)
        if batch is None:
            yield f"{ranks} ranks: predicted to pay at no global batch up to {MOST_PAYING_BATCH}"
        else:
            yield f"{ranks} ranks: predicted to pay from a global batch of {batch} on"
    for ranks in outcome.unknown:
        yield f"{ranks} ranks: I can't tell: this machine has fewer GPUs, so their links cannot be measured here"


def outcome_json(model: str, outcome: AdvisorOutcome) -> dict[str, Any]:
    """Return the advice for programs."""
    probe, calibration = outcome.probe, outcome.calibration
    return {
        "policy": "measured",
        "model": model,
        "parameters": probe.parameters,
        "device": outcome.device,
        "probe": {"steps": probe.steps, "seconds": probe.seconds, "gradient_bytes": probe.gradient_bytes},
        "links": {
            str(ranks): {"hides": links.hides, "all_reduce_seconds": {str(size): at for size, at in links.points}}
            for ranks, links in calibration.links.items()
        },
        "advice": [advice_json(one, probe) for one in outcome.advice],
        "pays_from_batch_size": {str(n): paying_batch(n, probe, calibration) for n in sorted(calibration.links)},
        "unknown_ranks": list(outcome.unknown),
    }


def threshold_lines(parameters: int, found: Mapping[int, ThresholdAdvice]) -> list[str]:
    """Return the thresholds' advice, a line per batch size."""
    words = {True: "several GPUs", False: "one GPU", None: "I can't tell"}
    head = f"{parameters} trainable parameters; by thresholds alone, nothing was measured"
    return [head, *(f"global batch {batch}: {words[one.several]}: {one.reason}" for batch, one in found.items())]


def thresholds_json(model: str, parameters: int, found: Mapping[int, ThresholdAdvice]) -> dict[str, Any]:
    """Return the thresholds' advice for programs."""
    return {
        "policy": "thresholds",
        "model": model,
        "parameters": parameters,
        "advice": [
            {"batch_size": batch, "multi_gpu": one.several, "reason": one.reason} for batch, one in found.items()
        ],
    }


SCRIPT_COLUMNS = (
    Column("RANKS", right=True),
    Column("SPEED-UP", right=True),
    Column("95 %", weight=70),
    Column("EFFICIENCY", right=True, weight=80),
    Column("STEP", right=True, weight=60),
    Column("COMPUTE", right=True, weight=40),
    Column("EXPOSED", right=True, weight=60),
)


def script_lines(console: Console, advice: ScriptAdvice) -> list[str]:
    """Return the advice for a job's script as lines for people."""
    one = advice.predictions[0].throughput.mean
    rows = [
        (
            Cell(str(each.cell.ranks)),
            Cell(f"{each.throughput.mean / one:.2f}x"),
            Cell("-".join(f"{end:.2f}" for end in advice.interval(each) or ()), ("dim",)),
            Cell(f"{advice.efficiency(each):.0%}"),
            Cell(f"{each.step * 1e3:.2f}ms"),
            Cell(f"{each.compute * 1e3:.2f}ms"),
            Cell(f"{each.exposed * 1e3:.2f}ms" if each.cell.ranks > 1 else ""),
        )
        for each in advice.predictions
    ]
    unknown = [
        f"{ranks} ranks: I can't tell: this machine has fewer GPUs, so their links cannot be measured here"
        for ranks in advice.unknown
    ]
    return [*render_table(console, SCRIPT_COLUMNS, rows), script_sentence(advice), *unknown]
