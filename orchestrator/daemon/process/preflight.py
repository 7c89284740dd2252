"""Checks a daemon's options and surroundings before it starts: addresses, tokens, ports, limits, GPUs, and the Ray cluster that it is to use.

`orch up` makes these checks before it starts a process, so that the cause of a failure is its first line.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.server.listeners import bind_tcp, raise_file_limit
from orchestrator.api.server.read_app import read_policy
from orchestrator.gpu.drivers.inventory import discover
from orchestrator.gpu.exporter import is_loopback
from orchestrator.parts import install_line, unmet
from orchestrator.runtime.cluster.head import VISIBLE_GPUS
from orchestrator.web.serving import page_place, page_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.api.launch import ServeOptions
    from orchestrator.spec.settings import Settings

RAY_SECONDS: Final = 5.0
"""Time that a Ray cluster that starts at the same time may take until it accepts connections."""

POLL_SECONDS: Final = 0.2
LEAST_FILES: Final = 1024
"""Descriptors that one process needs: the daemon, Ray's, and each rank actor's. The default of most systems."""

LEAST_PROCESSES: Final = 1024
"""Processes and threads of the user: Ray alone has some 300."""

_FOUND_BY_RAY: Final = frozenset({"auto", "local"})


def check_options(settings: Settings, options: ServeOptions, *, ray_seconds: float = RAY_SECONDS) -> None:
    """Raise an error for packages that are too old, wrong addresses and tokens, and no Ray cluster at the given address."""
    if too_old := unmet("daemon"):
        raise RefusedError(f"the daemon needs {', '.join(too_old)}", hint=install_line("daemon"))
    check_limits()
    token = options.read_token()
    if options.group and settings.uid == 0:
        raise RefusedError(
            f"jobs run as the daemon's user: members of {options.group} would run whatever they submit as root",
            hint="run the daemon as an account of its own, as docs/operations/access.md shows, and pass --group there",
        )
    if not is_loopback(settings.exporter_address) and not options.token_file:
        raise RefusedError(
            f"exporters on {settings.exporter_address} would be open to the network",
            hint="pass --token-file FILE, or leave ORCH_EXPORTER_ADDRESS out: they listen on 127.0.0.1 then",
        )
    if options.listen:
        place_of(options.listen, "--listen")
        if not token:
            raise RefusedError("control over TCP needs a token", hint="pass --token-file FILE, readable by you alone")
    if options.read_listen:
        read_policy(place_of(options.read_listen, "--read-listen")[0], token, 0)
    if options.page_listen:
        page_place(options)
        page_tls(options)
    if options.ray_address:
        check_ray(options.ray_address, seconds=ray_seconds)
    elif not options.simulate_gpus:
        check_visible_gpus(os.environ)


def check_limits() -> None:
    """Raise the soft limits of this process, which its children inherit. Raises RefusedError where a hard limit is too low."""
    raise_file_limit()
    found = [(resource.RLIMIT_NOFILE, LEAST_FILES, "open files", "n", "nofile")]
    if os.geteuid() != 0:  # the kernel does not limit root's processes
        found.append((resource.RLIMIT_NPROC, LEAST_PROCESSES, "processes and threads", "u", "nproc"))
    for limit, least, what, option, name in found:
        soft, hard = resource.getrlimit(limit)
        if limit == resource.RLIMIT_NPROC and soft != hard:
            resource.setrlimit(limit, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < least:
            raise RefusedError(
                f"the limit of {what} is {hard}; orch and Ray need at least {least}",
                hint=f"raise it in the shell that runs `orch up` (`ulimit -H{option} {least}`, as root), or for good:"
                f" {name} in /etc/security/limits.conf, Limit{name.upper()}= in a systemd unit",
            )


def check_visible_gpus(environ: Mapping[str, str], count: Callable[[], int] = lambda: len(discover())) -> None:
    """Raise RefusedError where a variable hides GPUs of this machine: orch would use them all."""
    for name in VISIBLE_GPUS:
        if name not in environ:
            continue
        shown = {entry.strip() for entry in environ[name].split(",") if entry.strip()}
        if len(shown) < (gpus := count()):
            raise RefusedError(
                f"{name}={environ[name]!r} shows {len(shown)} of this machine's {gpus} GPUs; orch uses all of them",
                hint=f"start it without the variable: `env -u {name} orch up`",
            )


def check_ports(options: ServeOptions) -> None:
    """Raise RefusedError, with the option's name, for a port that is taken. A default port gives way when the daemon starts."""
    if options.listen:
        bind_tcp(*place_of(options.listen, "--listen"), option="--listen").close()
    if options.page_listen:
        bind_tcp(*page_place(options), option="--page-listen").close()
    if options.read_listen:
        bind_read(options).close()


def bind_read(options: ServeOptions) -> socket.socket:
    """Bind the socket where metrics are read: any free port where the default one is taken. Raises RefusedError."""
    host, port = place_of(options.read_listen, "--read-listen")
    try:
        return bind_tcp(host, port, option="--read-listen")
    except RefusedError as error:
        taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        if options.read_fixed or not taken:
            raise
        return bind_tcp(host, 0)


def place_of(listen: str, option: str) -> tuple[str, int]:
    """Return host and port of an option's value. Raises BadRequestError."""
    host, _, text = listen.rpartition(":")
    if not (host and text.isascii() and text.isdecimal() and int(text) < 2**16):
        raise BadRequestError(f"{option} {listen!r} is not HOST:PORT", hint="write one like 127.0.0.1:9476")
    return host, int(text)


def check_ray(address: str, *, seconds: float = RAY_SECONDS) -> None:
    """Raise RefusedError unless something accepts connections at a cluster's address. A word that Ray resolves is left to it."""
    if address in _FOUND_BY_RAY:
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise BadRequestError(f"--ray-address {address!r} is not HOST:PORT", hint="write one like 127.0.0.1:6379")
    deadline = time.monotonic() + seconds
    while (reason := _refusal(host, port, max(POLL_SECONDS, deadline - time.monotonic()))) is not None:
        if time.monotonic() + POLL_SECONDS > deadline:
            raise RefusedError(
                f"no Ray cluster at {address}: {reason}",
                hint=f"`ray start --head --port={port}` starts one there; without --ray-address, orch starts its own",
            )
        time.sleep(POLL_SECONDS)


def _refusal(host: str, port: int, seconds: float) -> str | None:
    """Return why nothing can be reached there, or None."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None
