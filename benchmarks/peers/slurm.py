"""A Slurm of Debian's packages in a folder of its own: munged, slurmctld and slurmd in the foreground, as root, without systemd.

``TUNING`` holds the advice of Slurm's high-throughput guide that raises the rate of a machine with few processors. The folder has
configuration, key, state and logs; leaving the context ends the processes and removes it. Nothing outside the folder is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from benchmarks.measure import wait_for
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

NODE: Final = "bench0"
COMMANDS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
SEARCH_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
STOP_SECONDS: Final = 20.0

BASE: Final[Mapping[str, str]] = {
    "ClusterName": "bench",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "ReturnToService": "2",
}
TUNING: Final[Mapping[str, str]] = {
    "SchedulerType": "sched/builtin",
    "PriorityType": "priority/basic",
    "SchedulerParameters": "defer,batch_sched_delay=0,sched_min_interval=0,default_queue_depth=100",
    "MinJobAge": "2",
    "MaxJobCount": "200000",
    "MessageTimeout": "60",
    "SlurmctldDebug": "error",
    "SlurmdDebug": "error",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "JobCompType": "jobcomp/none",
    "PropagatePrioProcess": "0",
}


def why_not(search_path: str = SEARCH_PATH) -> str:
    """Return the reason why this machine cannot run Slurm; empty where it can."""
    missing = [command for command in COMMANDS if shutil.which(command, path=search_path) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd runs as root"
    return ""


class Slurm:
    """One controller and one node of ``cpus`` processors; a context manager.

    ``settings`` are lines of slurm.conf beyond ``BASE``; programs are looked for in ``search_path``.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, cpus: int, search_path: str = SEARCH_PATH) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="orch-bench-slurm-"))
        self._settings = dict(settings or {})
        self._cpus = cpus
        self._search_path = search_path
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environ |= {"SLURM_CONF": str(self.home / "slurm.conf"), "PATH": search_path}

    def __enter__(self) -> Self:
        """Start everything, and wait until the node takes jobs."""
        try:
            self._configure()
            self._munge()
            self.start_controller("-c")
            self._start("slurmd", "-D", "-N", NODE, "-f", str(self.home / "slurm.conf"))
            wait_for("slurmd is registered", lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), 60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self.close()

    def start_controller(self, *options: str) -> None:
        """Start slurmctld and wait until it answers; it reads its state unless ``-c`` is given."""
        self._start("slurmctld", "-D", *options, "-f", str(self.home / "slurm.conf"))
        wait_for("slurmctld answers", lambda: self._run("scontrol", "ping").returncode == 0, 120)

    def stop_controller(self) -> None:
        """Stop slurmctld, as a shutdown does: it writes its state."""
        controller = self._controller()
        _end(controller)
        self._processes.remove(controller)

    def controller_bytes(self) -> int:
        """Return the resident memory of slurmctld in bytes."""
        pages = int(Path(f"/proc/{self._controller().pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _controller(self) -> subprocess.Popen[bytes]:
        return next(one for one in self._processes if "slurmctld" in str(one.args))

    def drain(self) -> None:
        """Let no job start."""
        self.ask("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=bench")

    def resume(self) -> None:
        """Let jobs start again."""
        self.ask("scontrol", "update", f"nodename={NODE}", "state=resume")

    def queued(self) -> int:
        """Return the number of jobs that have not ended."""
        return len(self.ask("squeue", "-h", "-r", "-o", "%i").split())

    def clear(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.ask("scancel", "--user=root")
        wait_for("no job is left", lambda: not self.queued())

    def ask(self, *command: str) -> str:
        """Return the output of a command. Raises RuntimeError with its error."""
        done = self._run(*command)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]}: {done.stderr.strip()[:500]}")
        return done.stdout

    def version(self) -> str:
        """Return the version of Slurm."""
        return self.ask("sbatch", "--version").strip()

    def close(self) -> None:
        """End the processes and the remaining jobs, and remove the folder."""
        if len(self._processes) > 1:
            self._run("scancel", "--user=root", "--state=RUNNING")  # pending jobs are removed with the folder
        for process in reversed(self._processes):
            _end(process)
        self._processes.clear()
        shutil.rmtree(self.home, ignore_errors=True)

    def _configure(self) -> None:
        self.home.chmod(0o755)
        for name in ("state", "spool"):
            (self.home / name).mkdir()
        host, ports = socket.gethostname().partition(".")[0], (free_port(), free_port())
        places = {
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": str(ports[0]),
            "SlurmdPort": str(ports[1]),
            "AuthInfo": f"socket={self.home}/munge.sock",
            "StateSaveLocation": f"{self.home}/state",
            "SlurmdSpoolDir": f"{self.home}/spool",
            "SlurmctldPidFile": f"{self.home}/slurmctld.pid",
            "SlurmdPidFile": f"{self.home}/slurmd.pid",
            "SlurmctldLogFile": f"{self.home}/slurmctld.log",
            "SlurmdLogFile": f"{self.home}/slurmd.log",
        }
        lines = [f"{key}={value}" for key, value in {**BASE, **places, **self._settings}.items()]
        lines += [
            f"NodeName={NODE} NodeAddr=127.0.0.1 NodeHostname={host} CPUs={self._cpus} State=UNKNOWN",
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        (self.home / "slurm.conf").write_text("\n".join(lines) + "\n")
        # slurmd of 22.05 loads a cgroup plugin even where nothing uses it; this one needs no mount.
        (self.home / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.home}/cgroup\n")

    def _munge(self) -> None:
        key = self.home / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        options = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        places = [f"--{option}={self.home}/munge.{end}" for option, end in options.items()]
        self._start("munged", "--foreground", "--force", *places)
        wait_for("munged listens", (self.home / "munge.sock").exists, 30)

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=self._search_path)
        if program is None:
            raise FileNotFoundError(f"{name} not found: apt-get install slurm-wlm munge")
        with (self.home / f"{name}.out").open("ab") as out:
            self._processes.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environ,
                    cwd=self.home,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environ, cwd=self.home, capture_output=True, text=True, check=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL to its whole session where that does not help."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
