"""``kill -9`` of a writing process at any moment: acknowledged changes are stored, and none is stored in part."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.sql.schema import connect
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.store.store import Store

ROOT = Path(__file__).parents[3]
ROUNDS = 9
ROUNDS_PER_STORE = 3


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """Start the process with the writing children; end it after the test."""
    command = [sys.executable, "-m", "tests.unit.store.crash_writer"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_SECONDS) == 0


def kill_one(writer: subprocess.Popen[str], path: Path, after_lines: int, pause: float) -> list[str]:
    """Return what a child printed before it was killed, ``pause`` seconds after its ``after_lines``-th line."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(f"{path}\n")
    first = writer.stdout.readline()
    told = []
    while not first.startswith("pid "):  # the child may be faster than its parent
        told.append(first)
        first = writer.stdout.readline()
    pid = int(first.split()[1])
    try:
        while len(told) < after_lines:
            told.append(writer.stdout.readline())
        time.sleep(pause)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    told.extend(iter(writer.stdout.readline, "dead\n"))
    return [line.strip() for line in told]


def check(path: Path, told: list[str]) -> None:
    """Check that acknowledged changes are stored, and that every group of notes is whole or absent."""
    assert not [line for line in told if line.startswith("error")]
    with closing(connect(path)) as connection:
        versions: dict[str, int] = dict(connection.execute("SELECT id, version FROM jobs").fetchall())
        batches: dict[str, int] = dict(
            connection.execute(
                "SELECT json_extract(body, '$.note.text'), count(*) FROM events WHERE kind = 'job_noted' GROUP BY 1"
            ).fetchall()
        )
    assert set(batches.values()) <= {3}
    for kind, name, *rest in (line.split() for line in told if line != "open"):
        if kind == "batch":
            assert name in batches
        else:
            assert versions.get(name, 0) >= int(rest[0])


def test_what_was_acknowledged_survives_any_kill(
    writer: subprocess.Popen[str], open_store: Callable[..., Store], run: Callable[..., Any], tmp_path: Path
) -> None:
    dice = random.Random(20261121)
    told: list[str] = []
    acknowledged = 0
    for turn in range(ROUNDS):
        path = tmp_path / f"store-{turn // ROUNDS_PER_STORE}" / "orch.db"
        if turn % ROUNDS_PER_STORE == 0:
            path.parent.mkdir()
            told = []
        # Every third child is killed while it opens or makes the store, the others while they write.
        lines = 0 if turn % 3 == 0 else dice.randrange(1, 60)
        told += kill_one(writer, path, lines, dice.random() * (0.03 if lines == 0 else 0.004))
        acknowledged += len(told)
        store = open_store(path)
        check(path, told)
        if turn % ROUNDS_PER_STORE == ROUNDS_PER_STORE - 1:
            assert run(store.verify()) == []
        store.close()
    assert acknowledged > ROUNDS * 10
