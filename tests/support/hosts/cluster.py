"""A Ray cluster and a daemon on hosts of their own, set up by the instructions of docs/operations/clusters.md."""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from tests.support.cluster import SYSTEM_CONFIG
from tests.support.processes import command_line
from tests.support.stack import process_gone, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

    from tests.support.hosts.hosts import Host, Hosts

PORT: Final = 6379
READ_PORT: Final = 9476
POLL_SECONDS: Final = 0.5
STARTS: Final = 3
SHARED: Final = "/home/shared"


class HostCluster:
    """Runs Ray on every host, and the head and the daemon on the first. ``close`` ends the hosts."""

    def __init__(self, hosts: Hosts, *, cpus: int = 4, gpus: int = 2) -> None:
        self.hosts, self._cpus, self._gpus = hosts, cpus, gpus
        self.head = hosts[1]
        self.token = secrets.token_hex(32)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        for host in self.hosts.hosts:
            host.variables |= {
                "ORCH_HOME": f"{host.home}/.orch",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": f"{host.home}/.orch/ray/token",
                "RAY_worker_oom_score_adjustment": "0",
                "RAY_memory_monitor_refresh_ms": "0",
                "ORCH_EXPORTER_ADDRESS": "node",
            }
            write(host, f"{host.home}/.orch/ray/token", self.token)
            write(host, f"{host.home}/read-token", self.token)
        self.start_ray(self.head)
        for host in self.hosts.hosts[1:]:
            self.start_ray(host)
        self.up()

    def start_ray(self, host: Host) -> None:
        """Start the host's Ray node, again where Ray gives up after 30 s on a busy machine, as a service manager does."""
        options = ["--object-store-memory=80000000", "--disable-usage-stats", f"--node-ip-address={host.address}"]
        options += [f"--num-cpus={self._cpus}", f"--num-gpus={self._gpus}"]
        if host is self.head:
            options += [
                "--head",
                f"--port={PORT}",
                "--include-dashboard=false",
                f"--system-config={json.dumps(SYSTEM_CONFIG)}",
            ]
        else:
            options += [f"--address={self.head.address}:{PORT}"]
        for _ in range(STARTS):
            if host.run("ray", "start", *options, check=False).returncode == 0:
                return
            host.run("ray", "stop", "--force", check=False)
        host.run("ray", "start", *options)

    def up(self) -> None:
        """Start the daemon, and wait until every node is ready."""
        self.orch(
            *("up", "--ray-address", f"{self.head.address}:{PORT}", "--simulate-gpus", str(self._gpus)),
            *("--read-listen", f"{self.head.address}:{READ_PORT}", "--token-file", f"{self.head.home}/read-token"),
            *("--page-listen", ""),
        )
        self.wait_ready(*(host.name for host in self.hosts.hosts))

    def kill_daemon(self) -> None:
        """Send SIGKILL to the daemon."""
        (daemon,) = [
            each for each in self.head.processes() if {"orchestrator.cli.main", "serve"} <= {*command_line(each)}
        ]
        daemon.kill()
        wait_until("the daemon is dead", lambda: process_gone(daemon.pid))

    # -- as a user of the first host

    def orch(self, *arguments: str, check: bool = True, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of orch on the first host."""
        return self.head.run("orch", *arguments, check=check, cwd=cwd)

    def ask(self, *arguments: str) -> Any:
        """Run a command of orch with ``--json``; return its parsed output."""
        return json.loads(self.orch(*arguments, "--json").stdout)

    def submit(self, spec: Mapping[str, Any], **files: str) -> str:
        """Submit a job with these files (``train`` becomes train.py); return its id."""
        return self.submit_text(json.dumps({"version": 1, **spec}), **files)

    def submit_text(self, text: str, **files: str) -> str:
        """Submit the text of a job.yaml as ``submit`` does."""
        directory = f"{self.head.home}/work-{secrets.token_hex(4)}"
        for name, program in files.items():
            write(self.head, f"{directory}/{name}.py", program)
        write(self.head, f"{directory}/job.yaml", text)
        answer = json.loads(self.orch("submit", "job.yaml", "--json", cwd=directory).stdout)
        return str(answer["job_id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the job as `orch status` reports it."""
        found: dict[str, Any] = self.ask("status", job_id)
        return found

    def wait_job(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until the job is in one of the states."""

        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in states else None

        try:
            found: dict[str, Any] = wait_until(f"{job_id} is {states}", reached, interval=POLL_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.evidence(job_id)}") from error
        return found

    def wait_ended(self, job_id: str) -> dict[str, Any]:
        """Wait until the job has ended."""
        return self.wait_job(job_id, "SUCCEEDED", "FAILED", "CANCELLED")

    def seats(self, job_id: str) -> list[str]:
        """Return the names of the newest gang's hosts, by rank."""
        placed = [event for event in self.events(job_id) if event["kind"] == "gang_placed"]
        return [seat["node_name"] for seat in placed[-1]["body"]["seats"]]

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """Return the job's events."""
        found: list[dict[str, Any]] = self.ask("events", job_id)["events"]
        return found

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the nodes by host name, as `orch nodes` reports them."""
        return {node["name"]: node for node in self.ask("nodes")["nodes"]}

    def is_down(self, host: Host) -> bool:
        """Whether Ray has given up the host's node: it has no agent then. A node that may come back has a silent raylet."""
        node = self.nodes()[host.name]
        return bool(node["state"] == "UNREACHABLE" and node["agent_pid"] is None)

    def wait_ready(self, *names: str) -> None:
        """Wait until these hosts' nodes are ready."""

        def reached() -> bool:
            found = self.nodes()
            return all(name in found and found[name]["state"] == "READY" for name in names)

        wait_until(f"{names} are ready", reached, interval=POLL_SECONDS)

    def host(self, name: str) -> Host:
        """Return the host of that name."""
        return next(host for host in self.hosts.hosts if host.name == name)

    def rejoin(self, host: Host) -> None:
        """Make a host that Ray has given up join again, as its service manager does."""
        host.run("ray", "stop", "--force", check=False)
        self.start_ray(host)
        self.wait_ready(host.name)

    def evidence(self, job_id: str) -> str:
        """Return the text that is shown with a failure: the job's events, the nodes, the end of the daemon's log."""
        log = self.head.outside(f"{self.head.home}/.orch/daemon.log")
        log_end = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        return f"{self.orch('events', job_id, check=False).stdout}\n{self.orch('nodes', check=False).stdout}\n{log_end}"

    def close(self) -> None:
        """End everything."""
        self.hosts.close()


def write(host: Host, path: str, text: str) -> None:
    """Write a file of the host's user, for that user alone."""
    place = host.outside(path)
    missing = [parent for parent in place.parents if not parent.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700)
        os.chown(directory, host.plan.uid, host.plan.uid)
    place.write_text(text)
    place.chmod(0o600)
    os.chown(place, host.plan.uid, host.plan.uid)


def lines(host: Host, path: str) -> Sequence[str]:
    """Return the complete lines of a file of the host."""
    place = host.outside(path)
    text = place.read_text() if place.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
