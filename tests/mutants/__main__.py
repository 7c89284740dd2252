"""``python -m tests.mutants [--only TEXT]``: finds the tests that catch each seeded bug, in a copy of the sources."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.mutants.seeded import MUTANTS, TESTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.seeded import Mutant

ROOT: Final = Path(__file__).parents[2]
LIST: Final = Path(__file__).with_name("caught.json")
SEEDS: Final = 120
SECONDS: Final = 400  # a suite that takes longer than this with a bug counts as endless
LEAST_CAUGHT: Final = 0.95
NOT_CAUGHT: Final = "not caught"
_WRITING: Final = threading.Lock()
_TELLING: Final = re.compile(r"FAILED |ERROR |seed \d+: ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the bugs; return 1 if fewer are caught than required, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="What catches each seeded bug.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those whose name or file has it")
    parser.add_argument("--again", action="store_true", help=f"also those that {LIST.name} has as caught")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"histories of the simulation (default: {SEEDS})")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many bugs at a time (default: 1)")
    chosen = parser.parse_args(arguments)
    caught = {} if chosen.again else known()
    done = {name for name, (by, _) in caught.items() if by != NOT_CAUGHT}
    mutants = [m for m in MUTANTS if (chosen.only in m.name or chosen.only in m.path) and m.name not in done]
    with tempfile.TemporaryDirectory(prefix="orch-mutants-") as place, ThreadPoolExecutor(chosen.jobs) as pool:
        copies = [copied(Path(place) / str(number)) for number in range(chosen.jobs)]
        if mutants and (wrong := _simulated(copies[0], chosen.seeds)):
            print(f"without any bug: {wrong}")
            return 1
        waiting = [
            pool.submit(_catch_all, copy, mutants[number :: chosen.jobs], chosen.seeds, caught)
            for number, copy in enumerate(copies)
        ]
        for part in waiting:
            part.result()
    number = sum(by != NOT_CAUGHT for by, _ in caught.values())
    print(f"{number} of {len(caught)} caught, {len(MUTANTS) - len(caught)} not tried")
    return 0 if number >= LEAST_CAUGHT * len(caught) else 1


def known() -> dict[str, tuple[str, str]]:
    """Return the known results: by bug, the part of the tests that catches it, and its message."""
    return {name: (by, how) for name, (by, how) in json.loads(LIST.read_text()).items()} if LIST.exists() else {}


def _catch_all(copy: Path, mutants: Sequence[Mutant], seeds: int, caught: dict[str, tuple[str, str]]) -> None:
    """Try the bugs in turn. The list is written after each one, so that an interrupted run continues there."""
    for mutant in mutants:
        found = catch(mutant, copy, seeds)
        print(f"{mutant.path}: {mutant.name}: {' '.join(found)}", flush=True)
        with _WRITING:
            caught[mutant.name] = found
            LIST.write_text(json.dumps(caught, indent=1, ensure_ascii=False) + "\n")


def copied(place: Path) -> Path:
    """Copy the parts of the repository that the tests need; return ``place``."""
    place.mkdir()
    for name in ("orchestrator", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("node_modules"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, place / name)
    return place


def catch(mutant: Mutant, copy: Path, seeds: int) -> tuple[str, str]:
    """Return the part of the tests that catches the bug, and its message."""
    path = copy / "orchestrator" / mutant.path
    whole = path.read_text()
    _put(path, mutated(mutant, whole))
    try:
        if told := _tested(copy, next(tests for part, tests in TESTS.items() if mutant.path.startswith(part))):
            return "unit tests", told
        if told := _simulated(copy, seeds):
            return "simulation", told
        told = _tested(copy, ("tests/stateful",))
        return ("stateful tests", told) if told else (NOT_CAUGHT, "")
    finally:
        _put(path, whole)


def mutated(mutant: Mutant, text: str) -> str:
    """Return the file with the bug. Raises ValueError when the file does not have the bug's text exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.path} has the text of {mutant.name!r} {text.count(mutant.old)} times")
    return text.replace(mutant.old, mutant.new)


def _put(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form: Python compares time and size only, which a bug may leave equal."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _simulated(copy: Path, seeds: int) -> str:
    return _run(copy, "tests.mutants.hunt", str(seeds))


def _tested(copy: Path, tests: Sequence[str]) -> str:
    return _run(copy, "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", *tests)


def _run(copy: Path, *arguments: str) -> str:
    """Run a command; return the line that names its failure, empty when it succeeds."""
    command = [sys.executable, "-m", *arguments]
    try:
        ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "does not end"
    if not ended.returncode:
        return ""
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    told = next((line for line in lines if _TELLING.match(line)), lines[-1] if lines else "")
    return told.replace("|", "/")[:200]


if __name__ == "__main__":
    sys.exit(main())
