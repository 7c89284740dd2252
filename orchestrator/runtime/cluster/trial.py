"""Connects to Ray, and disconnects at once: ``python -m orchestrator.runtime.cluster.trial ADDRESS NAMESPACE SECONDS``.

``ray.init`` holds the interpreter's lock until the node's raylet has answered: meanwhile no signal, deadline or request
reaches the process, and only SIGKILL ends it. So the daemon connects only where a process that can be killed has just
connected: this one, or the starter of the head.
"""

from __future__ import annotations

import faulthandler
import sys

from orchestrator.runtime.cluster.serializers import skip_foreign_serializers


def connect(address: str, space: str | None) -> None:
    """Connect this process to Ray; ``space`` is the namespace of its actors."""
    import ray

    skip_foreign_serializers()
    ray.init(
        address=address,
        namespace=space,
        log_to_driver=False,
        configure_logging=False,
        ignore_reinit_error=False,
    )


def disconnect() -> None:
    """Disconnect this process from Ray."""
    import ray

    ray.shutdown()


def command(address: str, space: str, seconds: float) -> list[str]:
    """Return the command line of a trial, which ends after ``seconds`` even if the process that started it is gone."""
    return [sys.executable, "-m", "orchestrator.runtime.cluster.trial", address, space, str(seconds)]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    try:
        connect(sys.argv[1], sys.argv[2])
        disconnect()
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)
    sys.stdout.write("connected\n")
