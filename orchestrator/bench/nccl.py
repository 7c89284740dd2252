"""`orch bench --nccl-sweep`: finds the NCCL settings that make all-reduces of this machine faster, and changes none.

The candidates (algorithm, protocol, P2P, channels) follow from how the GPUs are linked, as the matrix of ``nvidia-smi topo -m`` has it:
NV# is NVLink, PIX and PXB are PCIe switches, PHB, NODE and SYS go through a processor's host bridge, between its bridges, or between
sockets. Each candidate is tried alone, in turns with NCCL's own choice, then those that help together.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.bench.benchmark import topology
from orchestrator.bench.plan import BenchError, RankError, check
from orchestrator.bench.processes import RankProcesses, make_logs, rank_environ
from orchestrator.bench.report import table
from orchestrator.bench.statistics import FEWEST_RUNS, ratio_interval
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.statistics import Interval
    from orchestrator.bench.plan import BenchRequest

_GPU_ROW: Final = re.compile(r"^\s*GPU\d+\s")
_LINK: Final = re.compile(r"^(?:NV\d{1,3}|PIX|PXB|PHB|NODE|SYS)$")
_MAX_LINES: Final = 256
CHANNELS: Final = (4, 16)
_FEWEST_FOR_TREE: Final = 4


class Link(enum.StrEnum):
    """Kinds of links between two GPUs, the fastest first."""

    NVLINK = "NVLink"
    SWITCH = "PCIe switch"
    HOST = "PCIe host bridge"
    SOCKETS = "between sockets"


_KINDS: Final = {"PIX": Link.SWITCH, "PXB": Link.SWITCH, "PHB": Link.HOST, "NODE": Link.HOST, "SYS": Link.SOCKETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings that are tried together, as environment variables. The first candidate has none: NCCL's own choice."""

    name: str
    variables: Mapping[str, str]


def links_of(topology: str | None) -> frozenset[Link]:
    """Return the kinds of links between GPUs in the matrix; none where there is no matrix, or it has another form."""
    found = set()
    for line in (topology or "").splitlines()[:_MAX_LINES]:
        if _GPU_ROW.match(line):
            # One column for each GPU, then those of network cards and affinities.
            cells = [cell for cell in line.split()[1:] if _LINK.match(cell)]
            found |= {Link.NVLINK if cell.startswith("NV") else _KINDS[cell] for cell in cells}
    return frozenset(found)


def candidates(gpus: int, links: frozenset[Link]) -> tuple[Candidate, ...]:
    """Return the candidates for this many GPUs; NCCL's own choice first."""
    found = [Candidate(name="NCCL's own choice", variables={})]
    algorithms = ("Ring", "Tree") if gpus >= _FEWEST_FOR_TREE else ("Ring",)
    found += [Candidate(name=f"algorithm {one}", variables={"NCCL_ALGO": one}) for one in algorithms]
    # LL128 needs links that keep the order of 128 bytes: according to NCCL, NVLink.
    protocols = ("Simple", "LL", "LL128") if Link.NVLINK in links else ("Simple", "LL")
    found += [Candidate(name=f"protocol {one}", variables={"NCCL_PROTO": one}) for one in protocols]
    if Link.NVLINK not in links:
        found.append(Candidate(name="no P2P, through host memory", variables={"NCCL_P2P_DISABLE": "1"}))
    if Link.SOCKETS in links:
        found.append(Candidate(name="P2P also between sockets", variables={"NCCL_P2P_LEVEL": "SYS"}))
    for count in CHANNELS:
        both = {"NCCL_MIN_NCHANNELS": str(count), "NCCL_MAX_NCHANNELS": str(count)}
        found.append(Candidate(name=f"{count} channels", variables=both))
    return tuple(found)


class AllReduceTimer(Protocol):
    """Times all-reduces over all GPUs of a machine."""

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Return seconds for an all-reduce of each size in bytes, under these variables. Raises RankError if NCCL refuses."""


class RankTimer:
    """Measures with real ranks: new ones each time, because NCCL reads its settings once in a process."""

    def __init__(self, gpus: int, logs: Path, environ: Mapping[str, str]) -> None:
        self._gpus, self._logs, self._environ = gpus, logs, environ

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Return the slowest rank's seconds for each size."""
        with RankProcesses(self._logs, {**self._environ, **variables}) as ranks:
            ranks.start(self._gpus)
            ranks.join([self._gpus], "cuda")
            answers = ranks.ask({"do": "all_reduce", "ranks": self._gpus, "sizes": list(sizes)}, self._gpus)
        return [max(times) for times in zip(*answers, strict=True)]


SIZES: Final = (64 << 10, 1 << 20, 25 << 20, 128 << 20)
"""Bytes of an all-reduce: a small layer, DDP's first bucket, its others, a large model's."""
WORTH: Final = 1.02
"""Least speed-up at which settings count as helpful, if the interval lies above 1."""
NOT_VERIFIED: Final = (
    "not verified: this sweep has not run on several GPUs yet; check what it reports with orch bench before you use it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Settings, and their speed-up over NCCL's own choice at each size, or the error that prevented the measurement."""

    candidate: Candidate
    speed_ups: tuple[Interval, ...] = ()
    error: str = ""

    def helps(self, size: int) -> bool:
        """Whether all-reduces of that size are faster for certain, and by enough."""
        one = self.speed_ups[size] if self.speed_ups else None
        return one is not None and one.low is not None and one.low > 1 and one.value >= WORTH

    def harms(self, size: int) -> bool:
        """Whether all-reduces of that size are slower for certain."""
        one = self.speed_ups[size] if self.speed_ups else None
        return one is not None and one.high is not None and one.high < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOutcome:
    """Every candidate, and the combination of those that help; None where fewer than two do."""

    gpus: int
    links: frozenset[Link]
    tried: tuple[Tried, ...]
    together: Tried | None = None

    @property
    def best(self) -> Tried | None:
        """Settings that help at a size and harm at none, with the largest gain at the size of DDP's buckets."""
        usable = [one for one in (*self.tried, *([self.together] if self.together else [])) if _useful(one)]
        return max(usable, key=lambda one: one.speed_ups[2].value, default=None)


def _useful(one: Tried) -> bool:
    sizes = range(len(SIZES))
    return any(one.helps(size) for size in sizes) and not any(one.harms(size) for size in sizes)


def check_machine(gpus: int, *, nvidia: bool) -> None:
    """Raise BenchError where there is nothing to sweep."""
    if gpus < 2 or not nvidia:
        seen = plural(gpus, "GPU") if nvidia or not gpus else f"{gpus} GPUs that NCCL does not drive"
        raise BenchError(
            f"--nccl-sweep needs at least 2 NVIDIA GPUs in this machine, and torch sees {seen}",
            hint="run it on the machine that trains; ranks on processors talk through gloo, which has none of these settings",
        )


@dataclass(slots=True)
class _Times:
    """Seconds of each size, by round; and the error that excluded the candidate."""

    rounds: list[Sequence[float]] = field(default_factory=list)
    error: str = ""


def sweep(
    timer: AllReduceTimer, gpus: int, links: frozenset[Link], *, rounds: int, note: Callable[[str], None]
) -> SweepOutcome:
    """Measure every candidate once a round, in reverse order in every other one. Raises BenchError where NCCL itself fails."""
    if rounds < FEWEST_RUNS:
        raise BenchError(
            f"--runs is {rounds}: a sweep needs {FEWEST_RUNS} for an interval", hint=f"--runs {FEWEST_RUNS}"
        )
    every = candidates(gpus, links)
    times = _measured(timer, every, rounds, note)
    base = times[every[0].name]
    if base.error:
        raise BenchError(f"NCCL failed with its own choice of settings: {base.error}", hint="see `orch doctor`")
    tried = tuple(_compared(one, times[one.name], base) for one in every[1:])
    helping = [one.candidate for one in tried if _useful(one)]
    return SweepOutcome(gpus=gpus, links=links, tried=tried, together=_together(timer, every[0], helping, rounds, note))


def _measured(
    timer: AllReduceTimer, every: Sequence[Candidate], rounds: int, note: Callable[[str], None]
) -> dict[str, _Times]:
    times = {one.name: _Times() for one in every}
    for number in range(rounds):
        for one in every if number % 2 == 0 else reversed(every):
            mine = times[one.name]
            if mine.error:
                continue
            try:
                mine.rounds.append(timer.seconds(one.variables, SIZES))
            except RankError as error:
                mine.error = error.message
                note(f"{one.name}: {error.message}")
        note(f"round {number + 1} of {rounds} done")
    return times


def _together(
    timer: AllReduceTimer,
    base: Candidate,
    helping: Sequence[Candidate],
    rounds: int,
    note: Callable[[str], None],
) -> Tried | None:
    """Measure the helpful settings together (the first value of each variable), against NCCL's own; None without any."""
    variables: dict[str, str] = {}
    for one in helping:
        if not variables.keys() & one.variables.keys():
            variables |= one.variables
    if len(helping) < 2 or any(variables == one.variables for one in helping):
        return None
    both = Candidate(name="together", variables=variables)
    times = _measured(timer, (base, both), rounds, note)
    return _compared(both, times[both.name], times[base.name])


def _compared(candidate: Candidate, mine: _Times, base: _Times) -> Tried:
    if mine.error or base.error:
        return Tried(candidate=candidate, error=mine.error or base.error)
    pairs = zip(zip(*base.rounds, strict=True), zip(*mine.rounds, strict=True), strict=True)
    return Tried(candidate=candidate, speed_ups=tuple(ratio_interval(theirs, own) for theirs, own in pairs))


def sweep_lines(outcome: SweepOutcome) -> Iterator[str]:
    """Yield the lines of the report, in Markdown."""
    links = ", ".join(sorted(outcome.links)) or "links not known"
    yield f"NCCL settings on {outcome.gpus} GPUs ({links}): speed-up of an all-reduce over NCCL's own choice, with 95 % intervals"
    yield ""
    header = ("settings", *(size(count) for count in SIZES))
    rows = []
    for one in (*outcome.tried, *([outcome.together] if outcome.together else [])):
        shown = [f"{up.value:.2f}x ({up.ends('.2f', 'unknown')})" for up in one.speed_ups] or [
            f"failed: {one.error}"
        ] * len(SIZES)
        rows.append((_line(one.candidate), *shown))
    yield from table(header, rows)
    yield ""
    best = outcome.best
    yield "No setting helps: leave NCCL's own choice." if best is None else f"Helps: {_line(best.candidate)}"
    yield f"Nothing was set. {NOT_VERIFIED[0].upper()}{NOT_VERIFIED[1:]}."


def _line(candidate: Candidate) -> str:
    return " ".join(f"{name}={value}" for name, value in candidate.variables.items())


def sweep_json(outcome: SweepOutcome) -> dict[str, Any]:
    """Return the outcome as JSON values, for programs."""
    best = outcome.best
    every = (*outcome.tried, *([outcome.together] if outcome.together else []))
    return {
        "gpus": outcome.gpus,
        "links": sorted(outcome.links),
        "verified": False,
        "note": NOT_VERIFIED,
        "sizes_bytes": list(SIZES),
        "tried": [_tried_json(one) for one in every],
        "best": None if best is None else dict(best.candidate.variables),
    }


def _tried_json(one: Tried) -> Mapping[str, Any]:
    return {
        "variables": dict(one.candidate.variables),
        "speed_ups": [{"mean": up.value, "interval_95": up.bounds} for up in one.speed_ups],
        "error": one.error or None,
    }


def sweep_machine(request: BenchRequest, *, environ: Mapping[str, str], note: Callable[[str], None]) -> SweepOutcome:
    """Sweep NCCL settings on this machine, without the NCCL_ variables of ``environ``. Raises BenchError where there is nothing to sweep."""
    check(request)
    logs = make_logs(request.output)
    kept = {name: value for name, value in environ.items() if not name.startswith("NCCL_")}
    prepared = rank_environ(kept, request.threads)
    with RankProcesses(logs, prepared) as ranks:
        ranks.start(1)
        (seen,) = ranks.ask({"do": "describe"}, 1)
    gpus = len(seen["gpus"])
    check_machine(gpus, nvidia=seen["versions"]["nccl"] is not None)
    return sweep(RankTimer(gpus, logs, prepared), gpus, links_of(topology()), rounds=request.runs, note=note)
