"""Measures the end of a rank: processor time from the last line of a script that did nothing to the process's end, forked from a warm fork server.

Arms: as ranks end (exit handlers of libraries that were loaded before the fork are left out), and with every handler run, as a plain interpreter
ends. Copied pages are reported as well.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING

from orchestrator.runtime.forkserver.program import exit_handlers
from orchestrator.runtime.forkserver.warm import Baseline, warm

if TYPE_CHECKING:
    from collections.abc import Callable


def ended(baseline: Baseline, *, leave_out: bool, faults: list[int]) -> float:
    """Fork a process that ends at once; return its processor seconds, in the parent only."""
    pid = os.fork()
    if pid == 0:
        sys.exit(0 if not leave_out or exit_handlers.leave_out(baseline.libraries) else 1)
    _, status, used = os.wait4(pid, 0)
    if status != 0:
        raise OSError(f"the fork ended with status {status}")
    faults.append(used.ru_minflt)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run and report."""
    baseline = warm((), lambda *_, **__: None, frozenset(sys.modules), cold=None)
    from benchmarks import (
        measure,
    )  # after `warm`: its numpy starts threads, and a process with threads is not forked

    chosen = measure.parser(str(__doc__).partition("\n")[0], 30).parse_args()
    faults: dict[str, list[int]] = {"ours": [], "every_handler": []}
    arms: dict[str, Callable[[], float]] = {
        "ours": lambda: ended(baseline, leave_out=True, faults=faults["ours"]),
        "every_handler": lambda: ended(baseline, leave_out=False, faults=faults["every_handler"]),
    }
    found = measure.interleave(arms, chosen.pairs)
    pages = {name: statistics.median(values) for name, values in faults.items()}
    ours, every = found.values["ours"], found.values["every_handler"]
    told = measure.result("rank_end", "s", "lower", ours, {"every_handler": every}, target="none", copied_pages=pages)
    measure.report(told, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
