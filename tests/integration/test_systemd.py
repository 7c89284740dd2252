"""The unmodified units, under a systemd of their own: in namespaces, on an overlay of this machine's file system.

Nothing of the machine is changed: what systemd and the units write goes to memory, and the network is a loopback device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.stack import PATIENCE_SECONDS, kill_all, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
VENV = Path(sys.executable).parent
INIT = """\
set -e
root=$1
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for place in run tmp dev/shm; do mount -t tmpfs tmpfs "$root/$place"; done
ip link set lo up
exec env -i container=orch-test PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /lib/systemd/systemd \
  --system --unit=orch-test.target --log-target=console
"""
TARGET = """\
[Unit]
Description=The units under test
AllowIsolate=yes
DefaultDependencies=no
Wants=orch-ray.service orch.service
"""
# Units of this machine that have no use in namespaces.
MASKED = ("systemd-udevd", "systemd-udev-trigger", "systemd-networkd", "systemd-resolved", "console-getty")
MASKED += ("systemd-modules-load", "systemd-sysctl", "systemd-remount-fs")
JOB = "name: steps\nentrypoint: sleep 600\nresources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}\n"

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces"),
    pytest.mark.skipif(not SYSTEMD.exists(), reason="there is no systemd on this machine"),
]


class Machine:
    """A systemd with this machine's files, and the units installed as docs/operations/services.md says."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, base / "root"
        self.log = base / "console.log"
        self._process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Mount the overlay, and install the units."""
        self._mount("tmpfs", self.base, "size=2g")
        for name in ("upper", "work", "root"):
            (self.base / name).mkdir()
        lower = f"lowerdir=/,upperdir={self.base}/upper,workdir={self.base}/work"
        self._mount("overlay", self.root, lower)
        units = self.root / "etc/systemd/system"
        shutil.rmtree(units)
        shutil.copytree(ROOT / "deploy/systemd", units)
        (units / "orch-test.target").write_text(TARGET)
        for name in MASKED:
            (units / f"{name}.service").symlink_to("/dev/null")
        (self.root / "etc/fstab").write_text("")
        sysusers = self.root / "usr/lib/sysusers.d/orch.conf"
        sysusers.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "deploy/systemd/orch.sysusers", sysusers)
        subprocess.run(["chroot", self.root, "systemd-sysusers", "/usr/lib/sysusers.d/orch.conf"], check=True)
        self._install_orch(units)

    def _install_orch(self, units: Path) -> None:
        """Link what pip would install into /opt/orch; open the interpreter's directories, which may be root's alone."""
        shutil.rmtree(self.root / "opt/orch", ignore_errors=True)
        (self.root / "opt/orch/share").mkdir(parents=True)
        for name in ("bin", "lib", "pyvenv.cfg"):
            (self.root / "opt/orch" / name).symlink_to(VENV.parent / name)
        (self.root / "opt/orch/share/orch").symlink_to(ROOT / "deploy")
        for path in (Path(sys.executable).resolve(), VENV, ROOT / "deploy"):
            for directory in (path, *path.parents):
                here = self.root / directory.relative_to("/")
                if here.stat().st_mode & 0o055 != 0o055:
                    here.chmod(here.stat().st_mode | 0o055)
        if Path(sys.executable).resolve().is_relative_to("/root") or VENV.is_relative_to("/root"):
            extra = units / "orch-backup.service.d"
            extra.mkdir()
            (extra / "interpreter.conf").write_text("[Service]\nProtectHome=read-only\n")

    @staticmethod
    def _mount(kind: str, target: Path, options: str) -> None:
        command = ["mount", "-t", kind, "-o", options, kind, str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")

    def boot(self) -> None:
        script = self.base / "init.sh"
        script.write_text(INIT)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *["-m", "-p", "-f", "-C", "-i", "-u", "-n"], "--", "sh", str(script), str(self.root)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until("systemd runs", self._is_up, interval=0.1)

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.skip(f"systemd does not run in namespaces here: {self.log.read_text()[-500:]}")
        return self.do("systemctl", "is-active", "sysinit.target", check=False) == "active"

    def init(self) -> int | None:
        """Return the process id of systemd; None if it does not run."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children()
        return children[0].pid if children else None

    def do(self, *command: str, check: bool = True, seconds: float = PATIENCE_SECONDS) -> str:
        """Run a command inside the machine; return what it prints, empty if systemd does not run."""
        init = self.init()
        if init is None:
            return ""
        inside = [
            "nsenter",
            "-t",
            str(init),
            *["-m", "-p", "-n", "-i", "-u", "-C", "-r", "-w"],
            "env",
            "-i",
            "PATH=/usr/bin:/bin",
        ]
        done = subprocess.run([*inside, *command], capture_output=True, text=True, check=False, timeout=seconds)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def orch(self, *arguments: str, check: bool = True) -> str:
        as_orch = ("setpriv", "--reuid=orch", "--regid=orch", "--init-groups", "env", "HOME=/var/lib/orch")
        return self.do(*as_orch, "ORCH_HOME=/var/lib/orch", "/opt/orch/bin/orch", *arguments, check=check)

    def listening(self) -> set[str]:
        """Return the addresses that TCP sockets listen on, IPv4 and IPv6, in hexadecimal digits."""
        rows = [row.split() for table in ("tcp", "tcp6") for row in self._table(table)]
        return {row[1].partition(":")[0] for row in rows if row[3] == "0A"}

    def _table(self, name: str) -> list[str]:
        return Path(f"/proc/{self.init()}/net/{name}").read_text().splitlines()[1:]

    def jobs(self) -> list[dict[str, object]]:
        told = self.orch("status", "--json", check=False)
        return json.loads(told)["jobs"] if told else []

    def ready(self) -> bool:
        return self.orch("status", "--json", check=False) != ""

    def close(self) -> None:
        if self._process is not None:
            everything = psutil.Process(self._process.pid).children(recursive=True) if self.init() else []
            kill_all(lambda: [p for p in everything if p.is_running()], "the machine under test")
            self._process.kill()
            self._process.wait()
        for place in (self.root, self.base):
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Yield a machine whose units run."""
    if Path("/tmp") in ROOT.parents:
        pytest.skip("the units have a /tmp of their own, and this checkout with its interpreter lies below /tmp")
    made = Machine(Path(tempfile.mkdtemp(prefix="orch-s-")))
    try:
        made.install()
        made.boot()
        yield made
    finally:
        made.close()


def test_the_units_run_and_a_restart_of_the_daemon_leaves_jobs_alone(machine: Machine) -> None:
    wait_until("the daemon takes jobs", machine.ready, interval=0.5)
    (machine.root / "srv/job.yaml").write_text(JOB)
    machine.orch("submit", "/srv/job.yaml")
    wait_until("the job runs", lambda: [j["state"] for j in machine.jobs()] == ["RUNNING"], interval=0.5)
    before = machine.do("systemctl", "show", "orch", "-p", "MainPID")

    machine.do("systemctl", "restart", "orch")
    wait_until("the daemon takes jobs again", machine.ready, interval=0.5)
    assert machine.do("systemctl", "show", "orch", "-p", "MainPID") != before
    (job,) = machine.jobs()
    assert (job["state"], job["attempt"]) == ("RUNNING", 1)

    done = machine.do("systemctl", "start", "orch-backup", check=False)
    told = machine.do("systemctl", "status", "--full", "--no-pager", "orch-backup", check=False)
    assert machine.do("systemctl", "show", "orch-backup", "-p", "Result") == "Result=success", (done, told)
    assert "orch-" in machine.do("ls", "/var/lib/orch/backups")
    addresses = machine.listening()
    assert addresses
    assert all(address.endswith("0100007F") for address in addresses), "all are 127.0.0.1, as the kernel writes it"

    machine.do("systemctl", "stop", "orch", "orch-ray", seconds=400)
    assert machine.do("systemctl", "is-failed", "orch", "orch-ray", check=False).split() == ["inactive", "inactive"]
    assert machine.do("pgrep", "-u", "orch", check=False) == "", "nothing of it is left"
