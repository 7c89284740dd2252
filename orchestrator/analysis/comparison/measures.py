"""The compared figures of two runs, and the words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orchestrator.analysis.reading.series import Quantity

LOSSES: Final = ("loss", "train_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of a run: its name (that of ``--fail-if``), its unit, and the words of a sentence about a difference.

    ``relative``: whether a difference is given in per cent; for degrees, which have no absolute zero, that has no meaning.
    """

    name: str
    unit: str
    noun: str
    verb: str = "has"
    lower: str = "lower"
    higher: str = "higher"
    relative: bool = True


MEMORY: Final = Measure(name="memory", unit="MiB", noun="memory", verb="uses", lower="less", higher="more")
POWER: Final = Measure(name="power", unit="W", noun="power", verb="draws", lower="less", higher="more")
OF_QUANTITY: Final = {
    Quantity.MEMORY: MEMORY,
    Quantity.UTILIZATION: Measure(name="utilization", unit="%", noun="GPU utilization"),
    Quantity.POWER: POWER,
    Quantity.TEMPERATURE: Measure(name="temperature", unit="°C", noun="temperature of its hottest GPU", relative=False),
    Quantity.CLOCK: Measure(name="clock", unit="MHz", noun="SM clock"),
    Quantity.FAN: Measure(name="fan", unit="%", noun="fan speed"),
}
STEP_TIME: Final = Measure(
    name="step_time", unit="ms", noun="time for a step", verb="takes", lower="less", higher="more"
)
SAMPLES: Final = Measure(
    name="samples_per_second", unit="samples/s", noun="samples a second", verb="processes", lower="fewer", higher="more"
)
TOKENS: Final = Measure(
    name="tokens_per_second", unit="tokens/s", noun="tokens a second", verb="processes", lower="fewer", higher="more"
)
JOULES: Final = Measure(
    name="joules_per_sample", unit="J/sample", noun="energy for a sample", verb="uses", lower="less", higher="more"
)
PEAK_MEMORY: Final = Measure(
    name="peak_memory", unit="MiB", noun="memory at its peak", verb="uses", lower="less", higher="more"
)
ENERGY: Final = Measure(name="energy", unit="J", noun="energy in all", verb="uses", lower="less", higher="more")
DURATION: Final = Measure(name="duration", unit="s", noun="time in all", verb="takes", lower="less", higher="more")
FIXED: Final = (*OF_QUANTITY.values(), STEP_TIME, SAMPLES, TOKENS, JOULES, PEAK_MEMORY, ENERGY, DURATION)


def loss(name: str, axis: str) -> Measure:
    """Return a loss at equal steps, or at equal time since the first report."""
    where = "equal steps" if axis == "step" else "equal time"
    return Measure(name=f"{name}_at_{where.replace(' ', '_')}", unit="", noun=f"{name} at {where}")


def reported(name: str) -> Measure:
    """Return a metric that both scripts report; the prefix ``metric.`` distinguishes it from a figure of orch."""
    taken = any(name == measure.name for measure in FIXED)
    return Measure(name=f"metric.{name}" if taken else name, unit="", noun=name)
