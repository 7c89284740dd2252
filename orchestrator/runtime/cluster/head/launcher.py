"""Starts a minimal embedded Ray head, and exits: ``python -m orchestrator.runtime.cluster.head.launcher '{json}'``.

It is a separate process because Ray's ``Node`` reads its settings from the environment once. What it starts
(gcs_server, raylet and the raylet's agents) outlives it, in the same session. It prints one JSON line: the address and
the process ids.

Ray makes the directories of its session readable by every user, whatever the umask, and again whenever a worker starts;
``temp_dir`` is therefore in a directory that only this user can enter.

Ray's ``ray start`` takes 2 s longer and also starts a monitor (80 MB), a log monitor and a dashboard process (120 MB)
that nothing here uses. Leaving them out needs ``ray._private.node``: only this file depends on it, and
``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.cluster import trial
from orchestrator.runtime.cluster.head import late_agent, worker_setup, worker_template

if TYPE_CHECKING:
    from collections.abc import Sequence

SOCKET_NAME: Final = "workers"
DASHBOARD_AGENT: Final = "--dashboard_agent_command="
RUNTIME_ENV_AGENT: Final = "--runtime_env_agent_command="


def start_head(options: dict[str, Any]) -> dict[str, Any]:
    """Start the head, and connect to it once; return its GCS address, its session directory, and its process ids by name."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class SmallNode(Node):  # type: ignore[misc]  # Ray is not type-checked
        """A head without the dashboard's processes."""

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            """Start the raylet as Ray does, but with other programs as its agents."""
            path = os.environ[worker_setup.TEMPLATE_SOCKET] = f"{self.get_sockets_dir_path()}/{SOCKET_NAME}"
            port_file = report_ports(self.get_session_dir_path(), self.node_id)
            template = worker_template.command(sys.executable, path)
            late = late_agent.command(sys.executable, self.node_ip_address, port_file)
            start = services.start_ray_process

            def start_with_own_agents(command: list[str], *others: Any, **more: Any) -> Any:
                return start(with_own_agents(command, template, late), *others, **more)

            services.start_ray_process = start_with_own_agents
            try:
                super().start_raylet(*arguments, **options)
            finally:
                services.start_ray_process = start

        def start_api_server(self, **_options: Any) -> None:
            """Start nothing: no part of orch uses the dashboard's server."""

    params = RayParams(
        num_cpus=options["num_cpus"],
        num_gpus=options["num_gpus"],
        resources=options["resources"],
        labels=options["labels"],
        object_store_memory=options["object_store_bytes"],
        node_ip_address=options["address"],
        gcs_server_port=options["port"],
        temp_dir=options["temp_dir"],
        include_dashboard=False,
        # Ray's default is one fixed port, which every further head on the machine tries for seconds to bind.
        dashboard_agent_listen_port=0,
        include_log_monitor=False,
        no_monitor=True,
        env_vars={},
        setup_worker_path=worker_setup.__file__,
        _system_config=options["system_config"],
    )
    node = SmallNode(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
    trial.connect(node.gcs_address, None)
    trial.disconnect()
    return {
        "gcs_address": node.gcs_address,
        "node_id": node.node_id,
        "session_dir": node.get_session_dir_path(),
        "pids": {name: [p.process.pid for p in group] for name, group in node.all_processes.items()},
    }


def report_ports(session_dir: str, node_id: str) -> str:
    """Write the files in which the raylet looks for the ports of its dashboard agent, before it waits for them.

    Returns the path of the one that the runtime-environment agent writes.
    """
    from ray import _raylet

    raylet: Any = _raylet  # an extension module without types
    for name in (
        raylet.METRICS_AGENT_PORT_NAME,
        raylet.METRICS_EXPORT_PORT_NAME,
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    ):
        raylet.persist_port(session_dir, node_id, name, worker_template.UNUSED_PORT)
    return f"{session_dir}/{raylet.get_port_filename(node_id, raylet.RUNTIME_ENV_AGENT_PORT_NAME)}"


def with_own_agents(command: Sequence[str], template: Sequence[str], late: Sequence[str]) -> list[str]:
    """Return a raylet's command line with other programs as its agents.

    The template of workers is in place of the dashboard agent, and the late agent in front of the runtime-environment agent.
    """

    def changed(argument: str) -> str:
        if argument.startswith(DASHBOARD_AGENT):
            return DASHBOARD_AGENT + subprocess.list2cmdline(template)
        if argument.startswith(RUNTIME_ENV_AGENT):
            return f"{RUNTIME_ENV_AGENT}{subprocess.list2cmdline(late)} {argument.removeprefix(RUNTIME_ENV_AGENT)}"
        return argument

    return [changed(argument) for argument in command]


if __name__ == "__main__":
    print(json.dumps(start_head(json.loads(sys.argv[1]))), flush=True)
