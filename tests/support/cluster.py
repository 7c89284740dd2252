"""A real Ray cluster of several nodes on this machine: a head without CPUs, and workers, each with its own raylet.

All nodes share one host name and one address, so they differ only in the node id; everything listens on the loopback
address only. ``python -m tests.support.cluster '{json}'`` starts one node and exits; the node continues to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.runtime.cluster.head import LOOPBACK, OBJECT_STORE_BYTES, ray_environment
from tests.support.stack import PATIENCE_SECONDS, kill_all, process_gone, wait_until

# Ray detects a dead node within three seconds, a frozen one within nine, instead of a minute.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 6,
    "enable_metrics_collection": False,
    "event_stats": False,
    # Periodic work of eight raylets on two processors, as rare as in a head that orch starts.
    "raylet_check_gc_period_milliseconds": 10_000,
    "object_manager_timer_freq_ms": 1_000,
    "local_fs_monitor_interval_ms": 10_000,
    "kill_idle_workers_interval_ms": 1_000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One node: its id, and the process id of its raylet."""

    id: str
    raylet: int

    def kill(self) -> None:
        """Send SIGKILL to the raylet: its processes end with it."""
        os.kill(self.raylet, signal.SIGKILL)
        wait_until("the raylet is dead", lambda: process_gone(self.raylet))

    def freeze(self) -> None:
        """Stop the raylet while everything else on the node continues."""
        os.kill(self.raylet, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the raylet."""
        os.kill(self.raylet, signal.SIGCONT)


class RayCluster:
    """Starts a head and ``workers`` nodes. ``close`` leaves no process and no file."""

    def __init__(self, *, workers: int, cpus: float = 2, gpus: float = 0) -> None:
        self._cpus, self._gpus = cpus, gpus
        self.directory = Path(tempfile.mkdtemp(prefix="orch-r-"))
        self._token = self.directory / "token"
        self._token.write_text(secrets.token_hex(32))
        self._token.chmod(0o600)
        self.environ = ray_environment(self._token)
        self._python = self._small_environment()
        try:
            head = self._start(self._options(0, 0))
            self.address: str = head["gcs_address"]
            self.head = RayNode(id=head["node_id"], raylet=head["pids"]["raylet"][0])
            self.workers = self._add(workers)
        except BaseException:
            self.close()
            raise

    def _small_environment(self) -> str:
        """Create an interpreter with this one's packages that Ray can copy fast, as for ``runtime_env: pip``."""
        home = self.directory / "venv"
        venv.create(home, symlinks=True)
        mine, its = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars={"base": str(home)})
        Path(its, "mine.pth").write_text(f"import site; site.addsitedir({mine!r})\n")
        return str(home / "bin" / "python")

    def _options(self, cpus: float, gpus: float, **more: Any) -> dict[str, Any]:
        return {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_bytes": OBJECT_STORE_BYTES,
            "address": LOOPBACK,
            "temp_dir": str(self.directory),
            **more,
        }

    def _start(self, options: dict[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        done = subprocess.run(
            [self._python, "-m", "tests.support.cluster", json.dumps(options)],
            env=self.clean_environ() | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        reply: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return reply

    def clean_environ(self) -> dict[str, str]:
        """Return this process's environment with the cluster's settings and no others of Ray."""
        return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ORCH_"))} | self.environ

    def _add(self, count: int, *, cpus: float | None = None, environ: Mapping[str, str] | None = None) -> list[RayNode]:
        added: list[RayNode] = []

        def start() -> None:
            options = self._options(cpus or self._cpus, self._gpus, gcs_address=self.address)
            reply = self._start(options, environ)
            added.append(RayNode(id=reply["node_id"], raylet=reply["pids"]["raylet"][0]))

        threads = [threading.Thread(target=start) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(added) == count, "a node did not start"
        return added

    def add_node(self, *, cpus: float | None = None, environ: Mapping[str, str] | None = None) -> RayNode:
        """Start one more worker, with variables of its own."""
        (node,) = self._add(1, cpus=cpus, environ=environ)
        self.workers.append(node)
        return node

    def keep(self, count: int) -> None:
        """Ensure that at least ``count`` workers run: forget dead ones, start missing ones."""
        self.workers = [node for node in self.workers if not process_gone(node.raylet)]
        self.workers += self._add(max(0, count - len(self.workers)))

    def node(self, node_id: str) -> RayNode:
        """Return the worker with this id."""
        return next(node for node in self.workers if node.id == node_id)

    def run(self, program: str, seconds: float = PATIENCE_SECONDS) -> str:
        """Run a program as another user of the cluster, with ``ray`` connected in its namespace; return its output."""
        connect = (
            f"import ray\nray.init(address={self.address!r}, namespace='somebody', log_to_driver=False,"
            " configure_logging=False)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", connect + program],
            env=self.clean_environ(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """Return every process of the cluster."""
        return _mentioning(str(self.directory))

    def close(self) -> None:
        """Kill every process of the cluster, and remove its files."""
        for node in getattr(self, "workers", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.raylet, signal.SIGCONT)
        kill_all(self.processes, f"what belongs to {self.directory}")
        shutil.rmtree(self.directory, ignore_errors=True)


def _mentioning(marker: str) -> list[psutil.Process]:
    """Return the processes that name ``marker`` on their command line, with all that they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(marker in part for part in process.cmdline()):
                found.update({p.pid: p for p in (process, *process.children(recursive=True))})
    found.pop(os.getpid(), None)
    return list(found.values())


def start_node(options: dict[str, Any]) -> dict[str, Any]:
    """Start a worker node, or a head where no address of one is given; return its address and id, and process ids by name."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    head, name = "gcs_address" not in options, secrets.token_hex(4)
    here: dict[str, Any] = {"gcs_server_port": 0, "no_monitor": True, "include_dashboard": False}
    params = RayParams(
        **(here | {"_system_config": SYSTEM_CONFIG} if head else {"gcs_address": options["gcs_address"]}),
        num_cpus=options["num_cpus"],
        num_gpus=options["num_gpus"],
        object_store_memory=options["object_store_bytes"],
        node_ip_address=options["address"],
        temp_dir=options["temp_dir"],
        dashboard_agent_listen_port=0,
        dashboard_port=0,
        # Nodes that start at the same moment would choose the same name with Ray's own names.
        raylet_socket_name=str(Path(options["temp_dir"]) / f"{name}.raylet"),
        plasma_store_socket_name=str(Path(options["temp_dir"]) / f"{name}.store"),
        include_log_monitor=False,
        env_vars={},
    )
    node = Node(params, head=head, shutdown_at_exit=False, spawn_reaper=False)
    return {
        "gcs_address": node.gcs_address,
        "node_id": node.node_id,
        "pids": {name: [p.process.pid for p in group] for name, group in node.all_processes.items()},
    }


if __name__ == "__main__":
    print(json.dumps(start_node(json.loads(sys.argv[1]))), flush=True)
