"""Looks up what holds the port that a rank could not bind, by the kernel's table of sockets.

Decides nothing: ``core.lifecycle.failure`` does. Sockets of other users have no process that can be named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.diagnosis.signatures import taken_port
from orchestrator.core.facts.rank_ends import PortTaken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.events import Exit

_HOLDING: Final = frozenset({"LISTEN", "NONE"})
"""psutil's states of a server's socket, and of one of UDP."""


def port_evidence(ended: Exit, env: Mapping[str, str]) -> PortTaken | None:
    """Return what holds the port that the rank's error names; None where it names none. ``env`` is the rank's environment."""
    port = taken_port(ended)
    if port is None:
        return None
    psutil = importlib.import_module("psutil")  # imported late: a rank's actor starts without it
    rendezvous = env.get("MASTER_PORT", "")
    pids = _holders(psutil, port)
    pid = next((pid for pid in pids if pid is not None), None)
    return PortTaken(
        port=port,
        rendezvous_port=int(rendezvous) if rendezvous.isdecimal() else None,
        listening=bool(pids),
        pid=pid,
        program=_program(psutil, pid),
    )


def _holders(psutil: Any, port: int) -> list[int | None]:
    """Return the process of each socket that is bound to the port and waits there; None for one of another user."""
    try:
        found = psutil.net_connections(kind="inet")
    except (psutil.Error, OSError):
        return []
    return [one.pid for one in found if one.laddr and one.laddr.port == port and one.status in _HOLDING]


def _program(psutil: Any, pid: int | None) -> str:
    """Return the program's name alone: its arguments may hold secrets of another job."""
    if pid is None:
        return ""
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, OSError):
        return ""
