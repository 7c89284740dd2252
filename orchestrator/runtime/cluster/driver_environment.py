"""Sets environment variables that Ray reads in the daemon's process and that no process started by the daemon inherits."""

from __future__ import annotations

import os
from typing import Final

from orchestrator.runtime.nodes.ended_nodes import RAYLET_PID

RECONNECT_SECONDS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
OF_THE_DRIVER: Final = (RAYLET_PID, RECONNECT_SECONDS)
FOR_EVER_SECONDS: Final = 10**6


def outlive_raylets() -> None:
    """Keep Ray from ending this process when its raylet dies.

    Ray ends a driver after its raylet has died if the driver's parent is init, as a daemon's is. If RAYLET_PID is set,
    Ray watches that process in place of the parent. Here that is this process itself.
    """
    os.environ[RAYLET_PID] = str(os.getpid())


def outlive_heads() -> None:
    """Keep Ray from ending this process when it calls a dead head: Ray would do so after a minute."""
    os.environ[RECONNECT_SECONDS] = str(FOR_EVER_SECONDS)
