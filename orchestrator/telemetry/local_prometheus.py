"""A Prometheus and an Alertmanager on this machine, for `orch up --with-prometheus`: their configuration and command lines.

Pure functions build the configuration from arguments; only `prepare` writes, and only below the given folder. The
caller starts and stops the processes. The files under deploy/ for containers come from the same functions, which tests
check.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import yaml

from orchestrator.process_ends import wait_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


DAEMON_JOB: Final = "orch-daemon"
EXPORTER_JOB: Final = "orch-gpu"
"""Names of the scrape jobs, used by the alerts on missing daemons and exporters."""
TARGETS_PATH: Final = "/api/v1/prometheus/targets"
"""Where the daemon lists its exporters, on the listener that also has its /metrics."""
RETENTION: Final = "15d"
USER: Final = "orch"
"""Both programs ask for this user and a password: their web configuration knows no bearer tokens."""
_WEB: Final = "web.yml"
_SALT_CHARACTERS: Final = "./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_LIBCRYPT: Final = ("libcrypt.so.1", "libcrypt.so.2")

Document = dict[str, Any]


class LocalPrometheusError(Exception):
    """Prometheus cannot be set up here; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Absolute paths of the programs; `alertmanager` None where there is none: alerts are then only shown, not sent."""

    prometheus: str
    alertmanager: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """Result of `prepare`. `commands` start the processes, in this order; they stay in the foreground and log to stderr.

    `password_file` holds the password of `USER`: the daemon's token file, or one of the folder's own.
    """

    folder: Path
    password_file: Path
    prometheus_url: str
    alertmanager_url: str | None
    commands: tuple[tuple[str, ...], ...]


def find_binaries(which: Callable[[str], str | None] = shutil.which) -> Binaries:
    """Return Prometheus and Alertmanager from the PATH. Raises LocalPrometheusError when there is no Prometheus."""
    prometheus = which("prometheus")
    if prometheus is None:
        raise LocalPrometheusError(
            "--with-prometheus needs the program prometheus, and it is not on the PATH",
            hint="apt-get install prometheus prometheus-alertmanager, or start orch without --with-prometheus",
        )
    return Binaries(prometheus=prometheus, alertmanager=which("prometheus-alertmanager") or which("alertmanager"))


def password_hash(password: str, libraries: Sequence[str] = _LIBCRYPT) -> str:
    """Return the bcrypt hash of a password, as the web configuration of both programs requires it; from the C library's libcrypt.

    Raises LocalPrometheusError where that has no bcrypt.
    """
    setting = "$2b$10$" + "".join(secrets.choice(_SALT_CHARACTERS) for _ in range(22))
    for name in libraries:
        try:
            crypt = ctypes.CDLL(name).crypt
        except (OSError, AttributeError):
            continue
        crypt.argtypes, crypt.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_char_p
        found = crypt(password.encode(), setting.encode()) or b""
        if found.startswith(b"$2b$") and len(found) == 60:
            return str(found, "ascii")
    raise LocalPrometheusError(
        "Prometheus would be open to every user of this machine: no libcrypt here can make the hash of its password",
        hint="apt-get install libcrypt1, or start orch without --with-prometheus",
    )


def prometheus_config(
    *,
    daemon: str,
    rules: str = "orch.rules.yml",
    alertmanager: str | None = None,
    token_file: str | None = None,
    password_file: str | None = None,
) -> Document:
    """Return Prometheus' configuration. `daemon` is host:port of the reading listener, `alertmanager` host:port or None.

    `password_file` is that of the Alertmanager, where it requires one.

    Exporters are scraped more often than the daemon: balance is an average over a minute, and four samples are few.
    """
    access: Document = {"authorization": {"credentials_file": token_file}} if token_file else {}
    config: Document = {
        "global": {"scrape_interval": "15s", "scrape_timeout": "10s", "evaluation_interval": "15s"},
        "rule_files": [rules],
        "scrape_configs": [
            {"job_name": DAEMON_JOB, **access, "static_configs": [{"targets": [daemon]}]},
            {
                "job_name": EXPORTER_JOB,
                "scrape_interval": "5s",
                "scrape_timeout": "4s",
                # gpu_info's own label node is unchanged; series without one get the node of their target
                "honor_labels": True,
                **access,
                "http_sd_configs": [{"url": f"http://{daemon}{TARGETS_PATH}", "refresh_interval": "15s", **access}],
                "relabel_configs": [
                    {"source_labels": ["__meta_orch_node"], "regex": "(.+)", "target_label": "node"},
                ],
            },
        ],
    }
    if alertmanager:
        login: Document = {"basic_auth": {"username": USER, "password_file": password_file}} if password_file else {}
        config["alerting"] = {"alertmanagers": [{**login, "static_configs": [{"targets": [alertmanager]}]}]}
    return config


def alertmanager_config(*, receivers: list[Document], receiver: str) -> Document:
    """Return Alertmanager's configuration: alerts are grouped by job and by node, and causes hide effects."""
    return {
        "route": {
            "receiver": receiver,
            "group_by": ["alertname"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "12h",
            "routes": [
                {"matchers": ['component="job"'], "group_by": ["job_id"], "routes": [_urgent()]},
                {"matchers": ['component=~"gpu|node"'], "group_by": ["node"], "routes": [_urgent()]},
                _urgent(),
            ],
        },
        "inhibit_rules": inhibit_rules(),
        "receivers": receivers,
    }


SAID_BY_FINDINGS: Final = (
    ("gpu_throttled", "OrchGpuThrottled", ("gpu_uuid",)),
    ("rank_slow", "OrchRankStraggler", ("job_id", "rank")),
    ("storage_full|saves_failing|saves_rare", "OrchCheckpointTooOld", ("job_id",)),
    ("restart_loop", "OrchJobRestartLoop", ("job_id",)),
    (
        "rank_stopped|rank_at_breakpoint|wrong_world_size|rendezvous_incomplete|no_step|input_starved|job_idle|gpus_unused",
        "OrchJobGpusIdle",
        ("job_id",),
    ),
    ("storage_full|saves_failing|saves_rare", "OrchJobNeverSaved", ("job_id",)),
)
"""Findings that repeat an older alert with more detail: (kinds of finding, alert, labels that must agree)."""


def _urgent() -> Document:
    """Return the route that sends urgent alerts of a group at once and again every hour; the parent groups them."""
    return {"matchers": ['severity="critical"'], "group_wait": "10s", "repeat_interval": "1h"}


def inhibit_rules() -> list[Document]:
    """Return the rules by which an alert for a cause silences those for effects where the labels in `equal` agree."""

    def rule(source: str, target: str, *equal: str) -> Document:
        return {"source_matchers": [source], "target_matchers": [target], "equal": list(equal)}

    return [
        rule('alertname="OrchNodeDown"', 'component="gpu"', "node"),
        rule('alertname="OrchGpuLost"', 'alertname=~"OrchGpuSilent|OrchExporterStale"', "gpu_uuid"),
        rule('alertname="OrchDaemonDown"', 'alertname=~"OrchQueueStuck|OrchNodeUnreachable|OrchDaemonSlow"'),
        rule('alertname="OrchJobHangSuspected"', 'alertname=~"OrchRankStraggler|OrchCheckpointTooOld"', "job_id"),
        *(
            {
                "source_matchers": ['alertname="OrchFinding"', f'kind{"=~" if "|" in kinds else "="}"{kinds}"'],
                "target_matchers": [f'alertname="{target}"'],
                "equal": list(equal),
            }
            for kinds, target, equal in SAID_BY_FINDINGS
        ),
        {
            "source_matchers": ['alertname="OrchDaemonSlow"'],
            "target_matchers": ['alertname="OrchFinding"', 'kind="daemon_overloaded"'],
            "equal": [],
        },
        rule('alertname="OrchDiskAlmostFull"', 'alertname="OrchDiskFilling"', "node", "path"),
    ]


def local_receivers(webhook: str | None) -> tuple[list[Document], str]:
    """Return the receivers of a local machine, and the one in use: a webhook, or none (alerts are only shown)."""
    receivers: list[Document] = [{"name": "none"}]
    if webhook:
        receivers.append({"name": "webhook", "webhook_configs": [{"url": webhook, "send_resolved": True}]})
    return receivers, receivers[-1]["name"]


def bundled_rules(docs_url: str = "") -> str:
    """Return the rules in the wheel; their runbooks are links to the documentation at ``docs_url``, where it is given."""
    rules = resources.files("orchestrator.data").joinpath("orch.rules.yml").read_text(encoding="utf-8")
    return rules.replace("runbook_url: docs/", f"runbook_url: {docs_url}/") if docs_url else rules


def prepare(
    folder: Path,
    *,
    daemon: str,
    binaries: Binaries,
    prometheus_address: str = "127.0.0.1:9090",
    alertmanager_address: str = "127.0.0.1:9093",
    webhook: str | None = None,
    token_file: str | None = None,
    docs_url: str = "",
) -> LocalStack:
    """Write configuration, rules and data folders below `folder`; existing data and a password stay.

    Both programs require `USER` and the token of `token_file`; without one, a password that is made here. Raises LocalPrometheusError.
    """
    with_alerts = binaries.alertmanager is not None
    receivers, receiver = local_receivers(webhook)
    password_file = Path(token_file) if token_file else folder / "password"
    config = prometheus_config(
        daemon=daemon,
        alertmanager=alertmanager_address if with_alerts else None,
        token_file=token_file,
        password_file=str(password_file),
    )
    files = {
        "prometheus.yml": _yaml(config),
        "orch.rules.yml": bundled_rules(docs_url),
        "alertmanager.yml": _yaml(alertmanager_config(receivers=receivers, receiver=receiver)),
    }
    try:
        for data in ("prometheus-data", "alertmanager-data"):
            (folder / data).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not password_file.exists():
            _write(password_file, f"{secrets.token_urlsafe(24)}\n")
        users = {"basic_auth_users": {USER: password_hash(password_file.read_text(encoding="utf-8").strip())}}
        for name, text in {**files, _WEB: _yaml(users)}.items():
            _write(folder / name, text)
    except OSError as error:
        raise LocalPrometheusError(
            f"the configuration of Prometheus cannot be written: {error}", hint=f"make {folder} writable, or free space"
        ) from error
    return LocalStack(
        folder=folder,
        password_file=password_file,
        prometheus_url=f"http://{prometheus_address}",
        alertmanager_url=f"http://{alertmanager_address}" if with_alerts else None,
        commands=_commands(folder, binaries, prometheus_address, alertmanager_address),
    )


def _commands(folder: Path, binaries: Binaries, prometheus: str, alertmanager: str) -> tuple[tuple[str, ...], ...]:
    commands = [
        (
            binaries.prometheus,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'prometheus-data'}",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address={prometheus}",
            f"--web.config.file={folder / _WEB}",
        )
    ]
    if binaries.alertmanager is not None:
        commands.append(
            (
                binaries.alertmanager,
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager-data'}",
                f"--web.listen-address={alertmanager}",
                f"--web.config.file={folder / _WEB}",
                "--cluster.listen-address=",  # alone: no port for others
            )
        )
    return tuple(commands)


def _yaml(document: Document) -> str:
    return yaml.safe_dump(document, sort_keys=False)


def _write(path: Path, text: str) -> None:
    """Write atomically; only the owner can read it, since a webhook's address may be a secret."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


STOP_SECONDS: Final = 10.0


class LocalPrometheus:
    """Owns the two processes. ``folder`` holds their configuration, data and logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []
        self.stack: LocalStack | None = None

    async def start(self, daemon: str, token_file: str = "", docs_url: str = "") -> LocalStack:
        """Start them for the daemon's metrics at ``daemon`` (host:port), read with that token. Raises LocalPrometheusError.

        Alerts link to the documentation at ``docs_url``.
        """
        await asyncio.to_thread(self._stop_earlier)
        self.stack = prepare(
            self._folder,
            daemon=daemon,
            binaries=find_binaries(),
            prometheus_address=_free(9090),
            alertmanager_address=_free(9093),
            token_file=token_file or None,
            docs_url=docs_url,
        )
        for command in self.stack.commands:
            log = os.open(
                self._folder / f"{os.path.basename(command[0])}.log",  # noqa: PTH119 - a command, not a path
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            try:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
            finally:
                os.close(log)
        pids = {str(p.pid): psutil.Process(p.pid).create_time() for p in self._processes}
        (self._folder / "pids.json").write_text(json.dumps(pids))
        return self.stack

    async def stop(self) -> None:
        """Send SIGTERM, so that Prometheus writes its memory to disk; SIGKILL after a while."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._processes.clear()

    def _stop_earlier(self) -> None:
        try:
            pids = json.loads((self._folder / "pids.json").read_text())
        except (OSError, ValueError):
            return
        earlier: Sequence[psutil.Process] = [p for p in (_same(int(pid), at) for pid, at in pids.items()) if p]
        for process in earlier:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        for process in wait_ended(earlier, STOP_SECONDS):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _same(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1.0 else None
    except psutil.Error:
        return None


def _free(port: int) -> str:
    """Return the usual address, or, where it is taken, a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
