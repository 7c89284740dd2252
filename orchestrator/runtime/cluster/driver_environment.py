"""Variables of the environment that Ray reads in the daemon's process, and that nothing which the daemon starts inherits."""

from __future__ import annotations

import os
from typing import Final

RAYLET_PID: Final = "RAY_RAYLET_PID"
RECONNECT_SECONDS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
OF_THE_DRIVER: Final = (RAYLET_PID, RECONNECT_SECONDS)
FOR_EVER_SECONDS: Final = 10**6


def outlive_raylets() -> None:
    """Have Ray leave this process alone when its raylet dies.

    Ray ends a driver whose raylet has died when its parent is init, as a daemon's is; told of a process to watch in place
    of the parent, it watches that. This one lives as long as it lives.
    """
    os.environ[RAYLET_PID] = str(os.getpid())


def outlive_heads() -> None:
    """Have Ray leave this process alone when it asks a head that has died: after a minute, it would end the process."""
    os.environ[RECONNECT_SECONDS] = str(FOR_EVER_SECONDS)
