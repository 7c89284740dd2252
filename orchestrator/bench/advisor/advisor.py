"""Runs the advisor: starts ranks, probes the model on one of them, calibrates the machine, and predicts.

On processors any number of ranks can be calibrated; with GPUs, as many as there are. For more there is no prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.bench.advisor.cost_model import (
    Advice,
    Bucket,
    Calibration,
    Crowding,
    Links,
    Probe,
    ProbePoint,
    advise,
)
from orchestrator.bench.benchmark import look_at
from orchestrator.bench.plan import BenchError, RankError, cells_of, check
from orchestrator.bench.processes import RankProcesses, rank_environ
from orchestrator.bench.statistics import relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.bench.plan import BenchRequest, Cell

MAX_STEPS: Final = 20
MAX_SECONDS: Final = 2.0
"""Limits for the steps of the model on one rank and for their time, including those beside neighbours."""
BESIDE_STEPS: Final = 3
"""Steps beside neighbours that count; one before them warms up."""
REFERENCES: Final = ((192, 2), (768, 3))
"""Widths and layers of the models that calibrate the machine; none of the benchmark's own is among them."""
LINK_BYTES: Final = (4096, 65_536, 1 << 20, 4 << 20, 16 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisorOutcome:
    """The advisor's result. ``unknown`` are numbers of ranks that this machine cannot be calibrated for."""

    device: str
    probe: Probe
    calibration: Calibration
    advice: tuple[Advice, ...]
    unknown: tuple[int, ...]


def run_advisor(
    request: BenchRequest, *, environ: Mapping[str, str], logs: Path, note: Callable[[str], None]
) -> AdvisorOutcome:
    """Probe, calibrate and advise. Raises BenchError for an invalid request, or a rank that failed."""
    check(request)
    with RankProcesses(logs, rank_environ(environ, request.threads)) as ranks:
        machine = look_at(ranks, request)
        gpus = machine.gpus
        wanted = sorted({1, *(request.ranks or tuple(n for n in (1, 2, 4, 8) if n <= (gpus or 2)))})
        cells = cells_of(request, wanted)
        known = [n for n in wanted if not gpus or n <= gpus]
        try:
            ranks.start(known[-1])
            ranks.join(known, machine.device)
            probe = probe_model(ranks, request, [c for c in cells if c.ranks in known], crowded=machine.device == "cpu")
            note(f"probe: {probe.steps} steps on one rank in {probe.seconds:.2f}s")
            calibration = calibrate(ranks, request.precision, known, probe)
        except RankError as error:
            raise BenchError(error.message, hint=error.hint) from error
    return AdvisorOutcome(
        device=machine.device,
        probe=probe,
        calibration=calibration,
        advice=advise(cells, probe, calibration),
        unknown=tuple(n for n in wanted if n not in known),
    )


def probe_sizes(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Return at most three batch sizes of one rank to probe: the largest, the smallest, one between them by ratio."""
    needed = sorted({cell.per_rank for cell in cells})
    middle = math.sqrt(needed[0] * needed[-1])
    between = min(needed, key=lambda size: abs(math.log(size / middle)))
    return tuple(dict.fromkeys((needed[-1], needed[0], between)))


def probe_model(ranks: RankProcesses, request: BenchRequest, cells: Sequence[Cell], *, crowded: bool) -> Probe:
    """Make at most 20 steps and 2 s of the model on one rank; ``crowded``: some of them beside those of the other ranks."""
    most = max(cell.ranks for cell in cells)
    beside = crowded and most > 1
    common = {"model": request.model, "seed": request.seed, "precision": request.precision}
    sizes = probe_sizes(cells)
    limit = MAX_STEPS - (1 + BESIDE_STEPS) * beside
    (answer,) = ranks.ask(
        {"do": "probe", **common, "sizes": list(sizes), "most_steps": limit, "most_seconds": MAX_SECONDS}, 1
    )
    probe = read_probe(answer)
    point = min(probe.points, key=lambda one: abs(one.batch - sizes[-1]))
    if not beside or probe.seconds + (1 + BESIDE_STEPS) * most * point.step > MAX_SECONDS:
        return probe
    command = {"do": "beside", **common, "ranks": most, "batch": point.batch, "steps": BESIDE_STEPS}
    taken = ranks.ask(command, most)[0]
    return replace(
        probe,
        crowding=Crowding(
            ranks=most,
            factor=max(1.0, fmean(taken) / point.step),
            error=math.hypot(point.error, relative_error(taken)),
        ),
        steps=probe.steps + 1 + len(taken),
        seconds=probe.seconds + fmean(taken) * (1 + len(taken)),
    )


def read_probe(answer: Mapping[str, Any]) -> Probe:
    """Build a probe from a rank's measurements. Without time for steps through DDP, one bucket at the end of backward is assumed."""
    points = sorted(
        (
            ProbePoint(
                batch=one["batch"],
                step=fmean(one["steps"]),  # throughput is about means, also where other work interrupts a step
                backward=median(one["backwards"]),
                error=relative_error(one["steps"]),
            )
            for one in answer["points"]
        ),
        key=lambda point: point.batch,
    )
    smallest = min(answer["points"], key=lambda one: int(one["batch"]))
    wrapper = max(0.0, median(answer["wrapped"]) - median(smallest["steps"])) if answer["wrapped"] else 0.0
    buckets = tuple(Bucket(ready=ready, bytes=size) for ready, size in answer["buckets"])
    return Probe(
        parameters=answer["parameters"],
        gradient_bytes=answer["gradient_bytes"],
        points=tuple(points),
        wrapper=wrapper,
        buckets=buckets or (Bucket(ready=1.0, bytes=answer["gradient_bytes"]),),
        steps=answer["steps"],
        seconds=answer["seconds"],
    )


def calibrate(ranks: RankProcesses, precision: str, known: Sequence[int], probe: Probe) -> Calibration:
    """Measure each number of ranks: slowdown and waiting by two reference models, links by five sizes, overlap."""
    slowdowns: dict[int, list[tuple[int, float]]] = {n: [] for n in known}
    waits: dict[int, list[tuple[float, float]]] = {n: [] for n in known}
    links: dict[int, Links] = {}
    tiny = {1: 0.0}
    for n in known:
        if n > 1:
            seconds = _slowest(ranks.ask({"do": "all_reduce", "ranks": n, "sizes": [4, *LINK_BYTES]}, n))
            hides = ranks.ask({"do": "overlap", "ranks": n, "size": max(4096, probe.gradient_bytes)}, n)
            tiny[n] = seconds[0]
            links[n] = Links(points=tuple(zip(LINK_BYTES, seconds[1:], strict=True)), hides=fmean(hides))
    for width, layers in REFERENCES:
        command = {"do": "reference", "width": width, "layers": layers, "precision": precision}
        alone: float | None = None
        for n in known:
            answers = ranks.ask({**command, "ranks": n}, n)
            if alone is None:
                alone = answers[0]["mean"]  # the probed steps already include what slows one rank down
            mean = fmean(answer["mean"] for answer in answers)
            slowdowns[n].append((int(answers[0]["bytes"]), max(mean / alone, 0.5)))
            waits[n].append((mean, max(0.0, answers[0]["waiting"] - mean - tiny[n]) if n > 1 else 0.0))
    return Calibration(
        links=links,
        slowdowns={n: tuple(points) for n, points in slowdowns.items()},
        waits={n: tuple(sorted(points)) for n, points in waits.items()},
    )


def _slowest(answers: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*answers, strict=True)]
