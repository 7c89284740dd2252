"""Starts a minimal embedded Ray head, and exits: ``python -m orchestrator.runtime.cluster.head.launcher '{json}'``.

It is a separate process because Ray's ``Node`` reads its settings from the environment once. What it starts
(gcs_server, raylet and the raylet's agents) outlives it, in the same session. It prints one JSON line: the address and
the process ids.

Ray makes the directories of its session readable by every user, whatever the umask, and again whenever a worker starts;
``temp_dir`` therefore lies in a directory that only this user can enter.

Ray's ``ray start`` takes 2 s longer and also starts a monitor (80 MB), a log monitor and a dashboard process (120 MB)
that nothing here uses. Leaving them out needs ``ray._private.node``: that dependency lives in this file only;
``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it, and ``cluster.py`` falls back to ``ray start``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from orchestrator.runtime.cluster.head import worker_setup


def start_head(options: dict[str, Any]) -> dict[str, Any]:
    """Start the head; return its GCS address, its session directory, and its process ids by name."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class SmallNode(Node):  # type: ignore[misc]  # Ray is not type-checked
        """A head without the dashboard's server process."""

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
    return {
        "gcs_address": node.gcs_address,
        "node_id": node.node_id,
        "session_dir": node.get_session_dir_path(),
        "pids": {name: [p.process.pid for p in group] for name, group in node.all_processes.items()},
    }


if __name__ == "__main__":
    print(json.dumps(start_head(json.loads(sys.argv[1]))), flush=True)
