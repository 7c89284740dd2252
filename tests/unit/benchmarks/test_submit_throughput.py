"""The benchmark beside Slurm: its clients, and a Slurm with stand-ins for its programs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import queue_depth, submit_throughput
from benchmarks.measure import Arms
from benchmarks.peers.slurm import COMMANDS, TUNING, Slurm, why_not
from benchmarks.submit_throughput import Clients

if TYPE_CHECKING:
    from pathlib import Path

DAEMON = "#!/bin/sh\necho $$ >> {log}/{name}.pid\nexec sleep 600\n"
MUNGED = "#!/bin/sh\necho $$ >> {log}/munged.pid\nfor a; do case $a in --socket=*) : > ${{a#--socket=}};; esac; done\nexec sleep 600\n"
ANSWER = "#!/bin/sh\necho {name} $@ >> {log}/asked\n{line}\n"
LINES = {"sinfo": "echo idle", "squeue": "test -e {log}/cancelled || echo 1 2", "scancel": ": > {log}/cancelled"}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Write stand-ins for Slurm's programs, which log into the same folder."""
    for name in (*COMMANDS, "sinfo"):
        text = {"munged": MUNGED, "slurmctld": DAEMON, "slurmd": DAEMON}.get(name, ANSWER)
        line = LINES.get(name, ":").format(log=tmp_path)
        (tmp_path / name).write_text(text.format(name=name, log=tmp_path, line=line))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def pids(text: str) -> list[int]:
    """Return the process ids that a stand-in has written."""
    return [int(line) for line in text.splitlines()]


def test_a_slurm_of_its_own_leaves_nothing_behind(programs: Path) -> None:
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    with Slurm(TUNING, cpus=3, search_path=path) as slurm:
        home, settings = slurm.home, (slurm.home / "slurm.conf").read_text().splitlines()
        lines = dict(line.split("=", 1) for line in settings)
        assert (home / "munge.key").stat().st_mode & 0o777 == 0o600
        assert all(value.startswith(str(home)) for key, value in lines.items() if key.endswith(("Location", "File")))
        assert lines["AuthInfo"] == f"socket={home}/munge.sock"
        assert lines["SlurmctldPort"] != lines["SlurmdPort"]
        assert lines.items() >= TUNING.items()
        assert "CPUs=3 " in lines["NodeName"]
        assert slurm.queued() == 2
        slurm.drain()
        slurm.clear()
        assert slurm.queued() == 0
        slurm.stop_controller()
        slurm.start_controller()
    assert not home.exists()
    started = [
        pid for name in ("munged", "slurmctld", "slurmd") for pid in pids((programs / f"{name}.pid").read_text())
    ]
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]
    assert "scontrol update nodename=bench0 state=drain reason=bench" in (programs / "asked").read_text()


def test_a_controller_is_measured_at_a_depth(programs: Path) -> None:
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    with Slurm(cpus=2, search_path=path) as slurm:
        found = queue_depth.slurm_depth(slurm, 5, 3, clients=2)
    assert found["queued"] == 6
    assert found["submission"]["n"] == found["empty"]["n"] == 3
    asked = (programs / "asked").read_text().splitlines()
    submitted = [line for line in asked if line.startswith("sbatch --quiet")]
    assert len(submitted) == 6 + 2 * (3 + queue_depth.WARM_UP)
    assert len(pids((programs / "slurmctld.pid").read_text())) == 2, "it was started again"


def test_a_machine_without_slurm_is_told_what_to_install(tmp_path: Path) -> None:
    assert why_not(str(tmp_path)) == f"{', '.join(COMMANDS)} not found: apt-get install slurm-wlm munge"
    slurm = Slurm(cpus=1, search_path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="munged not found"), slurm:
        pass
    assert not slurm.home.exists()


def test_clients_begin_together_and_each_submits_its_share(tmp_path: Path) -> None:
    command = submit_throughput.WAIT.format(count="{count}", command=f"echo x >> {tmp_path}/ledger")
    clients = Clients(lambda count: ["sh", "-c", command.format(count=count)], os.environ, tmp_path)
    assert clients.submit(3, 4) > 0
    assert (tmp_path / "ledger").read_text() == "x\n" * 12


def test_a_client_that_fails_fails_the_round(tmp_path: Path) -> None:
    failing = "print('ready', flush=True); input(); raise SystemExit(3)"
    clients = Clients(lambda _: [sys.executable, "-c", failing], os.environ, tmp_path)
    with pytest.raises(RuntimeError, match="2 of 2 clients failed"):
        clients.submit(2, 1)


def test_arms_are_held_against_ours() -> None:
    found = submit_throughput.summaries(Arms({"orch": [2.0, 2.0], "slurm": [1.0, 1.0], "broken": []}, {}), "orch")
    assert found["ratio"] == {"slurm": {"median": 2.0, "low": 2.0, "high": 2.0}}
    assert submit_throughput.summaries(Arms({"orch": [], "slurm": [1.0]}, {}), "orch")["ratio"] == {}
