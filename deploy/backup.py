#!/opt/orch/bin/python
"""Backs the record up while the daemon runs, checks a backup, and puts one back.

    backup.py write TARGET [--home DIR] [--keep N]    a copy of the record; with --keep, TARGET is a folder of dated ones
    backup.py check BACKUP                            what is wrong with it; exit code 1 when something is
    backup.py restore BACKUP [--home DIR]             where no record lies and no daemon waits

Run it as the user that the daemon runs as. The record is what was accepted, what happened, and where things lie; the files
themselves (working copies, logs, checkpoints: jobs/ and blobs/ below the home) are copied by any tool for files.
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
    """Where the record is."""
    settings = Settings.from_environ({**os.environ, **({"ORCH_HOME": str(home.resolve())} if home else {})})
    return settings.paths.store


def write(target: Path, source: Path, keep: int) -> None:
    """Copy the record; into the folder `target`, of whose copies the newest `keep` stay, when `keep` is not 0."""
    if not source.exists():
        raise SystemExit(f"there is no record at {source}: name the home with --home")
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
    """The command line."""
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
