"""Hosts for tests: start some, run commands on them as their users, cut and slow the links between them, kill and boot them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from tests.support.hosts.switch import Link
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT: Final = Path(__file__).parents[3]
SITE: Final = Path(__file__).with_name("site.py")
TOOLS: Final = ("unshare", "nsenter", "setpriv", "ip", "mount", "gcc")
WALL_CLOCK: Final = Path(__file__).with_name("wall_clock.c")
FIRST_UID: Final = 61_000
NETWORK: Final = "10.77.0"
TRY: Final = "ip link add orch0 type veth peer name orch1 && mount -t tmpfs tmpfs /mnt"


@cache
def why_not() -> str:
    """Return the reason why this machine cannot have hosts; empty when it can."""
    if os.geteuid() != 0:
        return "namespaces, and users of their own, need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (util-linux, iproute2, gcc)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c", TRY],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Properties of a host. ``clock``: seconds by which its Python's wall clock is ahead; ``uptime``: by which its monotonic one is."""

    uid: int = FIRST_UID
    home_mebibytes: int = 512
    clock: float = 0.0
    uptime: int = 0
    shares: bool = True
    """Whether the host has ``/home/shared``, which is one directory for all hosts that have it."""


@dataclass(slots=True)
class Host:
    """One host. Its user is ``trainer``; the user's home is a disk of its own that outlives a boot."""

    number: int
    plan: Plan
    site: Hosts
    pid: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def home(self) -> str:
        return "/home/trainer"

    def outside(self, path: str) -> Path:
        """Return the path under which this process finds a path of the host."""
        return Path(f"/proc/{self.pid}/root{path}")

    # -- commands

    def command(self, *arguments: str, cwd: str | None = None) -> list[str]:
        """Return the command line that runs a command on the host, as its user."""
        uid = str(self.plan.uid)
        environ = [f"{name}={value}" for name, value in self.environ().items()]
        return [
            *(
                "nsenter",
                "--all",
                f"--target={self.pid}",
                "setpriv",
                f"--reuid={uid}",
                f"--regid={uid}",
                "--clear-groups",
            ),
            *("--inh-caps=-all", "--bounding-set=-all", "env", "--ignore-environment", f"--chdir={cwd or self.home}"),
            *environ,
            *arguments,
        ]

    def environ(self) -> dict[str, str]:
        """Return the variables of the host's user."""
        ahead = {"LD_PRELOAD": str(self.site.wall_clock), "CLOCK_AHEAD": f"{self.plan.clock:g}"}
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": self.home,
            "USER": "trainer",
            "LOGNAME": "trainer",
            "LANG": "C.UTF-8",
            "SHELL": "/bin/sh",
            **(ahead if self.plan.clock else {}),
            **self.variables,
        }

    def run(
        self, *arguments: str, cwd: str | None = None, check: bool = True, seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end."""
        done = subprocess.run(
            self.command(*arguments, cwd=cwd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{self.name}: {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def python(self, program: str, *arguments: str, seconds: float = PATIENCE_SECONDS) -> str:
        """Run a program on the host; return its output."""
        return self.run(sys.executable, "-c", program, *arguments, seconds=seconds).stdout

    # -- faults

    def processes(self) -> list[psutil.Process]:
        """Return every process of the host but the first."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
        return found

    def freeze(self) -> None:
        """Stop every process of the host, including those that are started meanwhile."""
        stopped: set[int] = set()
        while new := [each for each in self.processes() if each.pid not in stopped]:
            stopped |= {each.pid for each in new}
            _signal(new, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue every process of the host."""
        _signal(self.processes(), signal.SIGCONT)

    def kill(self) -> None:
        """Kill the host as a power cut does: the content of its disk stays."""
        self.site.ask("end", host=self.number)
        self.pid = 0

    def boot(self) -> None:
        """Start the host."""
        self.pid = self.site.ask("boot", host=self.number, init=self._init(), unshare=self._unshare())["pid"]

    def _init(self) -> dict[str, Any]:
        return {
            "directory": str(self.site.directory / self.name),
            "home": self.home,
            "shared": str(self.site.directory / "shared") if self.plan.shares else "",
            "seen": self.site.seen,
            "scratch_mebibytes": 1024,
            "name": self.name,
            "address": self.address,
        }

    def _unshare(self) -> list[str]:
        ahead = str(self.plan.uptime)
        return ["--time", "--monotonic", ahead, "--boottime", ahead] if self.plan.uptime else []


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Hosts:
    """Starts hosts by their plans. ``close`` leaves no process, device, mount or file."""

    def __init__(self, plans: Sequence[Plan], *, seed: int = 0) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="orch-hosts-", dir="/run"))
        self.directory.chmod(0o711)
        self.seen = sorted({str(ROOT), sys.prefix, sys.base_prefix, *_interpreters()})
        self.hosts = [Host(number, plan, self) for number, plan in enumerate(plans, 1)]
        self._write_names()
        self._build_wall_clock()
        disks = [("shared", 512, 0), *((f"{h.name}/home", h.plan.home_mebibytes, h.plan.uid) for h in self.hosts)]
        options = {"directory": str(self.directory), "disks": disks, "seed": seed}
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--net", sys.executable, "-I", "-S", str(SITE), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
            for host in self.hosts:
                host.boot()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Host:
        """Return the host with that number, from 1."""
        return self.hosts[number - 1]

    def _write_names(self) -> None:
        addresses = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            own = self.directory / host.name
            (own / "home").mkdir(parents=True)
            uid = host.plan.uid
            (own / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\ntrainer:x:{uid}:{uid}::{host.home}:/bin/sh\n")
            (own / "group").write_text(f"root:x:0:\ntrainer:x:{uid}:\n")
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")

    def _build_wall_clock(self) -> None:
        if any(host.plan.clock for host in self.hosts):
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-O2", "-o", str(self.wall_clock), str(WALL_CLOCK), "-ldl"], check=True
            )
            self.wall_clock.chmod(0o755)

    @property
    def wall_clock(self) -> Path:
        """The library that moves a host's wall clock."""
        return self.directory / "wall_clock.so"

    # -- the site

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command to the site; return its answer."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}
        assert "error" not in answer, f"the site of the hosts: {answer['error']}"
        return answer

    # -- links

    def link(self, source: Host, target: Host, **link: Any) -> None:
        """Change one direction between two hosts; without options the link works perfectly again."""
        self.ask("link", source=source.number, target=target.number, link=asdict(Link(**link)))

    def between(self, one: Host, other: Host, **link: Any) -> None:
        """Change both directions between two hosts."""
        self.link(one, other, **link)
        self.link(other, one, **link)

    def part(self, *apart: Host) -> None:
        """Cut these hosts off from all others, but not from one another."""
        for host in apart:
            for other in self.hosts:
                if other not in apart:
                    self.between(host, other, cut=True)

    def everywhere(self, **link: Any) -> None:
        """Change every link; without options all work perfectly again."""
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    self.link(host, other, **link)

    def close(self) -> None:
        """End all hosts. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        finally:
            self._process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)


def _interpreters() -> list[str]:
    """Return the real directories of the interpreter and its packages."""
    return [str(Path(sys.executable).resolve().parents[1])]
