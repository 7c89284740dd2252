"""A job's secrets in all that a rank can output: its events, logs, exit record and stacks do not repeat them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.runtime.ranks.process_inspector import find_py_spy, report_lines
from orchestrator.runtime.ranks.rank_events import PollCursor
from orchestrator.runtime.spawn.client import read_exit_record
from tests.faults.test_rank_host import make_host, make_plan, run, story
from tests.integration.forkserver_fixture import RunningServer, running_server

SECRETS = ("hunter2_very_secret", "first line of a key\nsecond line of a key")
PARTS = ("hunter2_very_secret", "first line of a key", "second line of a key")

RAISES = """
import os, sys
key = os.environ["KEY"]
for letter in "hunter2_very_secret":
    sys.stdout.write(letter); sys.stdout.flush()
sys.stdout.write("\\n")
print(key, file=sys.stderr, flush=True)
raise type("Refused_hunter2_very_secret", (Exception,), {})(f"cannot log in with hunter2_very_secret and {key}")
"""

HANGS = """
import time
def hunter2_very_secret():
    print("ready", flush=True)
    time.sleep(600)
hunter2_very_secret()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def assert_no_secret(text: str) -> None:
    assert not [part for part in PARTS if part in text]


def test_an_exception_the_last_lines_and_the_exit_record_hold_no_secret(server: RunningServer, tmp_path: Path) -> None:
    plan = make_plan(server, tmp_path, RAISES)
    plan = replace(
        plan,
        env={**plan.env, "KEY": SECRETS[1]},
        secrets=SECRETS,
        log_policies=(("cannot log in", "fail"),),
    )
    assert_no_secret(repr(plan))

    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(plan)
        events = await story(host, 1)
        exited = next(event.exit for event in events if event.exit)
        assert_no_secret(repr(events))
        assert exited.error_type.endswith("Refused_***")
        assert exited.error_message == "cannot log in with *** and ***"
        assert exited.policy == "fail"
        assert exited.log_tail.count("***") >= 3

    run(case)
    record = read_exit_record(Path(plan.exit_record))
    assert record is not None
    assert record.error is not None
    assert "***" in record.error.traceback
    for path in (tmp_path / "exits", tmp_path / "logs"):
        for file in path.rglob("*"):
            if file.is_file():
                assert_no_secret(file.read_text())


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy reads the stacks")
def test_stacks_hold_no_secret(server: RunningServer, tmp_path: Path) -> None:
    plan = replace(make_plan(server, tmp_path, HANGS), secrets=SECRETS)

    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(plan)
        await host.poll(1, PollCursor(), 20)
        async with asyncio.timeout(300):
            while True:
                look = await host.look(1, stacks=True)
                if look is not None and any(f.function == "***" for t in look.threads for f in t.frames):
                    break
                assert look is None or "ermission" not in look.problem, look
                await asyncio.sleep(0.05)
        assert_no_secret(repr(look))
        assert_no_secret("\n".join(report_lines(look)))
        await host.kill(1)
        await story(host, 1)

    run(case)


def test_a_rank_has_the_umask_of_a_plain_start_and_what_is_beside_it_is_private(
    server: RunningServer, tmp_path: Path
) -> None:
    script = "import os; open('made', 'w').close(); os.mkdir('folder'); print('x')"
    for cold in (False, True):
        plan = replace(make_plan(server, tmp_path, script), umask=0o027, cold=cold)

        async def case(plan: object = plan) -> None:
            host = make_host(tmp_path)
            await host.prepare(1, None)
            await host.launch(plan)  # type: ignore[arg-type]
            assert [e.exit.exit_code for e in await story(host, 1) if e.exit] == [0]

        run(case)
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
        (tmp_path / "made").unlink()
        (tmp_path / "folder").rmdir()
    beside = [p for name in ("exits", "logs", "node") for p in (tmp_path / name, *(tmp_path / name).rglob("*"))]
    assert len(beside) > 5
    assert not [path for path in beside if path.stat().st_mode & 0o077]


def test_half_a_secret_is_not_left_where_a_long_message_is_cut(server: RunningServer, tmp_path: Path) -> None:
    script = "raise ValueError('x' * 2040 + 'hunter2_very_secret' + 'y' * 9000)"
    plan = replace(make_plan(server, tmp_path, script), secrets=SECRETS)

    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(plan)
        exited = next(event.exit for event in await story(host, 1) if event.exit)
        assert "x***y" in exited.error_message
        assert "hunter" not in exited.error_message

    run(case)
