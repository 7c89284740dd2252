"""``python -m tests.fuzz [--seconds N] [--reader NAME]``: fuzz each reader for a while; exit code 1 when a defect was found."""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.campaign import Defect, fuzz_for
from tests.fuzz.readers import READERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.reader import Reader

ATHERIS_START_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, report, and keep the inputs that are defects."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the readers of foreign bytes.")
    parser.add_argument("--seconds", type=float, default=300, help="about so long in all (default: 300)")
    parser.add_argument("--reader", choices=sorted(READERS), action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first batch of inputs")
    chosen = parser.parse_args(arguments)
    readers = [READERS[name] for name in chosen.reader or READERS]
    guided = importlib.util.find_spec("atheris") is not None
    share = chosen.seconds / len(readers) / (2 if guided else 1)
    print(f"seed {chosen.seed}, {share:.0f} s for each reader with Hypothesis{' and with atheris' if guided else ''}")
    defects = 0
    for reader in readers:
        tried, found = fuzz_for(reader, share, first=chosen.seed)
        told = f"{tried} inputs"
        if found is None and guided:
            ran, found = _guided(reader, max(1, round(share)))
            told += f", {ran} guided"
        if found is not None:
            defects += 1
            told += f"\n  {found.error}\n  kept in {found.keep(reader.corpus)}"
        print(f"{reader.name:24} {told}", flush=True)
    print(f"{defects} defects")
    return 1 if defects else 0


def _guided(reader: Reader, seconds: int) -> tuple[int, Defect | None]:
    with tempfile.TemporaryDirectory(prefix="orch-fuzz-") as place:
        command = [sys.executable, "-m", "tests.fuzz.guided", reader.name, place, str(seconds)]
        limit = seconds + ATHERIS_START_SECONDS
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit, check=False)
        ran = re.search(r"number_of_executed_units:\s+(\d+)", ended.stderr)
        crashes = [path for kind in ("crash", "timeout", "oom") for path in Path(place).glob(f"{kind}-*")]
        if crashes:
            return 0, Defect(reader.name, crashes[0].read_bytes(), _error(ended.stdout + ended.stderr))
        if ended.returncode or ran is None:
            raise RuntimeError(f"atheris ended with {ended.returncode}: {ended.stderr[-2000:]}")
        return int(ran[1]), None


def _error(output: str) -> str:
    found = re.search(r"Uncaught Python exception:.*?\n(?:INFO.*\n)*(.*?)(?:\n\n|\n==)", output, re.DOTALL)
    return (found[1] if found else output)[-500:]


if __name__ == "__main__":
    sys.exit(main())
