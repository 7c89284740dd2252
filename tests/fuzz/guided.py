"""``python -m tests.fuzz.guided READER DIRECTORY SECONDS``: atheris finds inputs that take new paths through a reader.

It needs a process of its own, which libFuzzer ends. Inputs are written to DIRECTORY, those that are defects to DIRECTORY/crash-….
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import atheris

MAX_BYTES = 20_000


def main() -> None:
    """Fuzz until the time is over, or a defect is found."""
    name, directory, seconds = sys.argv[1:]
    # The readers' modules are imported under instrumentation: none of them may have been imported before.
    with atheris.instrument_imports(include=["orchestrator"], enable_loader_override=False):
        reader = importlib.import_module("tests.fuzz.readers").READERS[name]
    folder = Path(directory)
    for number, data in enumerate([*reader.seeds(), *(path.read_bytes() for path in reader.found())]):
        (folder / f"seed-{number}").write_bytes(data)
    atheris.Setup(
        [
            sys.argv[0],
            str(folder),
            f"-max_total_time={seconds}",
            f"-max_len={MAX_BYTES}",
            f"-artifact_prefix={folder}/",
            "-rss_limit_mb=4096",
            "-timeout=20",
            "-print_final_stats=1",
        ],
        reader.read,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
