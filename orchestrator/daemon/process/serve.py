"""Runs ``orch serve``: the daemon in this process, until SIGTERM, SIGINT, or a shutdown over the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import (
    DaemonFrozenError,
    InternalError,
    OrchError,
    RefusedError,
)
from orchestrator.api.server.app import create_control_app
from orchestrator.api.server.control_socket import bind_control_socket
from orchestrator.api.server.gate import GatePolicy
from orchestrator.api.server.group_access import open_way
from orchestrator.api.server.listeners import (
    MAX_READERS,
    ApiServer,
    address_of,
    bind_tcp,
    connection_cap,
)
from orchestrator.api.server.read_app import create_read_app, read_policy
from orchestrator.api.transport.peer import is_stopped
from orchestrator.daemon.bootstrap import build
from orchestrator.daemon.jobs.tidying import release_start_reserve
from orchestrator.daemon.process.home import prepare_home, write_failure
from orchestrator.daemon.process.preflight import bind_read, check_options, place_of
from orchestrator.private_files import PRIVATE_UMASK
from orchestrator.runtime.cluster.connection import disarm_abort
from orchestrator.runtime.cluster.head import ClusterError
from orchestrator.runtime.pools import WatchedExecutor, calls_under_way
from orchestrator.spec.paths import PageFiles
from orchestrator.store.errors import StoreError, StoreInUseError
from orchestrator.telemetry.local_prometheus import LocalPrometheus, LocalPrometheusError
from orchestrator.telemetry.logging import configure_logging
from orchestrator.web.serving import (
    LazyPage,
    PageLinkMaker,
    bind_page,
    page_tls,
    reach_of,
    shown_address,
    sign_in_of,
)

if TYPE_CHECKING:
    from orchestrator.api.launch import ServeOptions
    from orchestrator.api.page_links import PageLinks
    from orchestrator.api.server.control_socket import ControlSocket
    from orchestrator.daemon.bootstrap import Parts
    from orchestrator.spec.settings import Settings


CALLS_SECONDS: Final = 5.0
"""Time that calls in threads may take to return once the daemon has closed everything."""


def serve(settings: Settings, options: ServeOptions) -> int:
    """Run until a stop is requested; return the exit code. Raises OrchError when the daemon cannot start."""
    as_json = {"json": True, "console": False}.get(settings.log_format)
    configure_logging(json=as_json, level=settings.log_level, stream=sys.stderr)
    try:
        _run(settings, options)
    except OrchError as error:
        write_failure(settings.paths, error)
        raise
    except Exception as error:
        write_failure(settings.paths, InternalError(f"{type(error).__name__}: {error}"))
        raise
    return 0


def _run(settings: Settings, options: ServeOptions) -> None:
    check_options(settings, options)
    prepare_home(settings, traversable=bool(options.group))
    release_start_reserve(settings.paths)
    environ = dict(os.environ)
    rank_umask = os.umask(PRIVATE_UMASK)  # inherited by Ray and the fork servers; ranks get the umask of this start
    try:
        asyncio.run(_serve(settings, options, environ, rank_umask))
    except LocalPrometheusError as error:
        raise RefusedError(error.message, hint=error.hint) from error
    except StoreInUseError as error:
        if error.pid is not None and is_stopped(error.pid):
            raise DaemonFrozenError.of(str(settings.socket), error.pid) from error
        raise RefusedError(str(error), hint="`orch doctor` looks for the reason") from error
    except (StoreError, ClusterError) as error:
        raise RefusedError(str(error), hint="`orch doctor` looks for the reason") from error


async def _serve(settings: Settings, options: ServeOptions, environ: dict[str, str], rank_umask: int) -> None:
    parts = build(settings, options, environ, rank_umask)
    try:
        if options.group:
            open_way(settings.home, settings.socket, options.group)
        control = bind_control_socket(settings.socket, group=options.group or None)
    except BaseException:
        parts.close()
        raise
    loop, executor = asyncio.get_running_loop(), WatchedExecutor()
    loop.set_default_executor(executor)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, parts.daemon.stop)
    signal.signal(signal.SIGTERM, disarm_abort)  # runs at once; the event loop gets the signal too
    signal.siginterrupt(signal.SIGTERM, False)
    try:
        await _serve_on(parts, control, settings, options)
    finally:
        control.withdraw()
        # asyncio.run, or the interpreter's exit, would wait for these for ever; everything important is closed.
        if parts.background.uncancelled or parts.pools.busy or calls_under_way() or executor.busy(CALLS_SECONDS):
            failed = sys.exception()
            if failed is not None:
                traceback.print_exception(failed)
            sys.stderr.flush()
            os._exit(1 if failed else 0)


async def _serve_on(parts: Parts, control: ControlSocket, settings: Settings, options: ServeOptions) -> None:
    daemon, service, endpoints = parts.daemon, parts.service, parts.endpoints
    closing = asyncio.Event()
    token = options.read_token()
    policy = GatePolicy(owner_uid=os.getuid(), token=token)
    servers: list[ApiServer] = []
    links: PageLinks | None = None
    if options.page_listen:
        server, links = _page_server(parts, options, settings, closing)
        servers.append(server)
    servers.append(
        ApiServer(create_control_app(service, policy, closing, links, parts.audit), control.socks, sessions=True)
    )
    if options.read_listen:
        servers.append(_reading_server(parts, options, token))
    if options.listen:
        servers.append(_tcp_server(parts, options.listen, token, closing, links))
    for server in servers:
        await server.start()
    state = settings.paths.daemon_state
    state.write_text(json.dumps({"pid": os.getpid(), "read_address": endpoints.read_address}))
    prometheus = LocalPrometheus(settings.home / "prometheus")
    try:
        if options.with_prometheus:
            stack = await prometheus.start(endpoints.read_address, options.token_file, settings.docs_url)
            endpoints.prometheus_url, endpoints.alertmanager_url = stack.prometheus_url, stack.alertmanager_url or ""
            endpoints.prometheus_password_file = str(stack.password_file)
            parts.log.info("prometheus.started", url=stack.prometheus_url, alertmanager=stack.alertmanager_url)
        await daemon.start_unless_stopped()
        await daemon.run()
    finally:
        await prometheus.stop()
        closing.set()
        # Concurrently: one that waits for its last requests must not leave the others open with a closed store.
        await asyncio.gather(*(server.stop() for server in servers))
        with contextlib.suppress(FileNotFoundError):
            state.unlink()


def _reading_server(parts: Parts, options: ServeOptions, token: str) -> ApiServer:
    host, port = place_of(options.read_listen, "--read-listen")
    sock = bind_read(options)
    parts.endpoints.read_address = address_of(sock)
    if port not in (0, sock.getsockname()[1]):
        parts.log.warning("metrics.port_taken", wanted=options.read_listen, address=address_of(sock))
    app = create_read_app(parts.reading, read_policy(host, token, os.getuid()))
    return ApiServer(app, [sock], cap=min(MAX_READERS, connection_cap()))


def _page_server(
    parts: Parts, options: ServeOptions, settings: Settings, closing: asyncio.Event
) -> tuple[ApiServer, PageLinks]:
    files = PageFiles.of(settings.home)
    sock = bind_page(options, files)
    sign_in = sign_in_of(files, token=options.read_token(), reach=reach_of(options))
    address = parts.endpoints.page_address = shown_address(sock, options)
    page, cap = LazyPage(parts.service, sign_in, closing, parts.audit), connection_cap()
    return ApiServer(page, [sock], cap=cap, tls=page_tls(options)), PageLinkMaker(sign_in, address)


def _tcp_server(parts: Parts, listen: str, token: str, closing: asyncio.Event, links: PageLinks | None) -> ApiServer:
    host, port = place_of(listen, "--listen")
    from orchestrator.api.server.listeners import host_names

    policy = GatePolicy(owner_uid=os.getuid(), token=token, hosts=host_names(host))
    return ApiServer(
        create_control_app(parts.service, policy, closing, links, parts.audit),
        [bind_tcp(host, port, option="--listen")],
        sessions=True,
    )


__all__ = ["OrchError", "serve"]
