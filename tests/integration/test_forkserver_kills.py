"""Whichever process is killed, nothing outlives its owner, no status is lost, others are unaffected. Kills are real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import (
    ErrorRaised,
    Exited,
    ForkServerMissingError,
    Gone,
    KeeperLost,
    Started,
    read_exit_record,
    start_fork_server,
)
from tests.integration.forkserver_fixture import (
    BARE_PYTHON,
    ENVIRONMENT,
    BlockingClient,
    RunningServer,
    alive,
    next_event,
    running_server,
    wait_until,
)
from tests.integration.forkserver_ranks import Rank, start_rank, start_store
from tests.support.stack import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent / "forkserver_scripts"
EVENT = timedelta(seconds=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    """Yield a server for tests that kill it."""
    with running_server(str(BARE_PYTHON)) as running:
        yield running


def start(server: RunningServer, folder: Path, script: str, *arguments: str) -> Rank:
    request = SpawnRequest(
        mode="script",
        target=str(SCRIPTS / script),
        args=arguments,
        cwd=str(folder),
        env=ENVIRONMENT,
        exit_record=str(folder / "exit.json"),
        record={"job": "j", "attempt": 3},
    )
    return asyncio.run(start_rank(server.client, folder, request))


def start_tree(server: RunningServer, folder: Path, order: str = "sleep") -> tuple[Rank, dict[str, int]]:
    """Start a process with a tree below it; return once the whole tree runs."""
    rank = start(server, folder, "tree.py", str(folder / "pids"), order)
    wait_until((folder / "pids.ready").exists, "the tree to grow")
    tree = {name: int(pid) for name, pid in (line.split() for line in (folder / "pids").read_text().splitlines())}
    assert tree.keys() == {"main", "stubborn", "daemon", "session", "grandchild", "shell", "sleeper"}
    return rank, tree


def finish(rank: Rank) -> Rank:
    """Read to the last event."""
    while (event := next_event(rank.lifeline, EVENT)) is not None:
        rank.events.append(event)
    rank.lifeline.close()
    return rank


def assert_gone(*pids: int) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), f"{pids} to be gone")


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return [int(word) for word in listed.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_killed_process_is_reported_recorded_and_cleared(server: RunningServer, tmp_path: Path, number: int) -> None:
    rank, tree = start_tree(server, tmp_path)
    killed_at = time.time()
    os.kill(tree["main"], number)
    finish(rank)
    assert [type(event) for event in rank.events] == [Started, Exited, Gone]
    assert (rank.exited.exit_code, rank.exited.signal, rank.exited.cause) == (None, number, None)
    assert killed_at <= rank.exited.at <= rank.events[-1].at
    assert not any(alive(pid) for pid in tree.values())
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert (record.pid, record.keeper_pid, record.signal) == (tree["main"], rank.keeper_pid, number)
    assert (record.record, record.ended_at) == ({"job": "j", "attempt": 3}, rank.exited.at)
    assert_gone(rank.keeper_pid)


@pytest.mark.parametrize(("order", "code"), [("exit", 5), ("fail", 1)])
def test_what_a_process_leaves_behind_is_cleared(server: RunningServer, tmp_path: Path, order: str, code: int) -> None:
    """`Exited` comes first, `Gone` when the last process of the tree is dead."""
    rank, tree = start_tree(server, tmp_path, order)
    finish(rank)
    kinds = [Started, ErrorRaised, Exited, Gone] if order == "fail" else [Started, Exited, Gone]
    assert [type(event) for event in rank.events] == kinds
    assert rank.exited.exit_code == code
    assert not any(alive(pid) for pid in tree.values())


def test_record_is_on_disk_before_the_exit_is_told(server: RunningServer, tmp_path: Path) -> None:
    rank = start(server, tmp_path, "stopping.py", str(tmp_path), "die")
    wait_until((tmp_path / "ready").exists, "the script")
    assert not rank.record_path.exists()
    rank.lifeline.kill()
    while not isinstance(next_event(rank.lifeline, EVENT), Exited):
        pass
    assert rank.record_path.exists()
    assert list(tmp_path.glob("*.tmp")) == []
    finish(rank)


def test_closed_lifeline_kills_everything(server: RunningServer, tmp_path: Path) -> None:
    """Daemons, processes in sessions of their own or that ignore signals: all end, and the status is on disk."""
    rank, tree = start_tree(server, tmp_path)
    rank.lifeline.close()
    assert_gone(*tree.values(), rank.keeper_pid)
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert (record.signal, record.cause) == (signal.SIGKILL, "lifeline")


def test_killed_owner_takes_its_tree_along(server: RunningServer, tmp_path: Path) -> None:
    arguments = [
        str(server.socket),
        str(SCRIPTS / "tree.py"),
        str(tmp_path),
        "nothing",
        str(tmp_path / "pids"),
        "sleep",
    ]
    owner = subprocess.Popen([sys.executable, str(SCRIPTS / "owner.py"), *arguments], env=_owner_environment())
    wait_until((tmp_path / "pids.ready").exists, "the tree to grow")
    tree = [int(line.split()[1]) for line in (tmp_path / "pids").read_text().splitlines()]
    owner.kill()
    owner.wait()
    assert_gone(*tree, int((tmp_path / "keeper").read_text()))


@pytest.mark.rare
def test_deadline_holds_while_the_owner_is_frozen(server: RunningServer, tmp_path: Path) -> None:
    arguments = [str(server.socket), str(SCRIPTS / "stopping.py"), str(tmp_path), "stop", str(tmp_path), "ignore"]
    owner = subprocess.Popen([sys.executable, str(SCRIPTS / "owner.py"), *arguments], env=_owner_environment())
    wait_until((tmp_path / "stopping").exists, "the owner to ask for a stop")
    owner.send_signal(signal.SIGSTOP)
    wait_until((tmp_path / "exit.json").exists, "the deadline")
    record = read_exit_record(tmp_path / "exit.json")
    assert record is not None
    assert (record.signal, record.cause) == (signal.SIGKILL, "stop_deadline")
    assert_gone(record.pid)
    owner.kill()
    owner.wait()
    assert_gone(record.keeper_pid)


def _owner_environment() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_stop_lets_a_process_save(server: RunningServer, tmp_path: Path) -> None:
    rank = start(server, tmp_path, "stopping.py", str(tmp_path), "save")
    wait_until((tmp_path / "ready").exists, "the script")
    assert rank.lifeline.stop(EVENT)
    finish(rank)
    assert (rank.exited.exit_code, rank.exited.signal, rank.exited.cause) == (17, None, "stop")
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM))


@pytest.mark.rare
def test_stop_lets_a_stopped_process_save(server: RunningServer, tmp_path: Path) -> None:
    rank = start(server, tmp_path, "stopping.py", str(tmp_path), "save")
    wait_until((tmp_path / "ready").exists, "the script")
    rank.lifeline.signal(signal.SIGSTOP)
    assert rank.lifeline.stop(EVENT)
    assert finish(rank).exited.exit_code == 17


def test_stop_ends_a_deaf_process_at_the_deadline(server: RunningServer, tmp_path: Path) -> None:
    rank, tree = start_tree(server, tmp_path, "ignore")
    asked_at = time.time()
    assert rank.lifeline.stop(timedelta(seconds=0.5))
    finish(rank)
    assert (rank.exited.signal, rank.exited.cause) == (signal.SIGKILL, "stop_deadline")
    assert rank.exited.at >= asked_at + 0.5, "not before its grace is over"
    assert not any(alive(pid) for pid in tree.values())


@pytest.mark.rare
def test_second_stop_can_only_shorten_the_first(server: RunningServer, tmp_path: Path) -> None:
    rank = start(server, tmp_path, "stopping.py", str(tmp_path), "ignore")
    wait_until((tmp_path / "ready").exists, "the script")
    for seconds in (60, 0.2, 60):
        rank.lifeline.stop(timedelta(seconds=seconds))
    assert finish(rank).exited.cause == "stop_deadline"


def test_kill_is_immediate(server: RunningServer, tmp_path: Path) -> None:
    rank, tree = start_tree(server, tmp_path)
    assert rank.lifeline.kill()
    finish(rank)
    assert (rank.exited.signal, rank.exited.cause) == (signal.SIGKILL, "kill")
    assert not any(alive(pid) for pid in tree.values())
    assert not rank.lifeline.kill()


def test_signal_reaches_the_whole_group(server: RunningServer, tmp_path: Path) -> None:
    """As under torchrun, the process and those of its children that stayed in its group get the signal."""
    rank, tree = start_tree(server, tmp_path)
    assert rank.lifeline.signal(signal.SIGUSR1)
    rank.events.append(next_event(rank.lifeline, EVENT))  # type: ignore[arg-type]
    finish(rank)
    assert rank.exited.signal == signal.SIGUSR1
    assert not any(alive(pid) for pid in tree.values())


def has_a_child(rank: Rank) -> None:
    wait_until(lambda: children_of(rank.keeper_pid) != [], "the keeper to fork")


def has_a_group(rank: Rank) -> None:
    has_a_child(rank)
    (pid,) = children_of(rank.keeper_pid)
    wait_until(lambda: os.getpgid(pid) == pid, "the process to leave its parent's group")


def has_started(rank: Rank) -> None:
    rank.events.append(next_event(rank.lifeline, EVENT))  # type: ignore[arg-type]


def has_begun_the_script(rank: Rank) -> None:
    wait_until((rank.record_path.parent / "ready").exists, "the script")


MOMENTS_OF_A_START = (lambda _rank: None, has_a_child, has_a_group, has_started, has_begun_the_script)


@pytest.mark.rare
def test_signal_is_never_lost_in_the_start(server: RunningServer, tmp_path: Path) -> None:
    """The signal is sent before the process has left its parent's group, or while it has its parent's handlers."""
    ends = []
    for moment in (*MOMENTS_OF_A_START, *reversed(MOMENTS_OF_A_START)) * 2:
        (tmp_path / "ready").unlink(missing_ok=True)
        rank = start(server, tmp_path, "stopping.py", str(tmp_path), "die")
        moment(rank)
        rank.lifeline.signal(signal.SIGTERM)
        ends.append(finish(rank).exited.signal)
    assert ends == [signal.SIGTERM] * 4 * len(MOMENTS_OF_A_START)


def working_directory(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


@pytest.mark.rare
def test_fleeing_processes_are_caught(server: RunningServer, tmp_path: Path) -> None:
    """Three chains of processes, each forking a successor in a new session and ending, faster than /proc can be read."""
    (tmp_path / "marks").mkdir()
    rank = start(server, tmp_path, "respawn.py", str(tmp_path / "marks"))
    wait_until((tmp_path / "marks" / "ready").exists, "the flight")
    rank.lifeline.kill()
    finish(rank)
    assert isinstance(rank.events[-1], Gone)
    assert [process for process in psutil.process_iter() if working_directory(process) == str(tmp_path)] == []


def test_killed_keeper_takes_its_tree_along(server: RunningServer, tmp_path: Path) -> None:
    """The process dies of its parent-death signal; the fork server kills the orphans, and leaves no zombie."""
    rank, tree = start_tree(server, tmp_path)
    os.kill(rank.keeper_pid, signal.SIGKILL)
    finish(rank)
    assert isinstance(rank.events[-1], KeeperLost)
    assert_gone(*tree.values())
    wait_until(lambda: children_of(server.started.pid) == [], "the fork server to bury everyone")
    assert read_exit_record(rank.record_path) is None
    assert server.client.hello_sync().keepers == 0


@pytest.mark.rare
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_keeper_ignores_requests_to_end(server: RunningServer, tmp_path: Path, number: int) -> None:
    """The keeper survives a shutdown's signals to all processes until its process has ended, to report how."""
    rank = start(server, tmp_path, "stopping.py", str(tmp_path), "save")
    wait_until((tmp_path / "ready").exists, "the script")
    os.kill(rank.keeper_pid, number)
    rank.lifeline.signal(signal.SIGTERM)
    assert finish(rank).exited.exit_code == 17


def test_killed_fork_server_is_replaced_and_jobs_do_not_notice(own_server: RunningServer, tmp_path: Path) -> None:
    rank, tree = start_tree(own_server, tmp_path)
    os.kill(own_server.started.pid, signal.SIGKILL)
    assert_gone(own_server.started.pid)
    with pytest.raises(ForkServerMissingError, match="start_fork_server"):
        own_server.client.hello_sync()
    socket, log = own_server.socket, own_server.directory / "fork.log"
    replaced = start_fork_server(str(BARE_PYTHON), socket, log, env=ENVIRONMENT)
    assert not replaced.already_running
    try:
        assert own_server.client.hello_sync().pid == replaced.pid
        assert all(alive(pid) for pid in tree.values())
        rank.lifeline.kill()
        assert finish(rank).exited.signal == signal.SIGKILL
        assert not any(alive(pid) for pid in tree.values())
    finally:
        own_server.client.shutdown_sync()
        assert_gone(replaced.pid)


def test_shutdown_leaves_jobs_running(own_server: RunningServer, tmp_path: Path) -> None:
    rank = start(own_server, tmp_path, "stopping.py", str(tmp_path), "save")
    wait_until((tmp_path / "ready").exists, "the script")
    own_server.client.shutdown_sync()
    assert_gone(own_server.started.pid)
    assert alive(rank.keeper_pid)
    rank.lifeline.stop(EVENT)
    assert finish(rank).exited.exit_code == 17


@pytest.mark.rare
def test_unread_events_wait_and_hold_nobody_up(server: RunningServer, tmp_path: Path) -> None:
    """If the owner reads nothing, the process still ends and is recorded, and no event is lost."""
    (tmp_path / "loud.py").write_text(f"class E(Exception): pass\nraise E('x' * {1 << 20})\n")
    request = SpawnRequest(
        mode="script", target="loud.py", cwd=str(tmp_path), env=ENVIRONMENT, exit_record=str(tmp_path / "exit.json")
    )
    rank = asyncio.run(start_rank(server.client, tmp_path, request))
    wait_until(rank.record_path.exists, "the record")
    wait_until(lambda: children_of(rank.keeper_pid) == [], "the process to be gone")
    assert [type(event) for event in finish(rank).events] == [Started, ErrorRaised, Exited, Gone]


@pytest.mark.rare
def test_record_that_cannot_be_written_is_said(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    request = SpawnRequest(
        mode="command",
        target="true",
        cwd=str(tmp_path),
        env=ENVIRONMENT,
        exit_record=str(tmp_path / "gone" / "exit.json"),
    )
    shutil.rmtree(tmp_path / "gone")
    exited = finish(asyncio.run(start_rank(server.client, tmp_path, request))).exited
    assert exited.exit_code == 0
    assert exited.record_error is not None
    assert exited.record_error.startswith("ENOENT: No such file or directory")


@pytest.mark.rare
def test_store_lives_as_long_as_its_lifeline(server: RunningServer, tmp_path: Path) -> None:
    async def run() -> None:
        lifeline, _port = await start_store(server.client, tmp_path)
        started = await lifeline.next_event()
        assert isinstance(started, Started)
        assert alive(started.pid)
        lifeline.close()
        await asyncio.to_thread(assert_gone, started.pid)

    asyncio.run(run())


@pytest.mark.rare
def test_two_hundred_starts_leave_nothing_behind(server: RunningServer, tmp_path: Path) -> None:
    """The server has no more descriptors, no zombies, and less than 20 MB more private memory."""

    async def burst(count: int) -> None:
        request = SpawnRequest(
            mode="script",
            target="quick.py",
            cwd=str(tmp_path),
            env=ENVIRONMENT,
            exit_record=str(tmp_path / "exit.json"),
        )
        for _ in range(count // 4):
            ranks = [await start_rank(server.client, tmp_path, request) for _ in range(4)]
            await asyncio.gather(*(rank.finish() for rank in ranks))
            assert [rank.exited.exit_code for rank in ranks] == [0] * 4

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    pid = server.started.pid
    (tmp_path / "quick.py").write_text("import os\nos._exit(0)\n")
    asyncio.run(burst(8))
    wait_until(lambda: children_of(pid) == [], "the first keepers to be buried")
    before, memory_before = descriptors(), _private_kilobytes(pid)
    asyncio.run(burst(200))
    wait_until(lambda: children_of(pid) == [], "the keepers to be buried")
    wait_until(lambda: descriptors() <= before, "what they used to be closed")
    assert _private_kilobytes(pid) - memory_before < 20_000


def _private_kilobytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty"))


@pytest.mark.rare
def test_clients_may_ask_while_others_hang(own_server: RunningServer) -> None:
    """A client that connects and sends no request delays no other client."""
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX) as silent, sockets.socket(sockets.AF_UNIX) as half:
        silent.connect(str(own_server.socket))
        half.connect(str(own_server.socket))
        half.send(b"\0\0")
        BlockingClient(own_server.socket).hello_sync()
        assert silent.fileno() >= 0 < half.fileno(), "both still hang"


def stopping(server: RunningServer, folder: Path, how: str) -> Rank:
    """Start a process whose owner has a pipe to it, as a rank actor has; the owner then closes the pipe."""
    reader, writer = os.pipe()
    request = SpawnRequest(
        mode="script",
        target=str(SCRIPTS / "stopping.py"),
        args=(str(folder), how),
        cwd=str(folder),
        env=ENVIRONMENT,
        exit_record=str(folder / "exit.json"),
    )
    spawned = server.client.spawn_sync(request, stdout=writer, stderr=writer)
    os.close(writer)
    wait_until((folder / "ready").exists, "the script")
    os.close(reader)  # the owner is about to die
    return Rank(time.time(), spawned.lifeline, spawned.keeper_pid, folder / "out", folder / "err", folder / "exit.json")


@pytest.mark.rare
def test_a_rank_that_the_shutdown_of_its_machine_stops_outlives_its_owner(
    server: RunningServer, tmp_path: Path
) -> None:
    """The rank prints more than a pipe holds, to an owner that has ended, before it has saved."""
    rank = stopping(server, tmp_path, "slowly")
    (script,) = children_of(rank.keeper_pid)
    for pid in (script, rank.keeper_pid):
        os.kill(pid, signal.SIGTERM)
    wait_until((tmp_path / "told").exists, "the handler")
    rank.lifeline.close()
    assert_gone(rank.keeper_pid, script)
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM))
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert (record.exit_code, record.signal, record.cause) == (17, None, None)
    assert record.ending.stop_seen_at is not None
    assert record.ending.keeper_terminated_at is not None


def asleep(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_RUNNING
    except psutil.NoSuchProcess:
        return True


@pytest.mark.rare
def test_a_shutdown_that_reaches_the_owner_first_leaves_the_rank_its_time(
    server: RunningServer, tmp_path: Path
) -> None:
    """The sender waits for a CPU between its two signals; if it waits for too long in one try, the test tries again."""

    def saved(number: int) -> bool:
        folder = tmp_path / str(number)
        folder.mkdir()
        rank = stopping(server, folder, "save")
        (script,) = children_of(rank.keeper_pid)
        with socket.socket(fileno=os.dup(rank.lifeline.fileno())) as end:
            end.settimeout(PATIENCE_SECONDS)
            end.shutdown(socket.SHUT_WR)
            while end.recv(65536):  # until the keeper has seen the end
                pass
        rank.lifeline.close()
        wait_until(lambda: asleep(rank.keeper_pid), "the keeper that waits for its own signal")
        for pid in (rank.keeper_pid, script):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert_gone(rank.keeper_pid, script)
        return (folder / "saved").exists()

    assert any(saved(number) for number in range(20))


@pytest.mark.rare
def test_a_rank_that_does_not_end_in_a_shutdown_is_killed_with_its_owner(server: RunningServer, tmp_path: Path) -> None:
    rank = stopping(server, tmp_path, "ignore")
    (script,) = children_of(rank.keeper_pid)
    for pid in (script, rank.keeper_pid):
        os.kill(pid, signal.SIGTERM)
    rank.lifeline.close()
    assert_gone(rank.keeper_pid, script)
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert (record.signal, record.cause) == (signal.SIGKILL, "lifeline")
    assert record.ending.keeper_terminated_at is not None


@pytest.mark.rare
@pytest.mark.parametrize("order", ["stop", "kill"])
def test_an_order_of_the_owner_leaves_no_time_after_its_death(
    server: RunningServer, tmp_path: Path, order: str
) -> None:
    rank = stopping(server, tmp_path, "too late")
    (script,) = children_of(rank.keeper_pid)
    for pid in (script, rank.keeper_pid):
        os.kill(pid, signal.SIGTERM)
    wait_until((tmp_path / "told").exists, "the handler")
    if order == "stop":
        rank.lifeline.stop(timedelta(minutes=5))
    else:
        rank.lifeline.kill()
    rank.lifeline.close()
    assert_gone(rank.keeper_pid, script)
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert record.signal == signal.SIGKILL
    assert not (tmp_path / "saved").exists()
