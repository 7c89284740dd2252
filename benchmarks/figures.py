"""Writes the tables of figures from the newest result of each measure: ``python -m benchmarks.figures``.

docs/figures.md has all rows, the README those of ``HEADLINES``. A figure without a committed result is in neither. An aim that is missed
is shown as one that is met, and a row whose interval overlaps a peer's says that no difference was shown. A test compares both pages with the results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "figures.md"
HEADLINES: Final = (
    "command to the first optimizer step, 2 ranks, gloo; nothing ran before",
    "the same with orch's daemon running before",
    "SIGKILL of a rank to the next new step, of a script that saves at every step",
    "`save()` of 100 M parameters with Adam: training stands still",
    "processor time outside the ranks",
)


@dataclass(frozen=True, slots=True)
class Aim:
    """The most that a value, at a path of keys, may be. It is met if the upper end of the value's interval is not above it.

    The value is shown with the text if it is not the row's own: a ratio to a peer.
    """

    text: str
    path: tuple[str, ...]
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line: the paths of its values in a result, and their format. ``ours`` and ``peers`` are paths of keys.

    ``others`` are names and paths of peers that are neither torchrun nor Ray; they are shown after the label.
    """

    label: str
    measure: str
    ours: tuple[str, ...] = ("ours",)
    peers: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    aims: tuple[Aim, ...] = ()
    unit: str = "s"
    scale: float = 1.0
    digits: int = 2


SAVES: Final = (("torch.save", " with fsync", 0.05), ("dcp.async_save", "", 0.5))
TORCHRUN_AND_RAY: Final = (("peers", "torchrun"), ("peers", "ray_train"))
ROWS: Final = (
    Row(
        label="command to the first optimizer step, 2 ranks, gloo; nothing ran before",
        measure="start_latency",
        ours=("cold",),
        peers=TORCHRUN_AND_RAY,
    ),
    Row(
        label="the same with orch's daemon running before",
        measure="start_latency",
        aims=(Aim("0.3 s", ("ours",), 0.3),),
    ),
    Row(
        label="SIGKILL of a rank to the next new step, of a script that saves at every step",
        measure="recovery",
        peers=TORCHRUN_AND_RAY,
        aims=(Aim("0.2 s", ("ours",), 0.2),),
    ),
    Row(label="the same with the rank's actor killed", measure="recovery", ours=("ours_actor_killed",)),
    Row(
        label="share of the time that moved training forward, a rank killed every minute",
        measure="goodput",
        peers=TORCHRUN_AND_RAY,
        unit="",
        digits=3,
    ),
    *(
        Row(
            label=f"a step of {length}, {ranks}",
            measure="overhead",
            ours=(*path, "ours"),
            peers=((*path, "peers", "torchrun"), ()),
            unit="ms",
            scale=1e3,
            digits=2,
        )
        for ranks, first in (("both cores training", ()), ("one core free", ("free_core",)))
        for length, path in (("2 ms", first), ("50 ms", (*first, "also")))
    ),
    Row(
        label="processor time outside the ranks",
        measure="overhead",
        ours=("cpu_outside_percent",),
        others=(("Ray alone, two idle actors", ("bare_ray_percent",)),),
        unit="% of a core",
    ),
    Row(label="`orch status`, the whole process", measure="cli"),
    Row(label="`orch gpus`, the slowest command that asks a daemon", measure="cli", ours=("reading", "gpus")),
    Row(label="`orch submit`, the whole process", measure="cli", ours=("submit",)),
    Row(label="`orch up` until ready", measure="cli", ours=("up",)),
    *(
        row
        for name, label, ours in (
            ("client", "the plain wheel", ("ours",)),
            ("train", "`[train]`, with torch for processors", ("train",)),
            ("daemon", "`[daemon]`, likewise", ("daemon",)),
            ("all", "`[all]`, likewise", ("all",)),
        )
        for row in (
            Row(label=f"installation of {label}", measure="install", ours=ours, digits=0),
            Row(label="its size", measure="install", ours=("size", name), unit="MB", scale=1e-6, digits=0),
        )
    ),
    Row(label="the idle daemon", measure="idle", unit="% of a core"),
    Row(label="SIGSTOP of a rank to its detection", measure="hang", aims=(Aim("5 s", ("ours",), 5.0),)),
    Row(
        label="the daemon's processor time for a gang of 1,024 ranks, submission to end, simulated nodes",
        measure="gang_scale",
        unit="ms",
        scale=1e3,
        digits=0,
    ),
    Row(
        label="the longest turn of its event loop meanwhile",
        measure="gang_scale",
        ours=("longest_slice_seconds",),
        unit="ms",
        scale=1e3,
        digits=1,
    ),
    *(
        Row(
            label=f"`save()` of {size[:-1]} M parameters with Adam: training stands still",
            measure="checkpoint_stall",
            ours=("sizes", size, "ours"),
            others=tuple((f"`{name}`{how}", ("sizes", size, "peers", name + how)) for name, how, _ in SAVES),
            aims=tuple(
                Aim(f"{most:g} of `{name}`", ("sizes", size, "ratio", name + how), most) for name, how, most in SAVES
            ),
            unit="ms",
            scale=1e3,
            digits=1,
        )
        for size in ("2M", "100M")
    ),
    Row(
        label="a training step of `MultiGPUTrainer`, one rank",
        measure="trainer_overhead",
        others=(("the same loop by hand", ("peers", "torch")),),
        aims=(Aim("1.01 of the loop", ("ratio", "torch"), 1.01),),
        unit="ms",
        scale=1e3,
    ),
    Row(
        label="a step of `orch bench`'s own loop, its medium model in batches of 64",
        measure="bench_overhead",
        others=(("the same loop by hand", ("peers", "by_hand")),),
        aims=(Aim("1.005 of the loop", ("ratio", "by_hand"), 1.005),),
        unit="ms",
        scale=1e3,
        digits=3,
    ),
    *(
        Row(label=label, measure="analysis_figures", ours=("long_record", key), unit=unit, digits=digits)
        for key, label, unit, digits in (
            ("seconds", "the report of 24 hours of 8 GPUs at 1 Hz (691,200 readings)", "s", 1),
            ("processor_seconds", "its processor time", "s", 1),
            ("most_memory_mb", "its most memory", "MB", 0),
        )
    ),
    Row(
        label="a scrape of a GPU's exporter, ten at a time",
        measure="exporter_cost",
        others=(("nvitop-exporter", ("peers", "nvitop-exporter")),),
        aims=(Aim("5 ms", ("ours",), 5e-3),),
        unit="ms",
        scale=1e3,
    ),
    Row(
        label="`orch record --rate 100`, eight GPUs of a test library",
        measure="record_rate",
        others=(("a loop of pynvml calls", ("peers", "pynvml_loop")),),
        unit="Hz",
    ),
)


def newest() -> dict[str, dict[str, Any]]:
    """Return the newest committed result of each measure; file names begin with their dates."""
    return {
        found["measure"]: found for path in sorted(RESULTS.glob("*.json")) for found in [json.loads(path.read_text())]
    }


def table(results: dict[str, dict[str, Any]], labels: tuple[str, ...] | None = None) -> str:
    """Return the block between the markers: all rows, or those of ``labels``."""
    lines = ["| measure | orch | torchrun | Ray Train V2 | aim: at most |", "|---|---|---|---|---|"]
    used = {}
    for row in ROWS:
        result = results.get(row.measure)
        if labels is not None and row.label not in labels:
            continue
        if result is None or (mine := _at(result, row.ours)) is None:
            continue
        used[row.measure] = result
        peers = [_at(result, path) if path else None for path in row.peers] if row.peers else [None, None]
        cells = [*(_cell(row, value) for value in (mine, *peers)), _aims(row, result)]
        lines.append("| " + " | ".join((_label(row, result), *cells)).rstrip() + " |")
    loads = [result["machine"]["load"] for result in used.values()]
    machine = next(iter(used.values()))["machine"] if used else {}
    processors = sorted({str(result["machine"].get("cpu")) for result in used.values()})
    dates = sorted({result["date"] for result in used.values()})
    lines += [
        "",
        f"{machine.get('cpus')} cores ({', '.join(processors)}), {machine.get('memory_gib')} GiB, no GPU; Python"
        f" {machine.get('python')}, torch {machine.get('torch')}, Ray {machine.get('ray')}; {', '.join(dates)};"
        f" load average {min(loads):.1f}-{max(loads):.1f}, the benchmarks' own included."
        if used
        else "No results yet.",
    ]
    return "\n".join(lines)


def _at(tree: Any, path: tuple[str, ...]) -> dict[str, float] | None:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) and "median" in tree else None


def shows_a_difference(row: Row, result: dict[str, Any]) -> bool:
    """Return whether the interval of orch overlaps that of no peer in the row."""
    mine = _at(result, row.ours)
    paths = [*(path for path in row.peers or () if path), *(path for _, path in row.others)]
    found = [value for path in paths if (value := _at(result, path)) is not None]
    return mine is None or all(value["low"] > mine["high"] or value["high"] < mine["low"] for value in found)


def _label(row: Row, result: dict[str, Any]) -> str:
    others = "; ".join(f"{name}: {_cell(row, _at(result, path))}" for name, path in row.others)
    same = "" if shows_a_difference(row, result) else "; no difference shown"
    return row.label + (f" ({others})" if others else "") + same


def _aims(row: Row, result: dict[str, Any]) -> str:
    parts = []
    for aim in row.aims:
        if (value := _at(result, aim.path)) is None:
            continue
        shown = "" if aim.path == row.ours else f" ({value['low']:.3f}-{value['high']:.3f})"
        parts.append(f"{aim.text}: {'met' if value['high'] <= aim.most else 'missed'}{shown}")
    return "; ".join(parts)


def _cell(row: Row, value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    median, low, high = (f"{value[key] * row.scale:.{row.digits}f}" for key in ("median", "low", "high"))
    unit = f" {row.unit}" if row.unit else ""
    return f"{median}{unit} ({low}-{high}, n={value['n']:.0f})"


def replaced(text: str, name: str, block: str) -> str:
    """Return ``text`` with the part between the markers of ``name`` replaced. Raises ValueError where a marker is missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{begin} and {end} have to be there once each")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{block}\n{end}{after}"


def pages() -> dict[Path, str]:
    """Return both pages with the tables of the committed results."""
    results = newest()
    return {
        README: replaced(README.read_text(), "headline", table(results, HEADLINES)),
        PAGE: replaced(PAGE.read_text(), "figures", table(results)),
    }


def main() -> None:
    """Rewrite the blocks of both pages."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
