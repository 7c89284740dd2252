"""Integration with TensorFlow's `tf.distribute`: sets `TF_CONFIG`, with an address of every rank of this attempt.

    from orchestrator.train.integrations.tensorflow import set_tf_config
    set_tf_config()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

`TF_CONFIG` needs a free port of every rank before any of them serves. Only the machine that a rank runs on can choose one, so each rank
chooses its own, and the ranks exchange them over the rendezvous of the attempt: after a restart all of them are new. Needs torch in
the interpreter, for the rendezvous, as the fork server does; TensorFlow is not imported here.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from orchestrator.train.errors import ConfigError, RecoveryTimeoutError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

PATIENCE: Final = timedelta(minutes=5)
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def set_tf_config(environ: MutableMapping[str, str] | None = None, *, patience: timedelta = PATIENCE) -> dict[str, Any]:
    """Set `TF_CONFIG` of this rank and return its content; an existing value is kept. Call it before TensorFlow starts anything.

    Every rank is a worker, and rank 0 the chief by TensorFlow's own rule. Raises ConfigError outside of a job, RecoveryTimeoutError where ranks
    are missing.
    """
    environ = os.environ if environ is None else environ
    if "TF_CONFIG" in environ:
        found: dict[str, Any] = json.loads(environ["TF_CONFIG"])
        return found
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not set: start the script with orch or torchrun")
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    addresses = _exchanged(environ, rank, world, patience)
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    environ["TF_CONFIG"] = json.dumps(config)
    return config


def _exchanged(environ: MutableMapping[str, str], rank: int, world: int, patience: timedelta) -> list[str]:
    """Return an address of each rank. This rank's port stays bound until the rank has read all addresses."""
    from torch.distributed import (  # type: ignore[attr-defined]  # torch names them in no __all__
        DistStoreError,
        TCPStore,
    )

    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    prefix = f"tf_config/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = own_address(host, port)
    with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET, socket.SOCK_STREAM) as held:
        held.bind((own, 0))
        try:
            store = TCPStore(host, port, world_size=None, is_master=serves, timeout=patience)
            store.set(f"{prefix}/{rank}", joined(own, held.getsockname()[1]))
            found = [store.get(f"{prefix}/{other}").decode() for other in range(world)]
            store.set(f"{prefix}/{rank}/known", "1")
            # The rank that serves the store ends last: otherwise the others could no longer read it.
            for other in range(world) if serves else ():
                store.get(f"{prefix}/{other}/known")
        except DistStoreError as error:
            raise RecoveryTimeoutError(f"not all of {world} ranks arrived within {patience}") from error
    return found


def own_address(host: str, port: int) -> str:
    """Return the address at which others reach this machine: the one from which it reaches `host`. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def joined(address: str, port: int) -> str:
    """Return address and port as one text."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
