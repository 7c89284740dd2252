"""A run's figures as text: gputop's summary, the breakdown by GPU, and the run's time and energy.

MB here are 2**20 bytes, as in the files of gputop and related tools, whose users compare the texts.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

from orchestrator.analysis.measure.run_summary import JOULES_PER_KWH
from orchestrator.analysis.reading.series import SHOWN, Quantity
from orchestrator.units import number, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.analysis.measure.intervals import Interval
    from orchestrator.analysis.measure.run_summary import GpuSummary, RunSummary, Speed
    from orchestrator.analysis.measure.windows import BalanceAndSpeed
    from orchestrator.gpu.load import Spread

TITLE: Final = "GPU Performance Summary"


def summary_text(run: RunSummary) -> str:
    """Return the content of ``NAME_summary.txt``."""
    lines = [TITLE, "=" * len(TITLE), "", *_head(run), ""]
    for gpu in run.gpus:
        lines += [*_gpu(gpu), ""]
    breakdown = list(_breakdown(run))
    if breakdown:
        lines += [f"{run.name} - Per-GPU Breakdown:", *(f"    {line}" for line in breakdown), ""]
    lines += [f"{name}: {text}" for name, text in figures(run)]
    return "\n".join(lines) + "\n"


def _head(run: RunSummary) -> Iterator[str]:
    yield f"Run: {run.name}"
    yield f"Duration: {run.seconds:.1f} s"
    yield f"Start: {moment(run.start)}"
    yield f"End: {moment(run.end)}"
    yield f"Readings: {run.samples} of {plural(len(run.gpus), 'GPU')}"
    for note in notes(run):
        yield f"Note: {note}"


def notes(run: RunSummary) -> Iterator[str]:
    """Return notes about the files, to read before their figures are used."""
    if run.repaired:
        yield "the end of the file is cut off; the complete entries before it are used"
    if run.dropped:
        yield f"{plural(run.dropped, 'entry', 'entries')} could not be read and {'is' if run.dropped == 1 else 'are'} left out"
    if not run.gpus:
        yield "no GPU was sampled"


def moment(at: float | None) -> str:
    """Return the local time to the second."""
    return "unknown" if at is None else dt.datetime.fromtimestamp(at).isoformat(sep=" ", timespec="seconds")  # noqa: DTZ006 - of the reader's clock


def _gpu(gpu: GpuSummary) -> Iterator[str]:
    yield f"{gpu.label}: {gpu.model or 'unknown model'}" + (f" ({gpu.uuid})" if gpu.uuid else "")
    yield f"Duration: {gpu.seconds:.1f} s, {plural(gpu.samples, 'reading')}"
    for quantity, found in gpu.quantities.items():
        shown = SHOWN[quantity]
        name = f"{shown.name[0].upper()}{shown.name[1:]} ({shown.unit})"
        yield f"{name}: average {found.mean:.1f}, max {found.maximum:.1f}, min {found.minimum:.1f}"
    if gpu.energy_joules is not None:
        yield f"Energy (J): {gpu.energy_joules:.1f} by {'the counter' if gpu.energy_counted else 'integrating power'}"
    if gpu.throttled_samples:
        yield f"Throttled: in {plural(gpu.throttled_samples, 'reading')}"


def _breakdown(run: RunSummary) -> Iterator[str]:
    having = [(gpu.label, gpu.quantities[Quantity.MEMORY]) for gpu in run.gpus if Quantity.MEMORY in gpu.quantities]
    for label, memory in having:
        yield f"{label}: {memory.mean:.1f} MB (±{memory.std:.1f})"
    if having:
        yield f"Total:  {sum(memory.mean for _, memory in having):.1f} MB"
    for spread in sorted(run.balance.spreads, key=lambda one: one.quantity != "memory"):
        yield balance_line(spread)


def balance_line(spread: Spread) -> str:
    """Return ``Balance: CV = 0.3% (Excellent)``; quantities other than memory with their name."""
    name = "Balance" if spread.quantity == "memory" else f"Balance of {spread.quantity}"
    least = "" if spread.min_per_median is None else f", least/median {spread.min_per_median:.2f}"
    return f"{name}: CV = {100 * spread.cv:.1f}% ({spread.band.capitalize()}){least if name != 'Balance' else ''}"


def figures(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Return (name, text) of every known figure of the run as a whole."""
    if run.power_watts is not None:
        yield "Power", f"{run.power_watts:.1f} W on average, all GPUs together"
    if run.energy_joules is not None:
        counted = sum(gpu.energy_counted for gpu in run.gpus)
        how = (
            "by the counters"
            if counted == len(run.gpus)
            else "by integrating power"
            if not counted
            else "by counters and power"
        )
        yield "Energy", f"{energy(run.energy_joules)} {how}"
    if run.cost is not None:
        yield "Cost of the energy", number(run.cost)
    for phase, joules in run.energy_by_phase.items():
        yield f"Energy, {phase}", f"{energy(joules)} ({100 * joules / (run.energy_joules or joules):.1f} %)"
    if run.speed is not None:
        yield from _speed(run.speed)
    if len(run.gpus) > 1:
        yield "Balance and speed", relation_text(run.relation)
    if run.fragmentation is not None:
        found = run.fragmentation
        yield (
            "Memory reserved and not handed out",
            (
                f"{100 * found.mean_ratio:.1f} % on average, {100 * found.last_ratio:.1f} % at the end,"
                f" {100 * found.change_per_hour:+.1f} percentage points an hour"
            ),
        )


def energy(joules: float) -> str:
    """Return joules, with kilowatt-hours for large values."""
    return f"{joules:.1f} J" + (f" ({joules / JOULES_PER_KWH:.3f} kWh)" if joules > JOULES_PER_KWH / 100 else "")


def _speed(speed: Speed) -> Iterator[tuple[str, str]]:
    yield "Steps", f"{speed.steps} in {plural(speed.attempts, 'attempt')}"
    if speed.step_seconds is not None:
        yield "Step time", with_bounds(speed.step_seconds, factor=1e3, unit="ms")
    for name, value, unit in (
        ("Samples", speed.samples_per_second, "samples/s"),
        ("Tokens", speed.tokens_per_second, "tokens/s"),
        ("Energy of a sample", speed.joules_per_sample, "J/sample"),
    ):
        if value is not None:
            yield name, f"{number(value)} {unit}"
    if speed.last_loss is not None:
        yield "Last loss", number(speed.last_loss)
    if speed.best_accuracy is not None:
        yield f"Best {speed.best_accuracy[0]}", number(speed.best_accuracy[1])


def with_bounds(interval: Interval, *, factor: float = 1.0, unit: str = "") -> str:
    """Return a figure with its bounds, where there are any: 12.3 ms (95 %: 12.1 to 12.5)."""
    text = f"{number(factor * interval.value)} {unit}".rstrip()
    if interval.low is None or interval.high is None:
        return f"{text} (too few readings for an interval)"
    low, high = sorted((factor * interval.low, factor * interval.high))
    return f"{text} ({100 * interval.confidence:.0f} %: {number(low)} to {number(high)})"


def relation_text(relation: BalanceAndSpeed | None) -> str:
    """Return a sentence about the gain of an even load, or that these data show no relation."""
    if relation is None:
        return "not related: too few windows of time have both a CV and step times, or neither changed"
    gain, of = relation.gain, f"{relation.windows} windows, CV of {relation.quantity}"
    if gain.low is None or gain.high is None:
        return f"these data are too short to say whether an uneven load cost speed ({of})"
    bounds = f"{100 * gain.low:.1f} to {100 * gain.high:.1f} %"
    if gain.low > 0.0:
        return f"steps were slower while the load was uneven; an even load would have saved about {100 * gain.value:.1f} % of a step ({bounds}; {of})"
    if gain.high < 0.0:
        return f"steps were faster while the load was uneven ({of}): something else drives both"
    return f"these data do not show that an uneven load cost speed ({bounds} of a step; {of})"
