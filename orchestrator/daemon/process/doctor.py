"""Runs ``orch doctor``: checks this machine and this home, and reports each problem and how to fix it. Changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING, Final

from orchestrator.api.client import Client
from orchestrator.api.errors import DaemonUnreachableError, OrchError
from orchestrator.api.launch import Finding, Level
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.daemon.process.home import OTHERS, PASS_THROUGH, exposed_entries
from orchestrator.parts import install_line, unmet
from orchestrator.runtime.forkserver.cgroups import memory_group
from orchestrator.runtime.nodes.directories import SHARED_MEMORY, namespace, page_directory, user_directory
from orchestrator.runtime.ranks.process_inspector import find_py_spy
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.spec.settings import Settings

PYTHONS: Final = ((3, 11), (3, 12), (3, 13), (3, 14))
LOW_DISK_BYTES: Final = 1_000_000_000
LOW_SHARED_MEMORY_BYTES: Final = 200_000_000
LOW_FILES: Final = 4096
LOG_LINES: Final = 5


def examine(settings: Settings) -> list[Finding]:
    """Return every finding, good ones included, in the order of dependency."""
    findings: list[Finding] = []
    checks: tuple[Callable[[Settings], list[Finding]], ...] = (
        _python,
        _packages,
        _gpus,
        _home,
        _privacy,
        _shared_memory,
        _limits,
        _memory_limits,
        _stacks,
        _daemon,
    )
    for check in checks:
        try:
            findings.extend(check(settings))
        except Exception as error:
            name = check.__name__.removeprefix("_")
            findings.append(
                Finding(level=Level.ERROR, what=f"the check of {name} failed: {error}", remedy="report this")
            )
    return findings


def _ok(what: str) -> Finding:
    return Finding(level=Level.OK, what=what)


def _python(_: Settings) -> list[Finding]:
    what = f"Python {sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] in PYTHONS:
        return [_ok(what)]
    oldest, newest = (f"{major}.{minor}" for major, minor in (PYTHONS[0], PYTHONS[-1]))
    remedy = f"install orch with Python {oldest} to {newest}: other versions were not tried"
    return [Finding(level=Level.WARNING, what=what, remedy=remedy)]


def _packages(_: Settings) -> list[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    findings = [
        Finding(level=Level.ERROR, what=f"orch needs {requirement}", remedy=install_line("daemon"))
        for requirement in unmet("daemon")
    ]
    for name in ("ray", "torch", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            findings.append(_ok(f"{name} {version(name)}"))
    return findings


def _gpus(_: Settings) -> list[Finding]:
    from orchestrator.gpu.drivers.inventory import survey

    found = survey()
    try:
        findings = [
            Finding(level=Level.WARNING, what=problem, remedy="check the driver; jobs on other GPUs are not affected")
            for problem in found.problems
        ]
        models = sorted({gpu.model for gpu in found.gpus})
        if found.gpus:
            return [*findings, _ok(f"{len(found.gpus)} GPU(s): {', '.join(models)}")]
    finally:
        found.close()
    remedy = "train on CPUs with resources_per_worker: {gpu: 0}, or try things out: orch up --simulate-gpus 2"
    return [*findings, Finding(level=Level.WARNING, what="no GPU was found on this machine", remedy=remedy)]


def _home(settings: Settings) -> list[Finding]:
    home = settings.home
    probe = home
    while not probe.exists():
        probe = probe.parent
    if not os.access(probe, os.W_OK | os.X_OK):
        remedy = f"make {probe} writable for you, or set ORCH_HOME to a directory of your own"
        return [Finding(level=Level.ERROR, what=f"{home} cannot be written", remedy=remedy)]
    free = shutil.disk_usage(probe).free
    if free < LOW_DISK_BYTES:
        remedy = "free some space (`orch prune`), or set ORCH_HOME to a larger disk"
        return [Finding(level=Level.WARNING, what=f"only {size(free)} are free under {home}", remedy=remedy)]
    return [_ok(f"{home}: {size(free)} free")]


def _privacy(settings: Settings, *, shared_memory: Path = SHARED_MEMORY) -> list[Finding]:
    """Check whether other users can access orch's files, or own its paths."""
    findings = [
        Finding(level=Level.ERROR, what=f"{path} is not this user's alone", remedy=f"remove it: sudo rm -r {path}")
        for path in (user_directory(), page_directory(namespace(settings.home), shared_memory=shared_memory))
        if _is_taken(path)
    ]
    if not settings.home.exists():
        return findings
    home = settings.home.stat()
    if home.st_uid not in (os.geteuid(), 0):
        what = f"{settings.home} belongs to user {home.st_uid}"
        return [*findings, Finding(level=Level.ERROR, what=what, remedy="set ORCH_HOME to a directory of your own")]
    reach = stat.S_IMODE(home.st_mode) & OTHERS
    if reach & ~PASS_THROUGH:
        what = f"other users can read or write {settings.home} (mode {stat.S_IMODE(home.st_mode):o})"
        return [*findings, Finding(level=Level.ERROR, what=what, remedy=f"chmod go-rwx {settings.home}")]
    found = exposed_entries(settings.paths) if reach else []
    if found:
        what = f"other users can get at {found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        return [*findings, Finding(level=Level.ERROR, what=what, remedy=f"chmod go-rwx {found[0]}")]
    return findings or [_ok(f"{settings.home} is this user's alone")]


def _is_taken(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)


def _shared_memory(_: Settings) -> list[Finding]:
    if not SHARED_MEMORY.is_dir():
        remedy = "mount a tmpfs there; without it progress pages and snapshots are on disk"
        return [Finding(level=Level.WARNING, what=f"there is no {SHARED_MEMORY}", remedy=remedy)]
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < LOW_SHARED_MEMORY_BYTES:
        remedy = "in a container, start it with more: --shm-size=1g"
        return [Finding(level=Level.WARNING, what=f"{SHARED_MEMORY} has only {size(free)} free", remedy=remedy)]
    return [_ok(f"{SHARED_MEMORY}: {size(free)} free")]


def _limits(_: Settings) -> list[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LOW_FILES:
        remedy = f"ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}, before `orch up`"
        what = f"a process may open only {soft} files; gangs of many ranks need more"
        return [Finding(level=Level.WARNING, what=what, remedy=remedy)]
    return [_ok(f"open files: {soft if soft != resource.RLIM_INFINITY else 'unlimited'}")]


def _memory_limits(settings: Settings) -> list[Finding]:
    """Check the memory limits of the daemon, in its own control group; without a daemon, those of one started here."""
    try:
        group = Client(Endpoint(socket_path=str(settings.socket))).health().memory_limits
    except OrchError:
        group = None
    whose = "the daemon's, " if group is not None else ""
    if group is None:
        group = memory_group()
    if group:
        return [_ok(f"control groups: ranks are held to resources_per_worker.memory ({whose}below {group})")]
    remedy = (
        "run orch as a systemd unit with Delegate=yes and DelegateSubgroup=service; without, the kernel still kills"
        " ranks before orch and Ray, by their oom_score_adj"
    )
    where = "by the daemon that runs" if whose else "here"
    what = f"control groups for memory cannot be made {where}: ranks are not held to resources_per_worker.memory"
    return [Finding(level=Level.WARNING, what=what, remedy=remedy)]


def _stacks(_: Settings) -> list[Finding]:
    tool = find_py_spy()
    if tool is None:
        what = (
            "py-spy is not installed: deadlocked ranks are not told from slow ones, and `orch stacks` shows no stacks"
        )
        return [Finding(level=Level.WARNING, what=what, remedy=install_line("stacks"))]
    return [_ok(f"py-spy: {tool}")]


def _daemon(settings: Settings) -> list[Finding]:
    try:
        health = Client(Endpoint(socket_path=str(settings.socket))).health()
    except DaemonUnreachableError:
        return [*_store(settings), _down(settings)]
    except OrchError as error:
        return [Finding(level=Level.ERROR, what=str(error), remedy=error.hint)]
    if health.problems:
        return [Finding(level=Level.ERROR, what=p, remedy=f"see {settings.paths.daemon_log}") for p in health.problems]
    return [_ok(f"the daemon runs (process {health.pid}), Ray at {health.ray_address}, {plural(health.nodes, 'node')}")]


def _store(settings: Settings) -> list[Finding]:
    """Check the store, only without a daemon: opening takes the store's lock."""
    from orchestrator.store.errors import StoreError, damaged_sentence
    from orchestrator.store.store import Store

    if not settings.paths.store.exists():
        return []
    try:
        with contextlib.closing(Store.open(settings.paths.store, reserve=None, reserve_bytes=0)) as store:
            damaged = asyncio.run(store.damaged())
    except StoreError as error:
        return [
            Finding(
                level=Level.ERROR, what=f"the store cannot be opened: {error}", remedy="see docs/operations/upgrade.md"
            )
        ]
    remedy = "restore a backup of the store (docs/operations/upgrade.md)"
    found = [
        Finding(level=Level.WARNING if one.rebuilt else Level.ERROR, what=damaged_sentence(one), remedy=remedy)
        for one in damaged
    ]
    return found or [_ok(f"the store {settings.paths.store} can be read")]


def _down(settings: Settings) -> Finding:
    try:
        lines = settings.paths.daemon_log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        lines = []
    log_end = f"; its log ends with: {' | '.join(lines)}" if lines else ""
    return Finding(level=Level.WARNING, what=f"no daemon answers at {settings.socket}{log_end}", remedy="orch up")
