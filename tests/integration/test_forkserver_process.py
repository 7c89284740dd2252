"""State of a started process, warm or cold: descriptors, threads, environment, directory; and a job of two ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import Gone, Started
from tests.integration.forkserver_fixture import (
    ENVIRONMENT,
    RunningServer,
    next_event,
    running_server,
    wait_until,
)
from tests.integration.forkserver_ranks import Rank, run_ranks, start_rank, start_store
from tests.support.stack import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent / "parity_scripts"
SLEEP = "import time, pathlib\npathlib.Path('up').touch()\ntime.sleep(60)\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def run(server: RunningServer, place: Path, program: str | None = None, **fields: Any) -> Rank:
    """Run a program (or a command) to its end."""
    if program is not None:
        (place / "program.py").write_text(program)
    defaults = {"mode": "script", "target": "program.py", "cwd": str(place), "env": ENVIRONMENT}
    request = SpawnRequest(**defaults | fields, exit_record=str(place / "exit.json"))  # type: ignore[arg-type]

    async def both() -> Rank:
        return await (await start_rank(server.client, place, request)).finish()

    return asyncio.run(both())


# -- cold starts


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PYTHONHASHSEED", "0"),
        ("LD_LIBRARY_PATH", "/somewhere/else"),
        ("TORCH_LOGS", "+dynamo"),
    ],
)
def test_variable_that_was_read_already_starts_cold(
    server: RunningServer, tmp_path: Path, variable: str, value: str
) -> None:
    assert ENVIRONMENT.get(variable) != value
    rank = run(server, tmp_path, f"import os; print(os.environ[{variable!r}])", env={**ENVIRONMENT, variable: value})
    assert rank.started.cold == f"environment variable {variable}"
    assert (rank.exited.exit_code, rank.stdout) == (0, f"{value}\n")


@pytest.mark.parametrize(
    "env",
    [
        {"HF_HOME": "/x", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"},
        {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"},
        {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline", "TZ": "Asia/Tokyo"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "ORCH_JOB_ID": "j", "TORCHELASTIC_RUN_ID": "j"},
    ],
)
def test_ordinary_variables_start_warm(server: RunningServer, tmp_path: Path, env: dict[str, str]) -> None:
    program = f"import os; print({{name: os.environ.get(name) for name in {sorted(env)!r}}} == {env!r})"
    rank = run(server, tmp_path, program, env={**ENVIRONMENT, **env})
    assert (rank.started.cold, rank.stdout) == (None, "True\n")


@pytest.mark.rare
def test_cold_start_has_the_effect_of_its_reason(server: RunningServer, tmp_path: Path) -> None:
    program = "import sys; print(hash('x'), sys.flags.optimize, sys.argv, sys.orig_argv[1:])"
    rank = run(
        server, tmp_path, program, python_options=("-O",), args=("a",), env={**ENVIRONMENT, "PYTHONHASHSEED": "5"}
    )
    assert rank.started.cold == "interpreter option -O"
    by_hand = subprocess.run(
        [sys.executable, "-u", "-O", "program.py", "a"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert rank.stdout == by_hand.stdout


def test_cold_on_request(server: RunningServer, tmp_path: Path) -> None:
    rank = run(server, tmp_path, "import sys; print('torch' in sys.modules)", cold=True)
    assert (rank.started.cold, rank.stdout) == ("asked for", "False\n")


@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "content"),
    [("queue.py", "WHO = 'mine'\n"), ("sympy/__init__.py", "WHO = 'mine'\n"), ("numpy/__init__.py", "WHO = 'mine'\n")],
)
def test_module_beside_the_script_wins_as_it_would_by_hand(
    server: RunningServer, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    module = name.partition("/")[0].removesuffix(".py")
    rank = run(server, tmp_path, f"import {module}; print({module}.WHO)")
    assert (rank.started.cold, rank.stdout) == (f"module {module} beside the script", "mine\n")


@pytest.mark.rare
@pytest.mark.parametrize("name", ["os.py", "sys.py", "utils.py", "data/readme", "site.py", "torch_extra.py"])
def test_files_that_shadow_nothing_start_warm(server: RunningServer, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise RuntimeError('not to be imported')\n")
    assert run(server, tmp_path, "import os, sys").started.cold is None


# -- what a process is given


def test_only_the_standard_descriptors_are_open(server: RunningServer, tmp_path: Path) -> None:
    # 3 is the listing's own descriptor.
    assert (
        run(server, tmp_path, "import os; print(sorted(os.listdir('/proc/self/fd'), key=int))").stdout
        == "['0', '1', '2', '3']\n"
    )


@pytest.mark.rare
def test_output_ends_with_the_process_though_its_keeper_lives(server: RunningServer, tmp_path: Path) -> None:
    """Readers of the pipes see their end at once: the keeper holds none of them."""
    reader, writer = os.pipe()
    request = SpawnRequest(mode="command", target="true", cwd=str(tmp_path), env=ENVIRONMENT)
    spawned = server.client.spawn_sync(request, stdout=writer, stderr=writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b""
    with contextlib.closing(spawned.lifeline) as lifeline:
        while not isinstance(next_event(lifeline, timedelta(seconds=PATIENCE_SECONDS)), Gone):
            pass


@pytest.mark.parametrize(
    ("threads", "env", "expected"),
    [(None, {}, None), (None, {"OMP_NUM_THREADS": "1"}, 1), (3, {}, 3), (None, {"OMP_NUM_THREADS": "3,2"}, 3)],
)
def test_threads(
    server: RunningServer, tmp_path: Path, threads: int | None, env: dict[str, str], expected: int | None
) -> None:
    """The number is that of a fresh process with the same OMP_NUM_THREADS, or the one requested."""
    program = "import torch; print(torch.get_num_threads())"
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    rank = run(server, tmp_path, program, threads=threads, env=clean | env)
    if expected is None:
        by_hand = [sys.executable, "program.py"]
        expected = int(subprocess.run(by_hand, cwd=tmp_path, env=clean, capture_output=True, check=True).stdout)
    assert rank.stdout == f"{expected}\n"


def test_keeper_is_small(server: RunningServer, tmp_path: Path) -> None:
    """Each rank has a keeper for as long as it runs, so a keeper's private memory must be small."""
    (tmp_path / "program.py").write_text(SLEEP)
    request = SpawnRequest(
        mode="script", target="program.py", cwd=str(tmp_path), env=ENVIRONMENT, exit_record=str(tmp_path / "exit.json")
    )
    rank = asyncio.run(start_rank(server.client, tmp_path, request))
    wait_until((tmp_path / "up").exists, "the script")
    rollup = Path(f"/proc/{rank.keeper_pid}/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    assert private < 12_000, rollup
    rank.lifeline.kill()
    asyncio.run(rank.finish())


# -- failures before the first line


def test_missing_directory_is_said(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    rank = run(server, tmp_path, cwd=str(tmp_path / "nowhere"))
    assert rank.event(Started) is None
    assert rank.exited.exit_code == 127
    assert rank.error is not None
    assert rank.error.message == f"cannot enter the working directory {tmp_path}/nowhere: No such file or directory"
    assert rank.stderr == f"orch: {rank.error.message}\n"


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("no-such-command", 127, "cannot execute 'no-such-command': No such file or directory"),
        ("./plain.txt", 126, "cannot execute './plain.txt': it is not executable"),
        ("./noformat", 126, "cannot execute './noformat': Exec format error"),
        ("./nointerpreter", 127, "cannot execute './nointerpreter': its first line names the interpreter '/no/such"),
        ("./windows", 127, r"cannot execute './windows': its first line names the interpreter '/bin/sh\r', which"),
    ],
)
def test_command_that_cannot_be_executed(
    server: RunningServer, tmp_path: Path, target: str, code: int, said: str
) -> None:
    for name, text, mode in (
        ("plain.txt", "text", 0o644),
        ("noformat", "text", 0o755),
        ("nointerpreter", "#!/no/such/program\n", 0o755),
        ("windows", "#!/bin/sh\r\n", 0o755),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    rank = run(server, tmp_path, mode="command", target=target)
    assert rank.exited.exit_code == code
    assert rank.error is not None
    assert rank.error.type == "CannotExecute"
    assert rank.error.message.startswith(said)
    assert rank.stderr == f"orch: {rank.error.message}\n"


def test_command_is_like_any_other(server: RunningServer, tmp_path: Path) -> None:
    """A command is found on the job's PATH, runs in its directory, and has default signals, SIGPIPE among them.

    The C library reserves signals 32 and 33: no program can change them, and these tests may inherit them ignored.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mine").write_text("#!/bin/sh\npwd; echo $A $1; grep SigIgn /proc/$$/status\n")
    (tmp_path / "bin" / "mine").chmod(0o755)
    env = {**ENVIRONMENT, "PATH": f"{tmp_path}/bin:{ENVIRONMENT['PATH']}", "A": "a"}
    rank = run(server, tmp_path, mode="command", target="mine", args=("b",), env=env)
    where, said, ignored = rank.stdout.splitlines()
    assert (where, said) == (str(tmp_path), "a b")
    assert int(ignored.removeprefix("SigIgn:"), 16) & ~(1 << 31 | 1 << 32) == 0
    assert rank.started.cold is None


@pytest.mark.rare
def test_store_on_a_socket_that_does_not_listen(server: RunningServer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wrong:
        wrong.bind(("127.0.0.1", 0))
        with (tmp_path / "log").open("wb") as log:
            spawned = server.client.spawn_sync(
                SpawnRequest(mode="store", cwd=str(tmp_path), env=ENVIRONMENT),
                stdout=log.fileno(),
                stderr=log.fileno(),
                listen=wrong.fileno(),
            )
    with contextlib.closing(spawned.lifeline) as lifeline:
        kinds = []
        while (event := next_event(lifeline, timedelta(seconds=PATIENCE_SECONDS))) is not None:
            kinds.append(type(event).__name__)
    assert kinds == ["Started", "ErrorRaised", "Exited", "Gone"]


# -- jobs


def test_two_ranks_train_together(server: RunningServer, tmp_path: Path) -> None:
    """Two gloo ranks meet at the rendezvous store and average gradients; benchmarks/start_latency measures how long that takes."""
    ranks = asyncio.run(run_ranks(server.client, tmp_path, 2, str(SCRIPTS / "ddp_step.py")))
    assert [rank.exited.exit_code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    told = [json.loads(rank.stdout) for rank in ranks]
    assert [one["sum"] for one in told] == [3.0, 3.0]
    assert told[0]["weights"] == told[1]["weights"]
    assert all(one["marks"]["step_0"] > rank.asked_at for one, rank in zip(told, ranks, strict=True))


@pytest.mark.rare
def test_jobs_side_by_side_do_not_meet(server: RunningServer, tmp_path: Path) -> None:
    """Several jobs run at once on one machine, each with a rendezvous store of its own."""
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()

    async def all_jobs() -> list[list[Rank]]:
        jobs = [run_ranks(server.client, folder, 2, str(SCRIPTS / "ddp_step.py")) for folder in folders]
        return await asyncio.gather(*jobs)

    for ranks in asyncio.run(all_jobs()):
        assert [rank.exited.exit_code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
        assert [json.loads(rank.stdout)["sum"] for rank in ranks] == [3.0, 3.0]


@pytest.mark.rare
def test_teardown_right_after_the_last_step(server: RunningServer, tmp_path: Path) -> None:
    """The deadlock against which warm.py holds the process group: without that a third of these runs hang."""
    program = (
        "import torch, torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "    optimizer = torch.optim.Adam(model.parameters())\n"
        "    for _ in range(5):\n"
        "        optimizer.zero_grad()\n"
        "        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 2)).backward()\n"
        "        optimizer.step()\n"
        "    dist.destroy_process_group()\n"
        "train()\n"
    )
    (tmp_path / "train.py").write_text(program)
    for _ in range(8):
        ranks = asyncio.run(run_ranks(server.client, tmp_path, 2, "train.py"))
        assert [(rank.exited.exit_code, rank.exited.signal) for rank in ranks] == [(0, None)] * 2


@pytest.mark.rare
def test_store_keeps_what_it_is_given(server: RunningServer, tmp_path: Path) -> None:
    """The rendezvous store keeps what a rank that died has set; its port is the one that the caller bound."""

    async def use() -> None:
        lifeline, port = await start_store(server.client, tmp_path)
        try:
            write = f"import torch.distributed as d; d.TCPStore('127.0.0.1', {port}).set('k', 'v'); __import__('os')._exit(9)"
            read = f"import torch.distributed as d; print(d.TCPStore('127.0.0.1', {port}).get('k'))"
            for program, code in ((write, 9), (read, 0)):
                (tmp_path / "program.py").write_text(program)
                request = SpawnRequest(
                    mode="script", target="program.py", cwd=str(tmp_path), env=ENVIRONMENT,
                    exit_record=str(tmp_path / "exit.json"),
                )  # fmt: skip
                rank = await (await start_rank(server.client, tmp_path, request)).finish()
                assert rank.exited.exit_code == code, rank.stderr
            assert rank.stdout == "b'v'\n"
        finally:
            lifeline.close()

    asyncio.run(use())
