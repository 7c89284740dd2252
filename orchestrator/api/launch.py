"""Options of a daemon's start and its answer, shared by the command line and the daemon.

Plain records. ``serve_arguments`` is the inverse of the command line's parsing of `orch serve`, for a caller that starts it detached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from orchestrator.api.errors import RefusedError
from orchestrator.spec import token_file

_HOW_TO_MAKE_ONE: Final = "head -c 32 /dev/urandom | base64 > FILE, with mode 0600"

DEFAULT_READ_LISTEN = "127.0.0.1:9476"
"""The default address of the metrics (ORCH_METRICS_ADDRESS, ORCH_METRICS_PORT)."""

DEFAULT_PAGE_LISTEN = "127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `orch up` and `orch serve`.

    ``simulate_gpus`` 0 means real ones. ``group`` may use the control socket besides the owner. ``listen`` (host:port)
    opens control over TCP, with the token in ``token_file``. ``read_listen`` is the address of the metrics; empty turns
    them off, port 0 picks a free port. If the port is taken, any free port is used, unless ``read_fixed``.
    ``page_listen`` is the address of the page; empty turns it off, port 0 takes the last port if it is free. An address
    that other machines can reach needs a token, and ``page_cert`` with ``page_key`` or ``page_plain``.
    """

    simulate_gpus: int = 0
    ray_address: str = ""
    with_prometheus: bool = False
    group: str = ""
    listen: str = ""
    read_listen: str = DEFAULT_READ_LISTEN
    token_file: str = ""
    page_listen: str = DEFAULT_PAGE_LISTEN
    page_cert: str = ""
    page_key: str = ""
    page_plain: bool = False
    read_fixed: bool = False

    def read_token(self) -> str:
        """Read the token in ``token_file``; empty where there is none. Raises RefusedError for an unreadable file, or a short token."""
        if not self.token_file:
            return ""
        token = read_token(self.token_file)
        if len(token) < token_file.SHORTEST:
            raise RefusedError(
                f"the token in {self.token_file} has {len(token)} characters; one of fewer than {token_file.SHORTEST} can be guessed",
                hint=_HOW_TO_MAKE_ONE,
            )
        return token


def read_token(path: str) -> str:
    """Read the token in a file that other users can neither read nor change. Raises RefusedError."""
    try:
        return token_file.read(path)
    except token_file.TokenFileError as error:
        raise RefusedError(error.message, hint=error.remedy or _HOW_TO_MAKE_ONE) from error


def serve_arguments(options: ServeOptions) -> list[str]:
    """Return the arguments of `orch serve` that mean ``options``."""
    arguments: list[str] = []
    default = ServeOptions()
    for flag, name in _FLAGS:
        value = getattr(options, name)
        chosen = name == "read_listen" and options.read_fixed
        if value == getattr(default, name) and not chosen:
            continue
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments


_FLAGS = (
    ("--simulate-gpus", "simulate_gpus"),
    ("--ray-address", "ray_address"),
    ("--with-prometheus", "with_prometheus"),
    ("--group", "group"),
    ("--listen", "listen"),
    ("--read-listen", "read_listen"),
    ("--token-file", "token_file"),
    ("--page-listen", "page_listen"),
    ("--page-cert", "page_cert"),
    ("--page-key", "page_key"),
    ("--page-plain", "page_plain"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpReply:
    """A daemon that answers. ``started`` is false where it already ran; ``seconds`` is the time until it was ready."""

    pid: int
    started: bool
    seconds: float
    address: str
    read_address: str = ""
    prometheus_url: str = ""
    alertmanager_url: str = ""
    prometheus_password_file: str = ""
    log_file: str = ""
    page_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `orch demo`: ``json`` for one object at the end instead of text."""

    json: bool = False


class Level(StrEnum):
    """The severity of a finding of `orch doctor`."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of `orch doctor`: the result ``what`` and, for a problem, how to fix it."""

    level: Level
    what: str
    remedy: str = ""
