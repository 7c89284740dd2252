"""``python -m tests.simulation run`` runs the histories of many seeds; ``... replay SEED`` runs one and prints its steps."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation import campaign
from tests.simulation.history import History
from tests.simulation.results import Part, Results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.campaign import Outcome, Report

MAX_SHRUNK = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if an invariant did not hold, else 0."""
    options = _parser().parse_args(arguments)
    return _run(options) if options.command == "run" else _replay(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Deterministic simulation of the daemon."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="histories of one seed after the other; each one that fails is shortened")
    run.add_argument("--first", type=int, metavar="SEED", help="the seed to begin with (default: 0, or behind FILE's)")
    run.add_argument("--faults", type=_positive, default=1_000_000, help="end after so many faults (default: 1000000)")
    run.add_argument("--seconds", type=_positive, default=86_400, help="end after so many seconds (default: a day)")
    run.add_argument("--processes", type=_positive, default=1, help="run in so many processes (default: 1)")
    run.add_argument("--chunk", type=_positive, default=campaign.CHUNK, help="seeds that a process runs at a time")
    run.add_argument(
        "--results", type=Path, metavar="FILE", help="add what is found to FILE; its parts count for --faults"
    )
    replay = commands.add_parser("replay", help="one history, step by step")
    replay.add_argument("seed", type=int)
    replay.add_argument(
        "--keep", type=_numbers, metavar="N,N,…", help="only these steps, by their numbers in the whole history"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return number


def _numbers(text: str) -> list[int]:
    numbers = sorted({int(part) for part in text.split(",")})
    if not 1 <= numbers[0] <= numbers[-1] <= campaign.LENGTH:
        raise argparse.ArgumentTypeError(f"expected numbers of 1 to {campaign.LENGTH}, got {text}")
    return numbers


def _run(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.seconds
    results = Results(options.results) if options.results else None
    first = options.first if options.first is not None else results.next_seed if results else 0
    left = options.faults - (results.faults.total() if results else 0)
    if left <= 0:
        print(f"{options.results} has {options.faults - left} faults already: ask for more with --faults")
        return 0
    part = Part.begin(first)
    if results is not None:
        results.parts.append(part)

    def note(report: Report) -> None:
        part.add(report)
        if results is not None:
            results.write()

    report = campaign.run(
        first,
        faults=left,
        until=lambda: time.monotonic() >= deadline,
        processes=options.processes,
        chunk=options.chunk,
        on_chunk=note,
    )
    print(_summary(first, report))
    for outcome in report.failed[:MAX_SHRUNK]:
        print(_told(outcome))
    for outcome in report.failed[MAX_SHRUNK:]:
        print(f"seed {outcome.history.seed}: {outcome.failure:.300}")
    return 1 if report.failed else 0


def _summary(first: int, report: Report) -> str:
    lines = [
        (
            f"seeds {first} to {first + report.histories - 1}: histories: {report.histories}, steps: {report.steps}, "
            f"faults: {report.faults.total()}, seconds: {report.seconds:.0f}, failed: {len(report.failed)}"
        ),
        *(f"  {count:8} {name}" for name, count in report.faults.most_common()),
    ]
    return "\n".join(lines)


def _told(outcome: Outcome) -> str:
    seed = outcome.history.seed
    shortest = campaign.shrink(outcome)
    whole, keep, at = outcome.history.steps, [], 0
    for step in shortest.history.steps:
        at = whole.index(step, at) + 1
        keep.append(at)
    numbers = ",".join(str(number) for number in keep)
    return f"seed {seed}: {shortest.failure:.2000}\n  python -m tests.simulation replay {seed} --keep {numbers}"


def _replay(options: argparse.Namespace) -> int:
    history = campaign.history_of(options.seed)
    if options.keep:
        history = History(history.seed, tuple(history.steps[number - 1] for number in options.keep))
    outcome = campaign.run_history(history, story=True)
    print("\n".join(outcome.story))
    print(outcome.failure or f"every invariant held ({outcome.digest})")
    return 1 if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main())
