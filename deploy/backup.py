#!/opt/orch/bin/python
"""Back up the store while the daemon runs, check a backup, or restore one.

    backup.py write TARGET [--home DIR] [--keep N]    copy the store to TARGET; with --keep, to a dated
                                                      file in the folder TARGET: the newest N remain
    backup.py check BACKUP                            print the errors in a backup; exit code 1 when there are any
    backup.py restore BACKUP [--home DIR]             restore a backup where no store exists and no daemon runs

Run it as the user that the daemon runs as. The store has every accepted job and its events. Copy working directories,
their archives, logs and checkpoints (jobs/ and blobs/ below the home) with any file copy tool.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from orchestrator.spec.settings import Settings
from orchestrator.store import backup
from orchestrator.store.errors import StoreError
from orchestrator.store.sql.schema import connect

PATTERN = "orch-*.sqlite3"


def store(home: Path | None) -> Path:
    """Return the path of the store in the given home, by default in that of the settings."""
    settings = Settings.from_environ({**os.environ, **({"ORCH_HOME": str(home.resolve())} if home else {})})
    return settings.paths.store


def write(target: Path, source: Path, keep: int) -> None:
    """Copy the store to `target`; if `keep` is not 0, to a dated file in it, and delete all but the newest `keep`."""
    if not source.exists():
        raise SystemExit(f"there is no store at {source}: name the home with --home")
    if keep:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder, target = target, target / time.strftime("orch-%Y%m%dT%H%M%SZ.sqlite3", time.gmtime())
    with contextlib.closing(connect(source, read_only=True)) as connection:
        backup.write(connection, target)
    problems = backup.check_backup(target)
    if problems:
        raise SystemExit(f"{target} is damaged: {problems[0]}")
    print(target)
    if keep:
        for old in sorted(folder.glob(PATTERN))[:-keep]:
            old.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["write", "check", "restore"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--keep", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        if given.verb == "write":
            write(given.path, store(given.home), max(0, given.keep))
        elif given.verb == "check":
            problems = backup.check_backup(given.path)
            for problem in problems:
                print(problem)
            return 1 if problems else 0
        else:
            backup.restore(given.path, store(given.home))
    except (StoreError, OSError) as error:
        sys.stderr.write(f"backup.py: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
