"""Settings of the installation, from environment variables; no other module reads the environment.

Read once, by the program that starts, and passed on as a value. Standard library only, and fast to import: the command
line has a quarter of a second for everything.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.spec.paths import Paths
from orchestrator.spec.queues import QueueSpec, parse_queues

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    _Read = Callable[[str, Mapping[str, str]], Any]
    """Reads one variable's text; takes the whole environment to expand `~`."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

MAX_SOCKET_BYTES = 100
"""Longest path of the socket. The kernel's limit is 107 bytes; a few are left for names beside it."""


class SettingsError(ValueError):
    """Environment variables hold invalid values. The message names each, its value and what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set outside a job file.

    home: `ORCH_HOME`, default ~/.orch, absolute. The directory of all state; one daemon for each home.
    runtime_dir: `XDG_RUNTIME_DIR`, default none. Holds the socket when its path under `home` is too long.
    metrics_address: `ORCH_METRICS_ADDRESS`, default 127.0.0.1. A person decides, not a default, which hosts may scrape.
    metrics_port: `ORCH_METRICS_PORT`, default 9476, 0 for any free one. Fixed, so that Prometheus can be pointed at
        it; near the 94xx that exporters usually have, and used by no widespread exporter.
    exporter_address: `ORCH_EXPORTER_ADDRESS`, default 127.0.0.1. Address of the GPU exporters on each node; `node` means the
        node's own address in its Ray cluster, so that a Prometheus elsewhere can reach them, and requires a token.
    exporter_ports: `ORCH_EXPORTER_PORTS`, default 9477-9599, one for each GPU of a node: a range that a firewall or a
        network policy can name. 0 for any free ones.
    exporter_processes: `ORCH_EXPORTER_PROCESSES`, default no. Whether exporters show every process on a GPU: that adds
        a series to Prometheus for each process that ever ran.
    log_max_bytes: `ORCH_LOG_MAX_BYTES`, default 32 MiB. Size at which a file of a rank's log is rotated: an hour of a
        verbose script, and small enough for an editor.
    log_keep_files: `ORCH_LOG_KEEP_FILES`, default 3. Rotated files kept beside the current one, so that a rank
        takes at most 128 MiB and the first error of a long log is still there.
    snapshot_max_bytes: `ORCH_SNAPSHOT_MAX_BYTES`, default 500 MB. Largest working directory: code, not data; copying
        it takes a second or two.
    outputs_max_bytes: `ORCH_OUTPUTS_MAX_BYTES`, default 10 GB. Maximum size of one gang's `outputs`; the rest stays where it
        is, and the job's events report that.
    reserve_bytes: `ORCH_RESERVE_BYTES`, default 16 MiB. Disk space reserved for the records of running jobs; each
        transition takes about 4 kB.
    queues: `ORCH_QUEUES`, default none: every job is in one queue, whatever it names. A table, one queue after the other:
        `lab guaranteed=8 maximum=16; vision parent=lab weight=2`; changes by `orch queue set` override it.
    use_half_life: `ORCH_USE_HALF_LIFE`, default 7d. Time after which the counted use of a user or a queue has halved.
    ageing: `ORCH_AGEING`, default 24h. A job that has waited this long, while no job like it started, goes before all others.
    gpu_hour_price: `ORCH_GPU_HOUR_PRICE`, default none. Price of a GPU hour, in any currency, for the cost in `orch usage`.
    user_max_jobs: `ORCH_USER_MAX_JOBS`, default none. Most jobs of one user that run at once; others wait.
    user_max_gpus: `ORCH_USER_MAX_GPUS`, default none. Most GPUs that one user's jobs hold at once.
    user_max_queued: `ORCH_USER_MAX_QUEUED`, default 2000. Most jobs of one user that have not ended; further submissions are refused. Two
        matrices of the largest size.
    user_max_queued_bytes: `ORCH_USER_MAX_QUEUED_BYTES`, default 64 MB. Most bytes of the job files of those jobs: the daemon keeps
        them in memory until the jobs end.
    user_max_priority: `ORCH_USER_MAX_PRIORITY`, default 50, the priority of a job that names none. Highest priority that users other
        than the daemon's owner may give to a job.
    docs_url: `ORCH_DOCS_URL`, default none. Address at which docs/ is served: alerts of `--with-prometheus`, exported rules and boards, and runbooks of findings link to it.
    reclaim_idle: `ORCH_RECLAIM_IDLE`, default none: idle GPUs stay with their job. With a duration, a running job whose GPUs were all idle for that long
        stops when another job needs them; a job's own `reclaim_idle` overrides it.
    pass_env: `ORCH_PASS_ENV`, default none. Names and patterns (`LM_LICENSE_FILE,SITE_*`) of variables of the daemon's environment
        that jobs inherit beside the usual ones, which docs/environment.md lists.
    log_level: `ORCH_LOG_LEVEL`, default info. Level of the daemon's own log.
    log_format: `ORCH_LOG_FORMAT`, default auto: readable text on a terminal, else JSON.
    """

    home: Path
    runtime_dir: Path | None = None
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 9476
    exporter_address: str = "127.0.0.1"
    exporter_ports: tuple[int, int] = (9477, 9599)
    exporter_processes: bool = False
    log_max_bytes: int = 32 * 1024 * 1024
    log_keep_files: int = 3
    snapshot_max_bytes: int = 500_000_000
    outputs_max_bytes: int = 10_000_000_000
    reserve_bytes: int = 16 * 1024 * 1024
    queues: tuple[QueueSpec, ...] = ()
    use_half_life: float = 7 * 86400.0
    ageing: float = 86400.0
    gpu_hour_price: float | None = None
    user_max_jobs: int | None = None
    user_max_gpus: int | None = None
    user_max_queued: int = 2000
    user_max_queued_bytes: int = 64_000_000
    user_max_priority: int = 50
    docs_url: str = ""
    reclaim_idle: float | None = None
    pass_env: tuple[str, ...] = ()
    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"
    uid: int = field(default_factory=os.getuid)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings. An empty variable counts as not set.

        Raises:
            SettingsError: one error that names every variable with a bad value.

        """
        problems: list[str] = []
        values: dict[str, Any] = {}
        for name, (variable, read) in _VARIABLES.items():
            text = environ.get(variable, "")
            if not text:
                continue
            try:
                values[name] = read(text, environ)
            except ValueError as error:
                problems.append(f"{variable}={_shown(text)}: {error}")
        if problems:
            raise SettingsError("\n".join(problems))
        if "home" not in values:
            values["home"] = _user_home(environ) / ".orch"
        return cls(**values)

    @property
    def socket(self) -> Path:
        """The daemon's control socket, at a path that is short enough for one."""
        usual = self.home / "run" / "orch.sock"
        if _fits(usual):
            return usual
        import hashlib

        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:16]
        if self.runtime_dir is not None and _fits(self.runtime_dir / f"orch-{digest}.sock"):
            return self.runtime_dir / f"orch-{digest}.sock"
        # Its directory must be made with mode 0700 and its owner checked: every user can write to /tmp.
        return Path("/tmp") / f"orch-{self.uid}-{digest}" / "orch.sock"  # noqa: S108 - its owner is checked

    @property
    def paths(self) -> Paths:
        """The names of all files."""
        return Paths(home=self.home, socket=self.socket)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_BYTES


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _user_home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    if home.startswith("/"):
        return Path(os.path.realpath(home))
    try:
        return Path.home()
    except RuntimeError as error:  # as in a container that runs with a number for a user
        raise SettingsError("neither ORCH_HOME nor HOME is set, and this user has no account") from error


def _directory(text: str, environ: Mapping[str, str]) -> Path:
    if text == "~" or text.startswith("~/"):
        text = f"{_user_home(environ)}{text[1:]}"
    if not text.startswith("/"):
        raise ValueError("not an absolute path; a relative one would mean another place in each directory")
    if "\0" in text:
        raise ValueError("holds a NUL character")
    # Two spellings of one directory must lead to one daemon.
    return Path(os.path.realpath(text))


def _runtime_directory(text: str, environ: Mapping[str, str]) -> Path | None:
    # Not a variable of orch: its standard requires that a path that is not absolute is ignored.
    return _directory(text, environ) if text.startswith("/") else None


def _number(low: int, high: int) -> _Read:
    def read(text: str, environ: Mapping[str, str]) -> int:  # noqa: ARG001 - the readers' signature
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"not a whole number from {low} to {high}")
        return int(text)

    return read


def _ports(text: str, environ: Mapping[str, str]) -> tuple[int, int]:  # noqa: ARG001 - the readers' signature
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last <= 65535 or (first == 0 and last != 0):
        raise ValueError("not a range of ports; write 9477-9599, or 0 for any free ones")
    return first, last


def _yes_or_no(text: str, environ: Mapping[str, str]) -> bool:
    return bool(_choice("yes", "no")(text, environ) == "yes")


def _size(low: int) -> _Read:
    def read(text: str, environ: Mapping[str, str]) -> int:  # noqa: ARG001 - the readers' signature
        from orchestrator.spec.problems import BadValueError
        from orchestrator.spec.units import parse_memory

        try:
            amount = parse_memory(text)
        except BadValueError:
            amount = -1
        if amount < low:
            raise ValueError(f"not a number of bytes from {low} on; write 33554432, 32MiB or 500MB")
        return amount

    return read


def _choice(*words: str) -> _Read:
    def read(text: str, environ: Mapping[str, str]) -> str:  # noqa: ARG001 - the readers' signature
        if text.lower() not in words:
            raise ValueError(f"not one of {', '.join(words)}")
        return text.lower()

    return read


def _address(text: str, environ: Mapping[str, str]) -> str:  # noqa: ARG001 - the readers' signature
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.-]{0,252}|[0-9A-Fa-f:]{2,45}", text):
        raise ValueError("not an address or a host name; write 127.0.0.1, or 0.0.0.0 for every interface")
    return text


def _web_address(text: str, environ: Mapping[str, str]) -> str:  # noqa: ARG001 - the readers' signature
    if not re.fullmatch(r"https?://[^\s\"'<>#]{1,500}", text):
        raise ValueError("not the address of a site; write it like https://example.org/orch/docs")
    return text.rstrip("/")


def _queues(text: str, environ: Mapping[str, str]) -> tuple[QueueSpec, ...]:  # noqa: ARG001 - the readers' signature
    return parse_queues(text)


def _variables(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG001 - the readers' signature
    names = tuple(filter(None, re.split(r"[,\s]+", text)))
    for name in names:
        if not re.fullmatch(r"[A-Za-z_*][A-Za-z0-9_*]{0,254}", name) or not re.search("[A-Za-z0-9]", name):
            raise ValueError(f"{_shown(name)} is not a name or a pattern; write LM_LICENSE_FILE,SITE_*")
    return names


def _price(text: str, environ: Mapping[str, str]) -> float:  # noqa: ARG001 - the readers' signature
    if not re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text):
        raise ValueError("not a price; write 2 or 2.49, without a currency")
    return float(text)


def _duration(least: float) -> _Read:
    def read(text: str, environ: Mapping[str, str]) -> float:  # noqa: ARG001 - the readers' signature
        from orchestrator.spec.problems import BadValueError
        from orchestrator.spec.units import parse_duration

        try:
            seconds = parse_duration(text).total_seconds()
        except BadValueError as error:
            raise ValueError(str(error)) from error
        if seconds < least:
            raise ValueError(f"shorter than {least:g}s")
        return seconds

    return read


_VARIABLES: dict[str, tuple[str, _Read]] = {
    "home": ("ORCH_HOME", _directory),
    "runtime_dir": ("XDG_RUNTIME_DIR", _runtime_directory),
    "metrics_address": ("ORCH_METRICS_ADDRESS", _address),
    "metrics_port": ("ORCH_METRICS_PORT", _number(0, 65535)),
    "exporter_address": ("ORCH_EXPORTER_ADDRESS", _address),
    "exporter_ports": ("ORCH_EXPORTER_PORTS", _ports),
    "exporter_processes": ("ORCH_EXPORTER_PROCESSES", _yes_or_no),
    "log_max_bytes": ("ORCH_LOG_MAX_BYTES", _size(4096)),
    "log_keep_files": ("ORCH_LOG_KEEP_FILES", _number(0, 1000)),
    "snapshot_max_bytes": ("ORCH_SNAPSHOT_MAX_BYTES", _size(0)),
    "outputs_max_bytes": ("ORCH_OUTPUTS_MAX_BYTES", _size(0)),
    "reserve_bytes": ("ORCH_RESERVE_BYTES", _size(0)),
    "queues": ("ORCH_QUEUES", _queues),
    "use_half_life": ("ORCH_USE_HALF_LIFE", _duration(60.0)),
    "ageing": ("ORCH_AGEING", _duration(1.0)),
    "gpu_hour_price": ("ORCH_GPU_HOUR_PRICE", _price),
    "user_max_jobs": ("ORCH_USER_MAX_JOBS", _number(1, 1_000_000)),
    "user_max_gpus": ("ORCH_USER_MAX_GPUS", _number(0, 1_000_000)),
    "user_max_queued": ("ORCH_USER_MAX_QUEUED", _number(1, 1_000_000)),
    "user_max_queued_bytes": ("ORCH_USER_MAX_QUEUED_BYTES", _size(1)),
    "user_max_priority": ("ORCH_USER_MAX_PRIORITY", _number(0, 100)),
    "docs_url": ("ORCH_DOCS_URL", _web_address),
    "reclaim_idle": ("ORCH_RECLAIM_IDLE", _duration(60.0)),
    "pass_env": ("ORCH_PASS_ENV", _variables),
    "log_level": ("ORCH_LOG_LEVEL", _choice("debug", "info", "warning", "error")),
    "log_format": ("ORCH_LOG_FORMAT", _choice("auto", "console", "json")),
}
