"""Starts the processes of an embedded Ray head, and ends: ``python -m orchestrator.runtime.cluster.head_program OPTIONS``.

What it starts (the control plane, the raylet and the raylet's agents) outlives it, in its session of processes. It is a program of its own because
Ray's ``Node`` reads its settings from the environment once, and can block for ever.

``ray start --head`` starts besides, whatever its options say, the servers of the dashboard and of Ray's client: twice the processor time,
and 300 MB, for what nothing here calls. Leaving them out needs ``ray._private.node``; ``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def start_head(options: dict[str, Any]) -> None:
    """Start the head. ``options`` are arguments of Ray's ``RayParams``."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):  # type: ignore[misc]  # Ray is not type-checked
        """A head without the dashboard's server."""

        def start_api_server(self, **_options: Any) -> None:
            """Start nothing."""

    params = RayParams(
        **options,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        # Ray's default is one fixed port, which every further head on the machine tries for seconds to bind.
        dashboard_agent_listen_port=0,
        env_vars={},
    )
    Head(params, head=True, shutdown_at_exit=False, spawn_reaper=False)


if __name__ == "__main__":
    start_head(json.loads(sys.argv[1]))
