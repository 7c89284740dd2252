"""The command line's only access to the daemon's own code: starting it, examining its machine, the demo.

Imports happen inside functions: they load Ray and torch, which would slow down every other command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.launch import DEFAULT_READ_LISTEN, ServeOptions
from orchestrator.cli.outcome import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.launch import Finding, UpReply
    from orchestrator.cli.session import Session
    from orchestrator.spec.settings import Settings


def settings_of(session: Session) -> Settings:
    from orchestrator.daemon.process.settings import load_settings

    return loadsettings_of(session.environ)


def read_listen(session: Session, given: str | None) -> tuple[str, bool]:
    """Return the address of the metrics, from the command line or the settings, and whether it was chosen there."""
    if given is not None:
        return given, True
    settings = settings_of(session)
    host = settings.metrics_address
    listen = f"[{host}]:{settings.metrics_port}" if ":" in host else f"{host}:{settings.metrics_port}"
    return listen, listen != DEFAULT_READ_LISTEN


def start_daemon(session: Session) -> UpReply:
    """Start the daemon as plain `orch up` does, and wait until it accepts jobs."""
    listen, fixed = read_listen(session, None)
    return launch(session, ServeOptions(read_listen=listen, read_fixed=fixed))


def launch(session: Session, options: ServeOptions) -> UpReply:
    """Start the daemon detached. Raises OrchError with the end of its log if it fails."""
    require("daemon", "a daemon on this machine")
    from orchestrator.daemon.process.up import up as start

    return start(settings_of(session), options)


def examine(session: Session) -> Sequence[Finding]:
    """Return the findings about this machine; of a client, that it is one."""
    from orchestrator import parts

    if missing := parts.missing_modules("daemon"):
        from orchestrator.api.launch import Finding, Level

        what = f"this installation is a client: no daemon can run here (no {', '.join(missing)})"
        return [Finding(level=Level.ERROR, what=what, remedy=f"to run one: {parts.install_line('daemon')}")]
    from orchestrator.daemon.process.doctor import examine as look

    return look(settings_of(session))
