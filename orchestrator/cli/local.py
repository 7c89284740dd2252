"""The one door from the command line to the daemon's own code: starting it, examining its machine, the demo.

Imports happen inside: they load Ray's and torch's world, which no other command may pay for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestrator.api.launch import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.launch import DemoOptions, Finding, UpReply
    from orchestrator.cli.session import Session


def _settings(session: Session) -> Any:
    return import_module("orchestrator.daemon.settings").load_settings(session.environ)


def start_daemon(session: Session) -> UpReply:
    """Start the daemon as plain `orch up` does, and wait until it takes jobs."""
    return up(session, ServeOptions())


def up(session: Session, options: ServeOptions) -> UpReply:
    """Start the daemon detached. Raises OrchError with the end of its log where it does not come up."""
    reply: UpReply = import_module("orchestrator.daemon.up").up(_settings(session), options)
    return reply


def serve(session: Session, options: ServeOptions) -> int:
    """Run the daemon in this process until it is told to stop."""
    return int(import_module("orchestrator.daemon.serve").serve(_settings(session), options))


def examine(session: Session) -> Sequence[Finding]:
    """What is right and wrong with this machine."""
    found: Sequence[Finding] = import_module("orchestrator.daemon.doctor").examine(_settings(session))
    return found


def run_demo(options: DemoOptions) -> int:
    """Run the demo."""
    return int(import_module("orchestrator.daemon.demo").run_demo(options))
