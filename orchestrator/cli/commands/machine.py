"""The daemon, its machine and its store: up, down, serve, doctor, demo, ui, login, prune, backup, restore.

The daemon's own code is imported inside functions: it loads Ray and torch, which would slow down every other command.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import (
    EXIT_JOB_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    BadRequestError,
    DaemonFrozenError,
    DaemonUnreachableError,
    DeadlineError,
    NotFoundError,
    RefusedError,
    kill_hint,
)
from orchestrator.api.launch import DEFAULT_PAGE_LISTEN, DEFAULT_READ_LISTEN, DemoOptions, Level, ServeOptions
from orchestrator.api.transport import wire
from orchestrator.api.transport.endpoint import login_path, read_login, tcp_endpoint
from orchestrator.api.transport.peer import credentials, holder, is_stopped
from orchestrator.cli.commands.shared import Json, Quiet, Yes, ask, from_here, takes
from orchestrator.cli.console import clean
from orchestrator.cli.session import Session, answer, print_json, require
from orchestrator.cli.times import parse_span
from orchestrator.units import duration, plural, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.api.launch import Finding, UpReply
    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.views import PruneReply, ShutdownReply
    from orchestrator.spec.settings import Settings

LOOK_SECONDS = 5.0
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.05


class DaemonProcess:
    """The daemon's process, held from before the request to stop, so that its id cannot be reused."""

    def __init__(self, endpoint: Endpoint, pid: int = 0, handle: int | None = None) -> None:
        """Take the process; ``pid`` is 0 if unknown, ``handle`` None if the process cannot be held."""
        self._endpoint, self.pid, self._handle = endpoint, pid, handle
        self._listens = True

    @classmethod
    def listening(cls, endpoint: Endpoint) -> DaemonProcess:
        """Return the process that accepts connections. Raises DaemonUnreachableError if none does."""
        with wire.connect(endpoint, time.monotonic() + CONNECT_SECONDS) as sock:
            peer = credentials(sock)
        if peer is None or peer[0] in {0, os.getpid()}:
            return cls(endpoint)  # on another machine or in another container: only its address is observable
        with contextlib.suppress(ProcessLookupError):
            return cls(endpoint, peer[0], os.pidfd_open(peer[0]))
        return cls(endpoint, peer[0])

    @classmethod
    def ending(cls, endpoint: Endpoint) -> DaemonProcess | None:
        """Return the process that holds the serving lock but does not listen, any more or yet; None without one."""
        pid = holder(endpoint.socket_path) if endpoint.socket_path else None
        if pid is None:
            return None
        process = cls(endpoint, pid)
        process._listens = False
        return process

    def close(self) -> None:
        """Release the process."""
        if self._handle is not None:
            os.close(self._handle)

    def wait_until_gone(self, seconds: float, *, look_seconds: float = LOOK_SECONDS) -> None:
        """Return when the process has ended. Raises DeadlineError, and DaemonFrozenError for one that is stopped.

        The process is checked every ``look_seconds``.
        """
        deadline = time.monotonic() + seconds
        while not self._has_ended(min(look_seconds, max(0.0, deadline - time.monotonic()))):
            if self.pid and is_stopped(self.pid):
                raise DaemonFrozenError.of(self._endpoint.label, self.pid)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the daemon has not ended {seconds:.0f} s after the request to stop"
                    + (f" (process {self.pid})" if self.pid else ""),
                    hint="look at the end of its log; `orch doctor` says where it is"
                    + (f"; to end it now: {kill_hint(self.pid)}" if self.pid else ""),
                )

    def _has_ended(self, seconds: float) -> bool:
        if self._handle is not None:
            return bool(select.select([self._handle], [], [], seconds)[0])
        if not self._listens:
            pid = holder(self._endpoint.socket_path)
            time.sleep(POLL_SECONDS)
            return pid is None or pid != self.pid  # another process is the next daemon
        try:
            wire.connect(self._endpoint, time.monotonic() + CONNECT_SECONDS).close()
        except DaemonUnreachableError:
            return True
        time.sleep(POLL_SECONDS)
        return False


def settings_of(session: Session) -> Settings:
    """Return the daemon's settings in this environment."""
    from orchestrator.daemon.process.home import load_settings

    return load_settings(session.environ)


def metrics_listen(session: Session, given: str | None) -> tuple[str, bool]:
    """Return the address of the metrics, from the command line or the settings, and whether it was chosen there."""
    if given is not None:
        return given, True
    settings = settings_of(session)
    host = settings.metrics_address
    listen = f"[{host}]:{settings.metrics_port}" if ":" in host else f"{host}:{settings.metrics_port}"
    return listen, listen != DEFAULT_READ_LISTEN


def start_daemon(session: Session) -> UpReply:
    """Start the daemon as plain `orch up` does, and wait until it accepts jobs."""
    listen, fixed = metrics_listen(session, None)
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


DOWN_SECONDS = 60.0
STOP_JOBS_SECONDS = 3600.0
"""Timeout of `down --stop-jobs`: each job may take its stop_duration to save."""

LEVEL_STYLES = {Level.OK: ("green",), Level.WARNING: ("yellow", "bold"), Level.ERROR: ("red", "bold")}

SimulateGpus = Annotated[
    int,
    typer.Option("--simulate-gpus", metavar="N", min=0, help="Simulate this many GPUs, to try orch without any."),
]
RayAddress = Annotated[
    str, typer.Option("--ray-address", metavar="ADDRESS", help="Use this Ray cluster instead of starting one.")
]
WithPrometheus = Annotated[bool, typer.Option("--with-prometheus", help="Run a Prometheus that scrapes this daemon.")]
Group = Annotated[
    str, typer.Option("--group", metavar="GROUP", help="Let this group of users use the daemon besides its owner.")
]
Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Take requests over TCP as well; needs a token.")
]
ReadListen = Annotated[
    str | None,
    typer.Option(
        "--read-listen",
        metavar="HOST:PORT",
        help="Address for reading metrics (default 127.0.0.1:9476, or a free port if that is in use); empty turns it off.",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file", metavar="FILE", callback=from_here, help="A file with the token, for --listen and the page."
    ),
]

PageListen = Annotated[
    str,
    typer.Option(
        "--page-listen",
        metavar="HOST:PORT",
        help="Address of the page; port 0 chooses a free one, and keeps it. An address beyond this machine needs a token, and TLS. Empty turns it off.",
    ),
]
PageCert = Annotated[
    str,
    typer.Option(
        "--page-cert", metavar="FILE", callback=from_here, help="The page's TLS certificate, with its chain, in PEM."
    ),
]
PageKey = Annotated[
    str, typer.Option("--page-key", metavar="FILE", callback=from_here, help="The key of --page-cert, in PEM.")
]
PagePlain = Annotated[
    bool,
    typer.Option("--page-plain", help="Serve the page beyond this machine without TLS, behind a proxy that encrypts."),
]


def serve_options(
    *,
    simulate_gpus: SimulateGpus = 0,
    ray_address: RayAddress = "",
    with_prometheus: WithPrometheus = False,
    group: Group = "",
    listen: Listen = "",
    read_listen: ReadListen = None,
    token_file: TokenFile = "",
    page_listen: PageListen = DEFAULT_PAGE_LISTEN,
    page_cert: PageCert = "",
    page_key: PageKey = "",
    page_plain: PagePlain = False,
) -> ServeOptions:
    """Return the daemon's options."""
    read_at, fixed = metrics_listen(Session(), read_listen)
    return ServeOptions(
        simulate_gpus=simulate_gpus,
        ray_address=ray_address,
        with_prometheus=with_prometheus,
        group=group,
        listen=listen,
        read_listen=read_at,
        read_fixed=fixed,
        token_file=token_file,
        page_listen=page_listen,
        page_cert=page_cert,
        page_key=page_key,
        page_plain=page_plain,
    )


@takes(serve_options)
def up(options: ServeOptions, *, json: Json = False, quiet: Quiet = False) -> int:
    """Start the daemon in the background and return when it accepts jobs; a daemon that already runs is left as it is."""
    session = Session(quiet=quiet)
    reply = launch(session, options)
    notes = []
    if reply.page_address:
        notes.append(f"page: {reply.page_address} (`orch ui` opens it)")
    if reply.read_address:
        moved = reply.started and not options.read_fixed and reply.read_address != options.read_listen
        why = f" ({options.read_listen} is in use; --read-listen chooses)" if moved else ""
        notes.append(f"metrics: http://{reply.read_address}/metrics{why}")
    if reply.prometheus_url:
        notes.append(f"Prometheus: {reply.prometheus_url}")
    if reply.alertmanager_url:
        notes.append(f"Alertmanager: {reply.alertmanager_url}")
    if reply.prometheus_password_file:
        notes.append(f"their user is orch, the password is in {reply.prometheus_password_file}")
    ready = f"the daemon is ready (process {reply.pid}, {duration(reply.seconds)})"
    line = ready if reply.started else f"the daemon runs already (process {reply.pid})"
    value = {name: getattr(reply, name) for name in reply.__dataclass_fields__}
    return answer(session, [line], value, as_json=json, notes=notes)


@takes(serve_options)
def serve(options: ServeOptions) -> int:
    """Run the daemon in the foreground, for systemd and containers; SIGTERM stops it and leaves jobs running."""
    require("daemon", "`orch serve`")
    from orchestrator.daemon.process.serve import serve as run

    return run(settings_of(Session()), options)


def down(
    stop_jobs: Annotated[
        bool,
        typer.Option("--stop-jobs", help="Let jobs save and go back to the queue first; the next `up` continues them."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Stop the daemon and return when its process has ended; jobs keep running unless --stop-jobs is given.

    Ray ends too if no job needs it any more.
    """
    session = Session(quiet=quiet)
    seconds = STOP_JOBS_SECONDS if stop_jobs else DOWN_SECONDS
    reply = _shut_down(session, stop_jobs=stop_jobs, seconds=seconds) or _wait_for_one_that_ends(session, seconds)
    value = {"running": [], "stopped": []} if reply is None else reply.to_json()
    notes = []
    if reply is not None and reply.stopped:
        notes.append(f"back in the queue: {', '.join(reply.stopped)}")
    if reply is not None and reply.running:
        notes.append(f"still running without it: {', '.join(reply.running)}; the next daemon supervises them again")
    line = "no daemon is running" if reply is None else "the daemon has stopped"
    return answer(session, [line], {**value, "was_running": reply is not None}, as_json=json, notes=notes)


def _shut_down(session: Session, *, stop_jobs: bool, seconds: float) -> ShutdownReply | None:
    """Stop the daemon and return when its process has ended; None if none listens."""
    try:
        daemon = DaemonProcess.listening(session.endpoint)
        with contextlib.closing(daemon):
            try:
                reply = session.client().shutdown(stop_jobs=stop_jobs)
            except DeadlineError as error:
                if daemon.pid and type(error) is DeadlineError:
                    hint = f"try again in a moment; to end it now: {kill_hint(daemon.pid)}"
                    raise DeadlineError(f"{error.message} (process {daemon.pid})", hint=hint) from error
                raise
            daemon.wait_until_gone(seconds)
            return reply
    except DaemonUnreachableError as error:
        if type(error) is not DaemonUnreachableError:
            raise
        return None


def _wait_for_one_that_ends(session: Session, seconds: float) -> ShutdownReply | None:
    """Wait until a daemon that is already stopping has ended; return None if there is none."""
    daemon = DaemonProcess.ending(session.endpoint)
    if daemon is None:
        return None
    from orchestrator.api.views import ShutdownReply

    daemon.wait_until_gone(seconds)
    return ShutdownReply()


def doctor(json: Json = False) -> int:
    """Check this machine: each problem and how to fix it; exit code 5 if a problem prevents orch from running."""
    session = Session()
    findings = examine(session)
    broken = any(finding.level is Level.ERROR for finding in findings)
    lines = []
    for item in findings:
        level = session.console.style(item.level.value.ljust(8), *LEVEL_STYLES[item.level])
        lines += [f"{level}{item.what}", *([f"        {item.remedy}"] if item.remedy else [])]
    plain = [{"level": item.level.value, "what": item.what, "remedy": item.remedy} for item in findings]
    code = EXIT_REFUSED if broken else EXIT_OK
    return answer(session, lines, {"healthy": not broken, "findings": plain}, as_json=json, code=code)


def demo(json: Json = False) -> int:
    """Train a small model on two ranks, kill one half-way, and show the recovery; takes about a minute."""
    require("daemon", "`orch demo`")
    from orchestrator.daemon.process.demo import run_demo

    return run_demo(DemoOptions(json=json))


def ui(
    print_link: Annotated[bool, typer.Option("--print", help="Print the link instead of opening a browser.")] = False,
    json: Json = False,
) -> int:
    """Open the page of jobs, GPUs and nodes in a browser, signed in as you by a link that works once."""
    session = Session()
    reply = session.client().page_link()
    if not (json or print_link) and _opened(reply.url):
        session.console.print(f"opened {reply.address}")
        return EXIT_OK
    notes = [f"it signs in once, within {duration(reply.valid_seconds)}; then {reply.address} is enough"]
    return answer(session, [reply.url], reply.to_json(), as_json=json, notes=notes)


def _opened(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="SPAN", help="Only jobs that ended longer ago: 12h, 30d.")
    ] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Remove logs, working copies, checkpoints and records of jobs that ended long ago.

    Prints what would be removed, and asks first. Checkpoints at a checkpoint.storage_path are kept, and are listed.
    A job of which a file cannot be removed stays, with its record, and is named with the reason (exit code 5).
    """
    session = Session()
    seconds = parse_span(older_than, "--older-than")
    client = session.client()
    if not (dry_run or yes):
        asked_at = time.monotonic()
        going = client.prune(older_than_seconds=seconds, dry_run=True)
        if going.removed:
            ask(session, f"removes {_jobs_and_bytes(going)} with their checkpoints: {', '.join(going.removed)}")
        seconds += time.monotonic() - asked_at  # exclude jobs that became old enough during the question
    reply = client.prune(older_than_seconds=seconds, dry_run=dry_run)
    if json:
        print_json(session, reply.to_json())
        return EXIT_REFUSED if reply.left else EXIT_OK
    for job_id in reply.removed:
        session.console.print(job_id)
    for place in reply.kept:
        session.console.note(f"checkpoints stay at {clean(place)}")
    for each in reply.left:
        session.console.print_error(f"{each.job_id} stays: {clean(each.directory)}: {clean(each.reason)}")
    session.console.note(f"{'would remove' if dry_run else 'removed'} {_jobs_and_bytes(reply)}")
    if reply.left:
        session.console.note("make what stays removable for the daemon's user, then run orch prune again")
    return EXIT_REFUSED if reply.left else EXIT_OK


def _jobs_and_bytes(reply: PruneReply) -> str:
    return f"{plural(len(reply.removed), 'job')}, {size(reply.freed_bytes)}"


def login(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="http://host:port of the daemon (`orch up --listen`).")
    ] = None,
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the daemon's token; without it, the command prompts for the token.",
        ),
    ] = "",
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove address and token, and use this machine's daemon again.")
    ] = False,
    json: Json = False,
) -> int:
    """Send every command to a daemon on another machine, with its token; without ADDRESS, print the current address.

    The address and the token are checked first, then stored in ORCH_HOME, readable by you alone. ORCH_ADDRESS and ORCH_TOKEN take precedence.
    """
    session = Session()
    if forget:
        if address:
            raise BadRequestError("--forget takes no ADDRESS", hint="orch login --forget")
        return _forget(session, json=json)
    if address is None:
        endpoint = session.endpoint
        value = {"address": endpoint.label, "remote": not endpoint.socket_path}
        return answer(session, [f"commands go to {endpoint.label}"], value, as_json=json)
    endpoint = tcp_endpoint(address)
    token = _token(session, token_file)
    from orchestrator.api.client import Client

    health = Client(endpoint._replace(token=token), environ=session.environ).health()
    _write(session, f"{endpoint.label}\n{token}\n")
    line = f"commands go to {endpoint.label}; `orch login --forget` ends that"
    value = {"address": endpoint.label, "version": health.version}
    return answer(session, [line], value, as_json=json, notes=_precedence(session))


def _precedence(session: Session) -> list[str]:
    address = session.environ.get("ORCH_ADDRESS")
    return [f"ORCH_ADDRESS={address} takes precedence"] if address else []


def _forget(session: Session, *, json: bool) -> int:
    path = login_path(session.environ)
    was = os.path.lexists(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    line = "logged out" if was else "there was no login"
    value = {"address": session.endpoint.label, "was_logged_in": was}
    return answer(session, [line], value, as_json=json, notes=_precedence(session))


def _token(session: Session, token_file: str) -> str:
    """Read the token: file, environment, standard input, or keyboard. Raises BadRequestError, RefusedError."""
    if token_file:
        from orchestrator.api.launch import read_token

        return read_token(token_file)
    if given := session.environ.get("ORCH_TOKEN", ""):
        return given
    if sys.stdin.isatty():
        import getpass

        token = getpass.getpass("token: ")
    else:
        token = sys.stdin.readline(4096)
    token = token.strip()
    if not token or not token.isprintable() or not token.isascii():
        raise BadRequestError("there is no token", hint="--token-file FILE, ORCH_TOKEN, or a line on standard input")
    return token


def _write(session: Session, text: str) -> None:
    from pathlib import Path

    from orchestrator.durable_files import write_whole
    from orchestrator.private_files import make_private

    path = login_path(session.environ)
    make_private(Path(path).parent)
    write_whole(Path(path), text.encode())
    read_login(session.environ)


DATED = "orch-%Y%m%dT%H%M%SZ.sqlite3"
ALL_DATED = "orch-*.sqlite3"
MAX_KEPT = 10_000


def backup(
    target: Annotated[str, typer.Argument(metavar="FILE", help="The backup; with --keep, a folder of dated ones.")],
    keep: Annotated[
        int,
        typer.Option("--keep", metavar="N", min=0, max=MAX_KEPT, help="Keep the newest N backups of the folder FILE."),
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; report what is wrong with the backup FILE.")
    ] = False,
    json: Json = False,
) -> int:
    """Copy the store to a file while the daemon runs; exit code 1 when a backup is damaged.

    The store has every accepted job and its events. Copy logs, checkpoints and archives of working directories (jobs/ and blobs/ below ORCH_HOME) with any file copy tool.
    """
    if check and keep:
        raise BadRequestError("--check writes nothing that could be kept", hint="leave --keep out")
    session = Session()
    path = _path(target)
    problems = _refusing(lambda: _problems(path) if check else _written(session, path, keep))
    if isinstance(problems, list):
        code = EXIT_JOB_FAILED if problems else EXIT_OK
        value = {"backup": str(path), "problems": problems}
        return answer(session, problems or [f"{path} is intact"], value, as_json=json, code=code)
    return answer(session, [str(problems)], {"backup": str(problems)}, as_json=json)


def restore(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A backup that `orch backup` wrote.")],
    json: Json = False,
) -> int:
    """Restore the store of ORCH_HOME from a backup; there must be no store, and no running daemon.

    The backup is checked first: one that is damaged, or that a newer orch wrote, changes nothing.
    """
    from orchestrator.store import backup as backups
    from orchestrator.store.errors import BackupExistsError

    session = Session()
    path, store = _path(source), _store(session)
    if not path.is_file():
        raise NotFoundError(f"{path} is not a file", hint="name a file that `orch backup` wrote")

    def put_back() -> None:
        store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            backups.restore(path, store)
        except BackupExistsError as error:
            raise RefusedError(
                f"there is a store at {error.path}",
                hint=f"stop the daemon (`orch down`) and move {error.path.parent}/{store.name}* away first",
            ) from error

    _refusing(put_back)
    line = f"restored {store}; the next daemon uses it"
    return answer(session, [line], {"backup": str(path), "restored": str(store)}, as_json=json)


def _path(text: str) -> Path:
    """Return the absolute path, with ``~`` expanded."""
    from pathlib import Path

    return Path(text).expanduser().absolute()


def _store(session: Session) -> Path:
    from orchestrator.spec.settings import Settings, SettingsError

    try:
        return Settings.from_environ(session.environ).paths.store
    except SettingsError as error:
        raise BadRequestError(str(error)) from error


def _refusing(work: Callable[[], object]) -> object:
    """Return the result of ``work``. Raises RefusedError for errors of the store and of the operating system."""
    from orchestrator.store.errors import StoreError

    try:
        return work()
    except StoreError as error:
        raise RefusedError(str(error)) from error
    except OSError as error:
        raise RefusedError(f"{error.filename or 'a file'}: {error.strerror}", hint="choose another place") from error


def _problems(path: Path) -> list[str]:
    from orchestrator.store.backup import check_backup

    if not path.is_file():
        raise NotFoundError(f"{path} is not a file", hint="name a file that `orch backup` wrote")
    return check_backup(path)


def _written(session: Session, target: Path, keep: int) -> Path | list[str]:
    """Write a backup and return its path; return its problems if it is damaged."""
    import contextlib
    import time

    from orchestrator.store import backup as backups
    from orchestrator.store.sql.schema import connect

    store = _store(session)
    if not store.exists():
        raise NotFoundError(f"there is no store at {store}", hint="set ORCH_HOME to the daemon's home")
    folder = target
    if keep:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = folder / time.strftime(DATED, time.gmtime())
    with contextlib.closing(connect(store, read_only=True)) as connection:
        backups.write(connection, target)
    if problems := backups.check_backup(target):
        return problems
    for old in sorted(folder.glob(ALL_DATED))[:-keep] if keep else ():
        old.unlink()
    return target
