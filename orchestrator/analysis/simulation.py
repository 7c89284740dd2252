"""Compares scheduling policies on one trace, and draws their waiting times, busy GPUs and waiting jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.plots import colour, dash, finish, new_figure, save, time_axis
from orchestrator.core.cluster import Node
from orchestrator.core.simulation import CHECKPOINT_SECONDS, POLICIES, Figures, Simulation, figures_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from orchestrator.core.simulation import Outcome, TraceJob

MOST_NODES: Final = 100_000
_PLENTY: Final = 1e9
"""CPUs and memory of a simulated node: a trace does not contain its jobs' needs of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome and figures of one policy."""

    policy: str
    outcome: Outcome
    figures: Figures


def parse_nodes(text: str) -> dict[str, Node]:
    """Return nodes for ``64x8`` (64 of 8 GPUs), or several kinds as ``64x8,4x16``. Raises ValueError."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})x(\d{1,3})\s*", part)
        if found is None or int(found[1]) < 1 or int(found[2]) < 1:
            raise ValueError(f"{part!r} is not a number of nodes: write 64x8 for 64 nodes of 8 GPUs, or 64x8,4x16")
        sizes += [int(found[2])] * int(found[1])
    if len(sizes) > MOST_NODES:
        raise ValueError(f"{len(sizes)} nodes are too many: at most {MOST_NODES}")
    names = [f"node-{number:06}" for number in range(1, len(sizes) + 1)]
    return {
        name: Node(id=name, name=name, gpus=gpus, cpus=_PLENTY, memory_bytes=2**62)
        for name, gpus in zip(names, sizes, strict=True)
    }


def parse_policies(text: str) -> list[str]:
    """Return the names of policies, each once. Raises ValueError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; one of: {', '.join(POLICIES)}")
    return names


def compare(
    trace: Sequence[TraceJob],
    nodes: dict[str, Node],
    policies: Iterable[str],
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Result]:
    """Run the trace under each policy."""
    results = []
    for name in policies:
        outcome = Simulation(trace, nodes, name, checkpoint_seconds=checkpoint_seconds).run()
        results.append(Result(policy=name, outcome=outcome, figures=figures_of(outcome)))
    return results


def write_picture(results: Sequence[Result], target: Path) -> Path:
    """Draw three panels with a line for each policy. Raises PlotError without matplotlib, and OSError."""
    figure = new_figure(11, 9)
    waits, busy, queued = figure.subplots(3, 1)
    start = min((r.outcome.samples[0][0] for r in results if r.outcome.samples), default=0.0)
    end = max((r.outcome.samples[-1][0] for r in results if r.outcome.samples), default=0.0)
    axis = time_axis(start, end - start)
    for place, result in enumerate(results):
        look = {"color": colour(place), "linestyle": dash(place), "label": result.policy}
        ordered = np.sort(np.array([one.wait for one in result.outcome.ran])) / 3600
        waits.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), **look)
        samples = np.array(result.outcome.samples, dtype=float).reshape(-1, 3)
        times = axis.of(samples[:, 0])
        busy.plot(times, samples[:, 1], **look)
        queued.plot(times, samples[:, 2], **look)
    waits.set_xscale("symlog", linthresh=0.01)
    finish(waits, y="share of jobs", x="wait (h)")
    finish(busy, y="busy GPUs")
    finish(queued, y="waiting jobs", x=axis.label)
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize="small", frameon=False)
    return save(figure, target)
