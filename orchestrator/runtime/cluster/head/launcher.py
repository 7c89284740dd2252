"""Starts an embedded Ray head as small as it gets, and exits: ``python -m orchestrator.runtime.cluster.head.launcher '{json}'``.

A process of its own, because Ray's ``Node`` reads its settings from the environment once and holds on to them. What it
starts (gcs_server, raylet and the raylet's agents) outlives it, in the session that it was started in. It prints one JSON
line: the address and the process ids.

Ray opens the directories of its session to every user, whatever the umask, and again each time that a worker starts: what
closes them is the directory that ``temp_dir`` lies in, which is this user's alone.

Ray's ``ray start`` takes 2 s longer and also starts a monitor (80 MB), a log monitor and a dashboard process (120 MB)
that nothing here uses. Leaving them out needs ``ray._private.node``: that dependency lives in this file only;
``tests/integration/test_ray_internals.py`` tells when a new Ray breaks it, and ``cluster.py`` falls back to ``ray start``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from orchestrator.runtime.cluster.head import worker_setup


def start_head(options: dict[str, Any]) -> dict[str, Any]:
    """Start the head; returns its GCS address, the session directory, and process ids by name."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class SmallNode(Node):  # type: ignore[misc]  # Ray is not type-checked
        """A head without the dashboard's server process."""

        def start_api_server(self, **_options: Any) -> None:
            """Nothing: no part of orch talks to it."""

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
        # Ray's own choice is one fixed port: every further head on the machine tries for seconds to get it.
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
