"""Measures Ray alone: raylet, control plane and two actors that do nothing. usage: bare_ray.py WINDOWS SECONDS.

Prints a JSON list: per cent of a core that these processes use in each window. Left out are the
script itself and the processes that a head does not need (monitors, dashboard, log monitor, the agents). Ray is set as orch sets
it for a head of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time

import psutil
import ray

from benchmarks.measure import percent_of_a_core
from orchestrator.runtime.cluster.head import SETTINGS

SETTLE_SECONDS = 10.0
NEEDED = ("raylet", "gcs_server")


class Idle:
    """An actor with a method that is called only once; like orch's, it answers while another call is under way."""

    async def pid(self) -> int:
        """Return its process id."""
        import os

        return os.getpid()


def main(windows: int, seconds: float) -> None:
    """Measure and print."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name != "RAY_preload_python_modules"})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    actor = ray.remote(Idle)
    actors = [actor.options(num_cpus=1).remote() for _ in range(2)]
    pids = ray.get([one.pid.remote() for one in actors])
    mine = psutil.Process().children(recursive=True)
    counted = [p for p in mine if p.pid in pids or p.name() in NEEDED]
    assert len(counted) == len(pids) + len(NEEDED), [p.name() for p in mine]
    time.sleep(SETTLE_SECONDS)
    print(json.dumps([sum(percent_of_a_core([p.pid for p in counted], seconds).values()) for _ in range(windows)]))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
