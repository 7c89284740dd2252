"""The same scripts observe the same under torchrun and under the fork server.

Each start of torchrun takes seconds, so one run of a script observes as much as it can and writes it down. What is
allowed to differ is listed here, name by name; all else must be equal.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.forkserver.linux import restore_priorities
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import Started
from tests.integration.forkserver_fixture import ENVIRONMENT, RunningServer, running_server, wait_until
from tests.integration.forkserver_ranks import Rank, environment, run_ranks, start_rank
from tests.support.stack import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent / "parity_scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RANKS = (0, 1)

# Variables that both launchers set, each with values of its own attempt.
OWN_VALUES = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
# Variables that only orch sets.
ADDED = {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "ORCH_JOB_ID", "ORCH_ATTEMPT", "ORCH_CHECKPOINT_DIR"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for both launchers, so that every path that a script sees must be equal, not similar."""
    place = tmp_path_factory.mktemp("parity") / "scripts"
    shutil.copytree(SCRIPTS, place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def torchrun_environment(workplace: Path) -> dict[str, str]:
    """Return what both launchers' ranks inherit; torchrun would also pass on a PWD that is not its directory."""
    dropped = ("RAY_", "ORCH_", "TORCHELASTIC_")
    kept = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(dropped)}
    for name in ("PWD", "OLDPWD", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        kept.pop(name, None)
    return kept


def under_torchrun(workplace: Path, *arguments: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run a command line; return the folder that the ranks wrote to, renamed, and the process's outcome."""
    (workplace / "out").mkdir()
    outcome = subprocess.run(
        [*TORCHRUN, *arguments],
        cwd=workplace,
        env=torchrun_environment(workplace),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        preexec_fn=restore_priorities,  # as orch's fork server does: the suite itself may run at a lower one
    )
    return _put_aside(workplace, "torchrun"), outcome


def under_orch(
    server: RunningServer, workplace: Path, logs: Path, target: str, **options: Any
) -> tuple[Path, list[Rank]]:
    (workplace / "out").mkdir()
    ranks = asyncio.run(
        run_ranks(
            server.client,
            logs,
            2,
            target,
            ["out", "--lr", "0.1"],
            cwd=workplace,
            base=torchrun_environment(workplace),
            **options,
        )
    )
    return _put_aside(workplace, "orch"), ranks


def _put_aside(workplace: Path, name: str) -> Path:
    aside = workplace.parent / f"out.{name}"
    shutil.rmtree(aside, ignore_errors=True)
    (workplace / "out").rename(aside)
    return aside


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


@pytest.fixture(scope="module")
def torchrun_observed(workplace: Path) -> dict[str, Any]:
    """Return what observe.py saw under torchrun, and the other files that it wrote."""
    theirs, outcome = under_torchrun(workplace, "observe.py", "out", "--lr", "0.1")
    assert outcome.returncode == 0, outcome.stderr
    files = {path.name: path.read_text() for path in theirs.iterdir() if path.suffix != ".json"}
    return {"theirs": reports(theirs), "their_files": files, "torchrun": outcome}


@pytest.fixture(scope="module")
def observed(
    torchrun_observed: dict[str, Any],
    server: RunningServer,
    workplace: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Return the same with the fork server's added."""
    logs = tmp_path_factory.mktemp("logs")
    ours, ranks = under_orch(server, workplace, logs, "observe.py")
    assert [rank.exited.exit_code for rank in ranks] == [0, 0], ranks[0].stderr
    return {
        **torchrun_observed,
        "ours": reports(ours),
        "our_files": {path.name: path.read_text() for path in ours.iterdir() if path.suffix != ".json"},
        "ranks": ranks,
    }


def test_the_start_was_warm(observed: dict[str, Any]) -> None:
    """With a cold start, the whole comparison would say nothing about forks."""
    assert [rank.event(Started).cold for rank in observed["ranks"]] == [None, None]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "section",
    ["namespace", "interpreter", "process", "threads", "collector", "children", "loaders", "training", "imports"],
)
def test_scripts_see_the_same(observed: dict[str, Any], section: str, rank: int) -> None:
    assert observed["ours"][rank][section] == observed["theirs"][rank][section]


@pytest.mark.parametrize("rank", RANKS)
def test_environment(observed: dict[str, Any], rank: int) -> None:
    ours, theirs = observed["ours"][rank]["environment"], observed["theirs"][rank]["environment"]
    assert ours.keys() - theirs.keys() == ADDED
    assert theirs.keys() - ours.keys() == set()
    different = {name for name in theirs if ours[name] != theirs[name]}
    assert different <= OWN_VALUES
    assert (ours["OMP_NUM_THREADS"], ours["CUDA_VISIBLE_DEVICES"], ours["CUDA_DEVICE_ORDER"]) == ("1", "", "PCI_BUS_ID")


@pytest.mark.parametrize("launcher", ["ours", "theirs"])
def test_every_rank_has_seeds_of_its_own(observed: dict[str, Any], launcher: str) -> None:
    first, second = (observed[launcher][rank]["seeds"] for rank in RANKS)
    assert {name for name in first if first[name] == second[name]} == set()


def test_exit_is_a_real_one(observed: dict[str, Any]) -> None:
    """Files left open are flushed, atexit runs, a thread that is still busy is waited for."""
    left = {f"open-{holder}": "flushed" for holder in ("main", "cycle", "module", "class", "torch", "torch-cycle")}
    expected = {
        f"{rank}.{what}": text for rank in RANKS for what, text in (left | {"atexit": "ran", "thread": "done"}).items()
    }
    assert observed["our_files"] == observed["their_files"] == expected


def test_output(observed: dict[str, Any]) -> None:
    assert [(rank.stdout, rank.stderr) for rank in observed["ranks"]] == [
        ("out 0\n", "err 0\n"),
        ("out 1\n", "err 1\n"),
    ]
    assert sorted(observed["torchrun"].stdout.splitlines()) == ["out 0", "out 1"]
    assert "err 0\n" in observed["torchrun"].stderr


def test_module(server: RunningServer, workplace: Path, tmp_path: Path) -> None:
    theirs, outcome = under_torchrun(workplace, "-m", "pkg", "out", "--lr", "0.1")
    assert outcome.returncode == 0, outcome.stderr
    ours, ranks = under_orch(server, workplace, tmp_path, "pkg", mode="module", store=False)
    assert [(rank.exited.exit_code, rank.started.cold) for rank in ranks] == [(0, None), (0, None)], ranks[0].stderr
    assert reports(ours) == reports(theirs)


def test_termination(server: RunningServer, workplace: Path, tmp_path: Path) -> None:
    """SIGTERM to the launcher reaches every rank; the one that handles it saves and chooses its exit code."""
    (workplace / "out").mkdir()
    agent = subprocess.Popen(
        [*TORCHRUN, "terminated.py", "out"],
        cwd=workplace,
        env=torchrun_environment(workplace),
        stderr=subprocess.PIPE,
        text=True,
    )
    ready = [workplace / "out" / f"{rank}.ready" for rank in RANKS]
    wait_until(lambda: all(path.exists() for path in ready), "both ranks under torchrun")
    agent.terminate()
    _, said = agent.communicate(timeout=PATIENCE_SECONDS)
    theirs = _put_aside(workplace, "torchrun")
    assert agent.returncode != 0, said

    (workplace / "out").mkdir()
    ranks = asyncio.run(_terminate(server, workplace, tmp_path, ready))
    ours = _put_aside(workplace, "orch")
    saved = [sorted(path.name for path in folder.glob("*.saved")) for folder in (ours, theirs)]
    assert saved == [["0.saved"], ["0.saved"]]
    assert (ours / "0.saved").read_text() == (theirs / "0.saved").read_text() == "SIGTERM in wait"
    assert [(rank.exited.exit_code, rank.exited.signal) for rank in ranks] == [(17, None), (None, signal.SIGTERM)]


async def _terminate(server: RunningServer, workplace: Path, logs: Path, ready: list[Path]) -> list[Rank]:
    ranks = [
        await start_rank(
            server.client,
            logs,
            SpawnRequest(
                mode="script",
                target="terminated.py",
                args=("out",),
                cwd=str(workplace),
                env=environment(logs, rank, 2, 1, {}, torchrun_environment(workplace)),
                exit_record=str(logs / f"{rank}.exit.json"),
            ),
            str(rank),
        )
        for rank in RANKS
    ]
    await asyncio.to_thread(wait_until, lambda: all(path.exists() for path in ready), "both ranks under orch")
    for rank in ranks:
        assert rank.lifeline.signal(signal.SIGTERM)
    return [await rank.finish() for rank in ranks]
